"""Watch any running command with the instruments of a cell, and say what was seen.

`python -m launch observe -- COMMAND…` changes no line of the command's programs: Python starts the
instruments in each process that imports torch. There is no study and no baseline.
"""

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from analysis.console import print_text
from analysis.findings.slow_rank import FOREIGN_LOAD, LINK, Delay, Diagnosis, diagnosis
from analysis.nccl.log import read_nccl_log
from analysis.report.report_files import Report, write
from analysis.text import count, join_words, redact
from benchmarks.agent.sampler import Sampler
from benchmarks.record import CellFolder
from benchmarks.record.lines import read_lines
from benchmarks.record.safe_files import make_folder, write_whole
from benchmarks.record.safe_text import INTERRUPTED
from conf.host import TOKEN
from conf.options import Refused
from launch.engines.environment import NCCL_SUBSYSTEMS, ROOT
from launch.machine import devices

REPORT_SECONDS = 30.0
HOOKS = ROOT / "benchmarks" / "script" / "hooks"
KINDS = {
    "loader": "it waits for its data loader",
    "compute": "it computes for longer",
    "sleep": "it sleeps",
    "clock": "all parts are slower alike, as at a lower clock",
    FOREIGN_LOAD: "it waits for a core that other programs use",
}


def observe(command: Sequence[str], output_dir: Path) -> int:
    """Run a command, say what was seen, and return 1 if it failed, 130 after Ctrl-C, else 0.

    Raises Refused: there is no such command.
    """
    if shutil.which(command[0]) is None:
        raise Refused(f"COMMAND={command[0]}: it is not found; expected a program")
    folder = CellFolder((output_dir / "observed" / time.strftime("%Y%m%d-%H%M%S")).absolute())
    for path in (folder.path / "ranks", folder.path / "nccl"):
        make_folder(path)
    token = secrets.token_hex(8)
    uuids = [device.uuid for device in devices.look("auto", os.environ).devices if device.uuid]
    with Sampler(folder, uuids, token):
        process = subprocess.Popen(command, env=os.environ | _variables(folder, token))
        interrupted = _wait(process, folder, command)
    seen = _watched(folder)
    said = _sentences(seen, folder, command)
    line = redact(shlex.join(command))
    content = {"command": line, "status": process.returncode, "said": said, **asdict(seen)}
    write_whole(folder.path / "observed.json", json.dumps(content, indent=2).encode())
    write(Report("Observed", line, tuple(said[:-1]), {said[-1]: ""}, ()), folder.path / "report")
    print_text("\n".join([*said, f"Lines, page and record: {folder.path}"]))
    return INTERRUPTED if interrupted else int(process.returncode != 0)


def _variables(folder: CellFolder, token: str) -> dict[str, str]:
    settings = {"lines": f"{folder.path}/ranks/{{rank}}.jsonl"}
    python_path = filter(None, (str(HOOKS), os.environ.get("PYTHONPATH")))
    added = {
        "PYTHONPATH": os.pathsep.join(python_path),
        "RINGSIDE_SCRIPT": json.dumps(settings),
        TOKEN: token,
        "TORCH_NCCL_ENABLE_TIMING": "1",
    }
    if "NCCL_DEBUG" not in os.environ:
        added |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": NCCL_SUBSYSTEMS}
        added["NCCL_DEBUG_FILE"] = folder.nccl_log_pattern
    return added


def _wait(process: subprocess.Popen[bytes], folder: CellFolder, command: Sequence[str]) -> bool:
    """Wait for the command, and return whether Ctrl-C ended it; a terminal sends it that, too."""
    interrupted = False
    while process.poll() is None:
        try:
            process.wait(REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                print_text("\n".join(_sentences(_watched(folder), folder, command)[:-1]))
        except KeyboardInterrupt:
            if interrupted:
                process.kill()
            elif not sys.stdin.isatty():
                process.terminate()
            interrupted = True
    return interrupted


def _watched(folder: CellFolder) -> Diagnosis:
    lines = {}
    for path in (folder.path / "ranks").glob("*.jsonl"):
        lines[int(path.stem)] = list(read_lines(path))
    return diagnosis(lines)


def _sentences(seen: Diagnosis, folder: CellFolder, command: Sequence[str]) -> list[str]:
    """Return what was seen; the last sentence says what was not measured."""
    said = []
    if seen.steps:
        low_ms, high_ms = seen.spread_ms
        said.append(
            f"{seen.samples_per_s:,.1f} samples/s on {count(seen.ranks, 'rank')}: a step takes "
            f"{seen.step_ms:.1f} ms, nine of ten between {low_ms:.1f} and {high_ms:.1f} ms."
        )
    said += [_delay_sentence(delay, seen) for delay in seen.delays]
    if seen.unjudged:
        said.append(f"No rank is judged: {seen.unjudged}.")
    elif not seen.delays:
        said.append(
            f"Nothing wrong was seen in {count(seen.steps, 'step')}. A rank that is late by "
            f"{seen.least_ms:.1f} ms in every step would have been named."
        )
    said += _nccl_sentences(folder)
    script = next((index for index, word in enumerate(command) if word.endswith(".py")), 0)
    run = shlex.quote("benchmark.run=" + shlex.join(command[script:]))
    said.append(
        "No efficiency is claimed: that needs a run on one GPU, as of "
        f"python launch.py -m gpus=scale benchmark=script {run}"
    )
    return [redact(sentence) for sentence in said]


def _delay_sentence(delay: Delay, seen: Diagnosis) -> str:
    cost = f"The job loses up to {delay.samples_per_s:,.1f} samples/s by it."
    if delay.kind == LINK:
        peer = "another host" if delay.peer is None else f"rank {delay.peer}"
        return (
            f"The link between rank {delay.rank} and {peer} is slow: all ranks wait {delay.ms:.1f} "
            f"ms of a step for data ({delay.part} while data is under way). {cost}"
        )
    where = f"{delay.part} the forward" if delay.part == "before" else f"in the {delay.part}"
    if delay.bucket is not None:
        layers = join_words(list(seen.layers[delay.bucket]), 4)
        where += f" of bucket {delay.bucket} (layers {layers})"
    return (
        f"Rank {delay.rank} is slow: the others wait {delay.ms:.1f} ms of a step for it, mostly "
        f"{where}; {KINDS[delay.kind]}. {cost}"
    )


def _nccl_sentences(folder: CellFolder) -> list[str]:
    logs = sorted((folder.path / "nccl").glob("*.log"))
    if not logs:
        return []
    log = read_nccl_log(logs)
    pairs: defaultdict[str, list[str]] = defaultdict(list)
    for pair, transports in log.transports.items():
        pairs[" and ".join(transports)].append(pair)
    used = [f"{transport} ({join_words(ranks)})" for transport, ranks in pairs.items()]
    return [f"NCCL {log.version} used {join_words(used)}."]
