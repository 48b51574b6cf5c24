"""Write what was shown to be faster (ask=gains, tune=) in forms that a user can take over: options
as YAML, and lines for the example tuner plugin of NCCL (plugins/tuner/example).

Of that plugin two facts count: with -1 channels, and without a line, a collective runs on one
channel. So every size has a line, with the algorithm and the channels of NCCL's log.
"""

import math
import re
from pathlib import Path

import yaml

from analysis.nccl.log import AlgorithmChoice
from analysis.study.asked import Asked, RaceState, answer, recommended
from analysis.validity.effective import read_logs
from benchmarks.record import safe_files
from launch.study.study_folder import StudyFolder

OPTIONS, TUNER = "tuned.yaml", "tuner.csv"
MOST_BYTES = 2**32 - 1  # "all sizes" in the README of the plugin
WORDS = re.compile(r"(?<=[tS])(?=[DCT])")  # CollNetDirect is collnet_direct, NVLSTree nvls_tree
HEAD = """\
# NCCL_TUNER_PLUGIN=<library of plugins/tuner/example> NCCL_TUNER_CONFIG_FILE=<this file>
# All-reduce alone: the plugin runs a collective that has no line here on one channel.
"""


def write_tuned(study: StudyFolder, asked: Asked, race: RaceState) -> list[Path]:
    """Write the files of a question, and remove those of an earlier one; return those that there
    are. Raises OSError."""
    tree: dict[str, dict[str, object]] = {}
    for name, value in recommended(asked, race).items():
        group, _, option = name.partition(".")
        tree.setdefault(group, {})[option or "name"] = yaml.safe_load(value)
    comment = "".join(f"# {line}\n" for line in answer(asked, race))
    options = comment + yaml.safe_dump(tree) if tree else ""
    written = []
    for name, text in ((OPTIONS, options), (TUNER, _tuner(study, race))):
        path = study.folder / name
        if text:
            safe_files.write_whole(path, text.encode())
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def _tuner(study: StudyFolder, race: RaceState) -> str:
    """Return the file for the sizes that were searched; '' where none has a gain."""
    stages = [stage for stage in race.stages if stage.size_bytes is not None]
    if race.pending or not any(stage.winner for stage in stages):
        return ""
    choices: dict[int, AlgorithmChoice] = {}
    for stage in stages:
        record = stage.records[stage.winner or 0][0]
        log = read_logs(study.folder_of(record).tuning, record.cell.every_host)
        for choice in log.algorithms if log else ():
            if choice.size == stage.size_bytes and choice.function in (None, "AllReduce"):
                choices[choice.size] = choice
    nodes = max(1, len(record.cell.hosts))
    return tuner_csv(choices, nodes, record.cell.world_size) if len(choices) == len(stages) else ""


def tuner_csv(choices: dict[int, AlgorithmChoice], nodes: int, ranks: int) -> str:
    """Return the plugin's lines for choices of all-reduce by size in bytes; '' where a log does not
    say the channels. A size stands for those nearer to it than to others, as a ratio."""
    text, least = HEAD, 0
    sizes = sorted(choices)
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        choice = choices[size]
        if choice.channels is None:
            return ""
        most = math.isqrt(size * following) if following else MOST_BYTES
        algorithm = WORDS.sub("_", choice.algorithm).lower()
        text += f"allreduce,{least},{most},{algorithm},{choice.protocol.lower()},"
        text += f"{choice.channels},{nodes},{ranks},-1,-1\n"
        least = most + 1
    return text
