"""What every name on screen, page and in MLflow means: metrics, codes of validity, columns, words.

`python -m analysis explain NAME` prints one, `python -m analysis reference [FILE]` all of them.
"""

import argparse
import difflib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import NamedTuple

from analysis.validity.checks import CHECKS, OTHER_CODES
from analysis.validity.fast_paths import FAST_PATHS, NcclPath
from benchmarks.record.metrics import METRICS, entry_of
from benchmarks.record.safe_files import write_whole
from conf.options import NO_NEAR_NAME, suggestion

MOST_ALIKE = 6  # names that a part of one explains
NEAR = 0.75  # of difflib's ratio
ORDER = ("invalid", "suspect", "finding", "unchecked")
DETECTS = (
    "the smallest true difference that this many runs with this scatter find with 80 % probability"
)
# Words and columns that are no metric and no code.
WORDS = {
    "±": "half the 95 % prediction interval: 95 of 100 further runs lie that close to this one; "
    "for a difference, half its confidence interval",
    "one run": "shown instead of ± where run-to-run variation is unknown; repeats=3 measures it",
    "configuration": "model, strategy, GPUs and settings; a run is one measurement of it",
    "step ms": "the time of a training step: its images on all ranks ÷ images/s",
    "GPUs": "a run's GPU ids, in rank order; in a table of subsets, how many GPUs",
    "NCCL": "the NCCL settings that were asked for; `–` is NCCL's default",
    "state": "finished, failed, interrupted, not started, or done before (by an earlier command)",
    "validity": "valid, suspect or invalid, with the codes of the checks that say so",
    "valid": "every check that could run was passed",
    "suspect": "the numbers are used, with a mark: the check named beside it doubts them",
    "invalid": "the check named beside it found the numbers wrong; no baseline and no "
    "comparison uses them",
    "rehearsal": "a trial of a run for another machine (rehearse=); it has no timings",
    "unchecked": "a check could not run; its message says why",
    "not applicable": "the check does not apply to this run",
    "finding": "a fact worth knowing; the numbers stay valid",
    "transport": "how NCCL joined the GPUs, by its log: P2P, SHM or NET",
    "link class": "the path between two GPUs, as in nvidia-smi topo -m: NV# (NVLinks), PIX, PXB, "
    "PHB, NODE or SYS",
    "result": "the main number of a benchmark that trains nothing",
    "repeat": "which round of repeats= a run belongs to",
    "run": "which one of a configuration: first, again (a repeat) or drift (the sweep's first run, "
    "measured again at its end)",
    "drift": "the first run measured once more at the end: it shows whether the machine changed",
    "bar": "images per second, as a bar",
    "baseline": "the same configuration on each GPU alone; efficiency is against the slowest",
    "nodes": "the hosts of a run",
    "batch": "images or samples per rank and step",
    "exchange_alone": "method of a strategy's Python class that exchanges gradients, without "
    "forward and backward; where it is missing, exposed communication is unknown (trainers/OWN.md)",
    "overhead": "time that a strategy adds to a step, on one or more GPUs (strategy/cost_ms)",
    "straggler": "the rank that came last, for which the others waited",
    "overhead ms": "what a strategy adds to a step: strategy/cost_ms",
    "speed-up": "the rate ÷ the rate of the slowest of these GPUs alone",
    "slowest alone": "the rate of the slowest of these GPUs, measured on its own",
    "by hosts": "efficiency over hosts: the rate ÷ (hosts × the rate of the slowest host alone)",
    "detectable": DETECTS,
    "of ideal": "in the waterfall: the remaining or the lost rate, as a share of the ideal rate",
    "exchange GB/s": "comm/busbw_gb_per_s of the gradient exchange",
    "fixed ms": "what an exchange costs at zero bytes: the intercept of the fitted line",
    "residuals ms": "the distance of each measured time from the fitted line",
    "assumed_network": "the forecast rests on --net: no run measured the network",
    "reference": "the time to move an exchange's bytes at the rate of one large transfer on the "
    "same path, without waiting",
    "ring": "the reference rate is measured with one large NCCL message around all GPUs",
    "memory_copy": "the reference rate of CPU workers is measured with copies in host memory",
    "host_link": "the reference rate is measured while all GPUs copy to and from host memory "
    "at once",
    "host_memory": "the reference rate is measured with copies and sums of a kvstore server in "
    "host memory",
    "server_link": "the reference rate is measured while all ranks copy to the server's GPU at "
    "once",
    "net_link": "the reference rate is measured with one large message between hosts",
    "fastest": "the highest rate of the configurations with enough repeats",
    "tied": "no significant difference from the fastest",
    "not significant": "the runs show no difference; `detects` gives the smallest one that they "
    "could have found",
    "n. s.": "not significant",
    "cannot tell": "too few repeats, or the configurations differ in more than one option",
    "detects": DETECTS,
}
# {command of python -m analysis: {column or word of its tables: what it means}}
COLUMNS = {
    "compare": {
        "PASS": "the measured slowdown is below --limit, and these runs could detect one "
        "equal to --limit. A true slowdown close to --limit may pass or fail",
        "FAIL": "slower by --limit or more, and the slowdown is significant",
        "INCONCLUSIVE": "these runs cannot show a slowdown of --limit, or all are suspect",
    },
    "subsets": {
        "links": "how many pairs of GPUs have each link class",
        "members": "how many subsets have this pattern of links",
        "representative": "one of the subsets with this pattern of links; measuring it is enough",
        "second member": "another subset with the same links, to test that both perform alike",
    },
    "place and subsets": {
        "all rings": "total bandwidth of NCCL's rings through the GPUs, the same for any order. "
        "“nominal”: by data sheets. “no NVLink ring”: over PCIe (“SYS”: and between sockets), "
        "speed unknown"
    },
    "place": {
        "GPUs in ring order": "each GPU sends to the next one, and the last to the first",
        "links of this ring": "the link classes between neighbours in this ring",
        "worst order": "the best subset, in the rank order that gives the slowest ring",
        "slowest GB/s": "the slowest measured link of this ring",
        "sum GB/s": "the total of this ring's measured link bandwidths",
    },
    "p2p": {
        "P2P enabled": "with peer access, GPUs copy straight to each other",
        "P2P disabled": "without peer access, copies between GPUs go through host memory",
    },
    "trace": {
        "wait ms": "how long ranks waited in a collective for the one that came last",
        "gap µs": "median pause of a GPU between two kernels or copies",
        "host step ms": "median time of a step on the host; its kernels may run later",
        "exposed ms/step": "exposed communication per step, on average",
        "… in gaps": "the part of the column before it that lies in pauses of at most 10 µs "
        "between compute kernels",
        "overlapped ms": "communication while a kernel computed",
        "transfer ms": "time of a collective after its last rank arrived",
        "ran on": "the GPUs on which a rank's kernels ran",
        "compute ms": "the time in which kernels other than collectives ran",
        "communication ms": "the time in which kernels of collectives ran, waiting included",
        "matched": "collectives that were found on every rank",
    },
    "nccl-tests": {
        "algbw": "bytes ÷ time; busbw is the resulting rate on each link",
        "#wrong": "values of the result that were wrong",
        "redop": "the reduction, such as sum",
        "in place": "the result replaces the input. The columns to the left are for out of place",
    },
    "predict": {
        "forecast ms": "the expected time; the line under it is its 90 % prediction interval",
        "measured step ms": "the step time of the held-out configuration",
        "measured overhead ms": "time that the strategy added to a measured step: strategy/cost_ms",
        "basis": "interpolated (no more GPUs than were measured), extrapolated (more), or "
        "assumed_network (the network is as --net says)",
        "naive ms": "the naive forecast: overhead and compute as in the most similar run",
        "naive error": "the error of the naive forecast, `naive ms`; a good forecast has less",
        "after backward ms": "the part of the exchange that goes on after backward",
        "slowdown ms": "how much longer compute takes while the exchange runs",
        "on one GPU ms": "what the strategy adds to a step on a single GPU",
        "in interval": "whether the measured step lies in the forecast's interval",
        "held-out configuration": "a measured configuration, forecast from the others only",
    },
    "advise": {
        "vs. best": "how far the rate is behind the best; ~: may be as fast",
        "source": "the number of runs behind a rate, or that it is a forecast",
    },
    "verify": {
        "recomputed": "the value computed again from raw samples; `recorded`: that in the record"
    },
}


