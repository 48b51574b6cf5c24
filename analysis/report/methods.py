r"""The setup paragraph of a paper, made from a study's records; what they do not say is left out.

`methods.tex` is a fragment to \input; `ringside.bib` is what it cites.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from analysis.findings.examine import Findings
from analysis.report.latex import latex
from analysis.report.section import RATE, words_of
from analysis.study.names import format_option, unit_of
from analysis.study.provenance import hardware, mapping
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import count, join_words
from benchmarks.record import Record

# As README has it.
BIBTEX = """\
@software{ringside, title = {Ringside: scaling studies of distributed training},
  author = {{The Ringside developers}}, year = {2026}, version = {0.1.0}}
"""
SOFTWARE = {
    "torch": "PyTorch", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "python": "Python",
}  # fmt: skip
MOST_VALUES = 8  # of one fact; of more the number is given
Fact = Callable[[Record], object]


def methods(study: Study, findings: Findings) -> str:
    """Return the paragraph as LaTeX; of a study without usable records a comment."""
    if not study.usable:
        return "% No usable run.\n"
    commit = _worded(study.usable, " (commit", lambda record: _of(record, "git", "commit"))
    lines = [*setup(study), *protocol(study, findings)]
    measured = rf"All numbers were measured with Ringside{latex(commit and commit + ')')}"
    text = [rf"{measured}~\cite{{ringside}}.", *map(latex, map(words_of(study), lines))]
    return "\n".join(text) + "\n"


def setup(study: Study) -> list[str]:
    """Return the machine, its software, and what was trained on it with which settings."""
    used = study.usable
    trained = [record for record in used if record.cell.trains]
    # A machine without a name is none.
    known = [record for record in used if "unknown" not in hardware(record)]
    machine = [_worded(known, "Machine:", hardware)]
    machine.append(_worded(used, "CPU", lambda record: _of(record, "cpu", "model")))
    software = []
    if unit_of(study) == "GPUs":
        machine.append(_worded(used, "links between GPUs", _links))
        software = [_worded(used, "NVIDIA driver", lambda record: _of(record, "gpu", "driver"))]
    for key, name in SOFTWARE.items():
        software.append(_worded(used, name, partial(_of, part="versions", name=key)))
    settings: dict[str, None] = {}
    for record in trained:
        for name, value in record.cell.nccl.items():
            settings[format_option(name, str(value))] = None
    facts = [
        _worded(trained, "Model", lambda record: record.cell.model.name),
        _worded(trained, "batch", batch_of),
        _worded(trained, "precision", lambda record: record.cell.precision),
        _worded(trained, "execution", lambda record: record.cell.optimize),
        _worded(trained, "optimizer", lambda record: record.cell.optimizer.name),
        _worded(trained, "data", lambda record: record.cell.data.get("name", "synthetic")),
        _worded(trained, "strategies", lambda record: named(record, "strategy")),
        f"NCCL settings {join_words(list(settings), MOST_VALUES)}" if settings else "",
    ]
    others = [record for record in used if not record.cell.trains]
    benchmarks = _worded(others, "Benchmarks:", lambda record: named(record, "benchmark"))
    lines = []
    for start, words in (("", machine), ("Software: ", software), ("", [benchmarks]), ("", facts)):
        text = "; ".join(filter(None, words))
        if text:
            lines.append(f"{start}{text}.")
    return lines


def protocol(study: Study, findings: Findings) -> list[str]:
    """Return what was repeated, in which order, and how efficiency and intervals were made."""
    repeats = sorted({len(runs.records) for runs in study.runs})
    ends = " to ".join(dict.fromkeys(map(str, (repeats[0], repeats[-1]))))
    lines = [
        f"{count(len(study.runs), 'configuration was', 'configurations were')} measured in "
        f"{count(sum(len(runs.records) for runs in study.runs), 'run')}, {ends} of each; a value "
        "is the median over the runs of its configuration."
    ]
    if repeats[-1] > 1 and _is_interleaved(study.runs):
        lines.append("Repeats were interleaved: every round measured each configuration once.")
    if study.timed:
        lines.append("A rate is the number of counted images over the time of the slowest rank.")
    if any(point.efficiency for curve in findings.scaling.curves for point in curve.points):
        lines.append(
            "Efficiency is the rate of N GPUs over N times the rate of the slowest of them "
            "measured alone."
        )
    if any(runs.floor(RATE) is not None for runs in study.timed):
        lines.append(
            "Intervals are 95 % prediction intervals for one more run, by Student's t on the "
            "logarithm of the rate, with the scatter of repeated runs of equal configurations."
        )
    if any(pair.verdict for pair in findings.comparisons):
        lines.append(
            "Differences were tested on the logarithm of the rate, with Holm's method for the "
            "error of all comparisons together (5 %)."
        )
    suspect = sum(record.validity.verdict == "suspect" for record in study.usable)
    if suspect:
        lines.append(f"Checks cast doubt on {count(suspect, 'run')}, which are included.")
    if study.excluded:
        runs_out = count(len(study.excluded), "failed or invalid run")
        lines.append(f"Not included: {runs_out}.")
    return lines


def _is_interleaved(configurations: Sequence[Runs]) -> bool:
    """Return whether no repeat of a sweep began before one with a lower number."""
    turns = []
    for runs in configurations:
        for record in runs.records:
            if not record.drift:
                turns.append((record.sweep_id, record.started_at, record.cell.repeat))
    order = [(sweep, repeat) for sweep, _, repeat in sorted(turns)]
    return order == sorted(order)


def _links(record: Record) -> str:
    return "/".join(sorted(set(map(str, mapping(record.environment.get("links")).values()))))


def batch_of(record: Record) -> str:
    """Return the images of a step, in words."""
    if record.cell.global_batch_size is None:
        return f"{record.cell.batch_size:,} images per GPU and step"
    return f"{record.cell.global_batch_size:,} images per step on all GPUs together"


def _of(record: Record, part: str, name: str) -> str:
    """Return a fact of a record's environment; empty where it does not say it."""
    return str(mapping(record.environment.get(part)).get(name) or "")[:40]


def _worded(records: Iterable[Record], name: str, fact: Fact) -> str:
    """Return `precision bf16`, with all values of a fact; empty where no record says it."""
    values = list(filter(None, dict.fromkeys(str(fact(record) or "") for record in records)))
    return f"{name} {join_words(values, MOST_VALUES)}" if values else ""
