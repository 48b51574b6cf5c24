r"""The setup paragraph of a paper, made from a study's records; what they do not say is left out.

`methods.tex` is a fragment to \input; `ringside.bib` is what it cites.
"""

from collections.abc import Callable, Iterable, Sequence

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


def methods(study: Study, findings: Findings) -> str:
    """Return the paragraph as LaTeX; of a study without usable records a comment."""
    if not study.usable:
        return "% No usable run.\n"
    lines = [*machine_sentences(study), *workload_sentences(study), *protocol(study, findings)]
    commits = _values(study.usable, lambda record: str(_git(record))[:12])
    code = f" (commit {join_words(commits, MOST_VALUES)})" if commits else ""
    measured = rf"All numbers were measured with Ringside{latex(code)}~\cite{{ringside}}."
    return "\n".join([measured, *map(latex, map(words_of(study), filter(None, lines)))]) + "\n"


def machine_sentences(study: Study) -> list[str]:
    """Return the machine, its links, its driver and the versions of its software."""
    records = study.usable
    cpus, links = [], []
    for record in records:
        cpu = mapping(record.environment.get("cpu"))
        memory = cpu.get("memory_bytes")
        words = [str(cpu.get("model") or ""), f"{cpu['cores']} cores" if cpu.get("cores") else ""]
        words.append(f"{memory / 2**30:,.0f} GiB of memory" if memory else "")
        cpus.append(", ".join(filter(None, words)))
        classes = mapping(record.environment.get("links")).values()
        links.append("/".join(sorted(set(map(str, classes)))))
    hosts = _values(records, hardware)
    machine = f"Machine: {join_words(hosts)}"
    if set(cpus) - {""}:
        machine += f" ({join_words(_unique(cpus))})"
    if unit_of(study) == "GPUs" and set(links) - {""}:
        machine += f"; links between GPUs, as nvidia-smi names them: {join_words(_unique(links))}"
    software = []
    for key, name in SOFTWARE.items():
        versions = _unique(_version(record, key) for record in records)
        if versions:
            software.append(f"{name} {join_words(versions)}")
    drivers = _values(records, lambda record: mapping(record.environment.get("gpu")).get("driver"))
    if drivers and unit_of(study) == "GPUs":
        software.insert(0, f"NVIDIA driver {join_words(drivers)}")
    return [f"{machine}.", f"Software: {join_words(software, 9)}." if software else ""]


def workload_sentences(study: Study) -> list[str]:
    """Return what was trained, how and with which settings; of other benchmarks their names."""
    trained = [record for record in study.usable if record.cell.trains]
    lines = []
    benchmarks = _values(study.usable, lambda record: named(record, "benchmark"))
    if benchmarks != ["throughput"]:
        lines.append(f"Benchmarks: {join_words(benchmarks, MOST_VALUES)}.")
    if not trained:
        return lines

    def model(record: Record) -> str:
        parameters = record.model.get("parameters")
        size = f" ({parameters:,} parameters)" if isinstance(parameters, int) else ""
        return f"{record.cell.model.name}{size}"

    def batch(record: Record) -> str:
        if record.cell.global_batch_size is None:
            return f"{record.cell.batch_size:,} images per GPU and step"
        return f"{record.cell.global_batch_size:,} images per step on all GPUs together"

    facts = (
        _worded(trained, "Model", model),
        _worded(trained, "batch", batch),
        _worded(trained, "precision", lambda record: record.cell.precision),
        _worded(trained, "execution", lambda record: record.cell.optimize),
        _worded(trained, "optimizer", lambda record: record.cell.optimizer.name),
        _worded(trained, "data", lambda record: record.cell.data.get("name", "synthetic")),
    )
    lines.append(f"{'; '.join(filter(None, facts))}.")
    lines.append(_worded(trained, "Strategies", lambda record: named(record, "strategy")) + ".")
    settings: dict[str, None] = {}
    for record in trained:
        for name, value in record.cell.nccl.items():
            settings[format_option(name, str(value))] = None
    if settings:
        lines.append(f"NCCL settings that were varied or set: {join_words([*settings], 9)}.")
    return lines


def protocol(study: Study, findings: Findings) -> list[str]:
    """Return what was repeated, how it was ordered, and how efficiency and intervals were made."""
    repeats = sorted({len(runs.records) for runs in study.runs})
    ends = " to ".join(dict.fromkeys(map(str, (repeats[0], repeats[-1]))))
    lines = [
        f"{count(len(study.runs), 'configuration was', 'configurations were')} measured in "
        f"{count(len(study.usable), 'run')}, {ends} of each; a value is the median over the runs "
        "of its configuration."
    ]
    if repeats[-1] > 1 and _is_interleaved(study.runs):
        lines.append("Repeats were interleaved: every round measured each configuration once.")
    if study.timed:
        lines.append("A rate is the number of counted images over the time of the slowest rank.")
    points = [point for curve in findings.scaling.curves for point in curve.points]
    if any(point.efficiency for point in points):
        lines.append(
            "Efficiency is the rate of N GPUs over N times the rate of the slowest of them "
            "measured alone."
        )
    floors = [floor for runs in study.timed if (floor := runs.floor(RATE)) is not None]
    if floors:
        lines.append(
            "Intervals are 95 % prediction intervals for one more run, by Student's t on the "
            "logarithm of the rate, with the scatter of repeated runs of equal configurations."
        )
    if any(pair.verdict for pair in findings.comparisons):
        lines.append(
            "Differences of medians were tested on the logarithm of the rate; Holm's method holds "
            "the error of all comparisons together at 5 %."
        )
    suspect = sum(record.validity.verdict == "suspect" for record in study.usable)
    if suspect:
        lines.append(f"Checks cast doubt on {count(suspect, 'run')}, which are included.")
    if study.excluded:
        lines.append(f"{count(len(study.excluded), 'failed or invalid run')} were excluded.")
    return lines


def _is_interleaved(configurations: Sequence[Runs]) -> bool:
    """Return whether no repeat of a sweep began before one with a lower number."""
    by_sweep: dict[str, list[tuple[float, int]]] = {}
    for runs in configurations:
        for record in runs.records:
            if not record.drift:
                of_sweep = by_sweep.setdefault(record.sweep_id, [])
                of_sweep.append((record.started_at, record.cell.repeat))
    for of_sweep in by_sweep.values():
        turns = [repeat for _, repeat in sorted(of_sweep)]
        if turns != sorted(turns):
            return False
    return True


def _git(record: Record) -> object:
    return mapping(record.environment.get("git")).get("commit", "")


def _version(record: Record, name: str) -> str:
    return str(mapping(record.environment.get("versions")).get(name) or "")


def _unique(words: Iterable[str]) -> list[str]:
    return list(filter(None, dict.fromkeys(words)))


def _values(records: Iterable[Record], fact: Callable[[Record], object]) -> list[str]:
    """Return the different values of a fact; what a record does not say is none."""
    return _unique(str(fact(record) or "") for record in records)


def _worded(records: Iterable[Record], name: str, fact: Callable[[Record], object]) -> str:
    """Return `precision bf16`; empty where no record says it."""
    values = _values(records, fact)
    return f"{name} {join_words(values, MOST_VALUES)}" if values else ""