# {fast path: what it is}
PATHS = {
    "P2P setting": "the largest distance at which GPUs copy straight to each other",
    "SHM setting": "GPUs without a direct path exchange through shared host memory",
    "algorithm, protocol": "NCCL's algorithm (Ring, Tree, …) and protocol (LL, LL128, Simple)",
    "channels": "the number of parallel channels of a NCCL collective",
    "GDR": "GPUDirect RDMA: the network card reads and writes GPU memory itself",
    "PXN": "traffic for another host goes over NVLink to the GPU beside the network card",
    "CollNet, SHARP": "switches of the network sum the gradients",
    "NVLS": "NVLink SHARP: NVSwitches sum the gradients",
    "symmetric kernels": "NCCL's faster kernels for buffers in symmetric memory",
    "zero-CTA policy": "NCCL moves data by copy engines, which leaves the SMs to compute",
    "registered buffers": "NCCL sends from the user's buffers without copying them first",
    "DDP buckets": "DDP reduces gradients in several buckets while backward goes on",
    "static graph": "DDP is told that all steps are alike, and orders buckets as gradients arrive",
    "bucket views": "gradients are views of DDP's buckets, so nothing is copied into them",
    "half-precision hook": "gradients are sent in fp16 or bf16",
    "accumulation": "gradients of several backward passes are exchanged once",
    "FSDP prefetch": "FSDP gathers the weights of the next layer while this one computes",
    "channels_last": "convolutions read memory in the order that tensor cores use",
    "TF32": "float32 matmuls use the tensor cores' TF32",
    "autocast": "convolutions and matmuls compute in half precision",
    "torch.compile": "the model runs as compiled code",
    "whole graph": "torch.compile made one graph of the model, without breaks",
    "CUDA graph": "a step is replayed as a graph (optimize=graph), not launched kernel by kernel",
    "fused optimizer": "one kernel updates many weights",
    "pinned memory": "batches are copied to the GPU from pinned memory, without waiting",
    "loader workers": "other processes load batches while the GPU computes",
}


class Definition(NamedTuple):
    """What a name means: a metric, a code of validity, a column or a word."""

    name: str
    meaning: str
    formula: str = ""
    unit: str = ""
    verdict: str = ""  # of a code
    remedy: str = ""
    where: str = ""  # it stands

    @property
    def text(self) -> str:
        """The definition for a terminal."""
        kind = self.verdict or self.where
        kind = f" ({kind})" if kind else ""
        width = min(98, get_terminal_size((98, 24)).columns)
        lines = textwrap.wrap(f"{self.name}{kind}: {self.meaning}", width)
        unit = self.unit
        if unit == "%":
            unit = "% (stored as a fraction: 0.5 is 50 %)"
        how = "formula" if any(sign in self.formula for sign in "÷×−") else "note"
        for label, value in ((how, self.formula), ("unit", unit), ("to do", self.remedy)):
            if value:
                lines += textwrap.wrap(
                    value, width, initial_indent=f"  {label:<9}", subsequent_indent=" " * 11
                )
        return "\n".join(lines)


def definitions() -> dict[str, Definition]:
    """Return the definition of every name; a column that shows a metric has the metric's."""
    named = {name: Definition(name, meaning) for name, meaning in WORDS.items()}
    for command, columns in COLUMNS.items():
        for name, meaning in columns.items():
            named[name] = Definition(name, meaning, where=f"in python -m analysis {command}")
    for entry in METRICS.values():
        named[entry.name] = Definition(entry.name, entry.title, entry.formula, entry.unit)
        if entry.column:
            named.setdefault(entry.column, named[entry.name])
    for path in FAST_PATHS:
        proof = path.evidence
        if "{" in proof:
            proof = re.sub(r"{\w+}", "…", proof)
            proof = f"“{proof}” in the profile of one step"
        asked_by = path.asked_by
        if isinstance(path, NcclPath) and path.values:
            asked_by += f"={path.values[0]}"
        meaning = f"{PATHS[path.name]}. Set by {asked_by}. Proof that it was used: {proof}"
        named[path.name] = Definition(path.name, meaning)
    for code, (verdict, meaning, remedy) in OTHER_CODES.items():
        named[code] = Definition(code, meaning, verdict=verdict, remedy=remedy)
    for check in CHECKS:
        named[check.code] = Definition(
            check.code, check.meaning, verdict=check.severity, remedy=check.remedy
        )
    return named


def explained(name: str, topics: Sequence[str] = ()) -> str:
    """Return the definition of a name for a terminal.

    Raises ValueError for an unknown one, which may be meant for one of `topics`.
    """
    named = definitions()
    form = name
    if name not in named:
        in_any_case = {entry.replace("/", "_"): entry for entry in named}  # a column of cells()
        in_any_case |= {entry.lower(): entry for entry in named}
        # Else one of several names of a form: stage/copy_ms.
        form = in_any_case.get(name.lower()) or entry_of(name).name
    if form not in named:
        alike = [entry for entry in named if name in re.split("[/_]", entry)]
        if alike:  # a part of a metric's name: busbw
            return "\n\n".join(named[entry].text for entry in alike[:MOST_ALIKE])
        near = [entry for entry in (*topics, *named) if _is_near(name, entry)]
        hint = suggestion(name, near, sure=1.0)
        if hint == NO_NEAR_NAME:
            hint = "python -m analysis reference lists all names"
        raise ValueError(f"{name}: unknown name; {hint}")
    return named[form].text


def _is_near(name: str, entry: str) -> bool:
    """Tell whether a part of a name is nearly one of an entry: `again` is no `margin`."""
    parts, others = re.split("[/_. ]", name), re.split("[/_. ]", entry)
    return any(difflib.get_close_matches(part, others, cutoff=NEAR) for part in parts)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    if parser.get_default("command") == "explain":
        parser.add_argument("name", nargs="+", help="a metric, code, column or word, as printed")
    else:
        parser.add_argument("file", nargs="?", type=Path, help="where to; default: the terminal")


def run(arguments: argparse.Namespace) -> int:
    """Print definitions, or write all of them. Raises ValueError for an unknown name."""
    if arguments.command == "explain":
        print(explained(" ".join(arguments.name)))
    elif arguments.file:
        write_whole(arguments.file, reference().encode())
    else:
        print(reference(), end="")
    return 0


def reference() -> str:
    """Return all definitions as Markdown."""
    lines = [
        "# Reference",
        "",
        "Made by `python -m analysis reference`; `python launch.py -h NAME` explains one name.",
        "",
        "## Metrics",
        "",
        "A value in % is stored as a share of 1. `{one|all}` is one of these words, `<way>` any.",
        "",
        "| metric | unit | meaning | formula |",
        "|---|---|---|---|",
    ]
    codes = [entry for entry in definitions().values() if entry.verdict]
    for entry in METRICS.values():
        cells = (f"`{entry.name}`", entry.unit, entry.title, entry.formula)
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    lines += ["", "## Validity codes", "", "| code | verdict | meaning | what to do |"]
    lines.append("|---|---|---|---|")
    for verdict in ORDER:
        for code in codes:
            if code.verdict.startswith(verdict):
                cells = (f"`{code.name}`", code.verdict, code.meaning, code.remedy)
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Words and columns", "", "| word | meaning |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in WORDS.items()]
    for command, columns in COLUMNS.items():
        for name, meaning in columns.items():
            lines.append(f"| {name} (in `python -m analysis {command}`) | {meaning} |")
    return "\n".join(lines) + "\n"
