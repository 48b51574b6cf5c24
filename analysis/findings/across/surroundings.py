"""What differs between machines and versions: GPUs, links, driver, NCCL, torch, CPU, host, date, commit, inherited variables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby

from analysis.findings.across.sides import Side
from analysis.findings.machines.hosts import gpus_of, hardware, mapping
from analysis.findings.machines.identity import first_gpu
from analysis.findings.provenance import inherited
from analysis.findings.study import Study
from benchmarks.record import Record
from conf.cell import folded

MOST = 3  # values of one fact that are named
NOT_KNOWN = "not known"
GPUS = "GPU UUIDs"  # tells two machines with equal hardware and host names apart
# In the order in which they are told.
FACTS = (
    "GPUs", "links", "driver", "NCCL", "torch", "CUDA", "cuDNN", "Python", "CPU", "cores", "memory", "host", "date", GPUS,
    "SM clock, most", "commit", "code that measures",
)  # fmt: skip


def facts(study: Study) -> dict[str, str]:
    """Return {fact: what the records of a study say of it}; a variable that was inherited is a fact of its own name."""
    values: dict[str, Counter[str]] = {}
    for record in study.records:
        for name, value in _of_record(record).items():
            values.setdefault(name, Counter())[value] += 1
    every = len(study.records)
    found = {name: _said(counts, every - sum(counts.values())) for name, counts in values.items()}
    widest = max(study.records, key=lambda record: len(record.cell.every_host), default=None)
    if widest is not None and widest.cell.hosts:  # a cell on one of several hosts says nothing of the others
        found |= {name: value for name, value in _of_record(widest).items() if name in ("GPUs", "host")}
    return found


def differing(sides: Sequence[Side]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return {fact: its value on each side} of facts that differ, and {fact: value} of those that do not.

    A fact that a side's records do not say is NOT_KNOWN, and differs from nothing; a variable that was not set is `unset`.
    """
    each = [facts(side.study) for side in sides]
    names = [*FACTS, *sorted({name for one in each for name in one} - {*FACTS})]
    apart, shared = dict[str, list[str]](), dict[str, str]()
    for name in names:
        values = [one.get(name, NOT_KNOWN if name in FACTS else "unset") for one in each]
        known = [*dict.fromkeys(value for value in values if value != NOT_KNOWN)]
        if len(known) > 1:
            apart[name] = values
        elif known:
            shared[name] = known[0]
    return apart, shared


def same_machine(sides: Sequence[Side]) -> bool:
    """Tell whether all sides are of one machine, as far as hosts, CPUs and UUIDs of GPUs tell."""
    apart, _ = differing(sides)
    return not {"host", "GPUs", GPUS, "CPU", "cores"} & apart.keys()


def _of_record(record: Record) -> dict[str, str]:
    known = record.environment
    cpu, gpu, versions, git = (mapping(known.get(name)) for name in ("cpu", "gpu", "versions", "git"))
    gpus = gpus_of(known)
    memory, on_gpus = cpu.get("memory_bytes"), record.cell.device == "cuda"
    at = datetime.fromtimestamp(record.started_at, timezone.utc)
    clocks = {one["max_sm_mhz"] for one in gpus if "max_sm_mhz" in one}
    values = {
        "GPUs": hardware(record) if on_gpus else "none",
        "links": _links(mapping(known.get("links"))),
        "driver": gpu.get("driver"),
        "NCCL": versions.get("nccl") if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda") if on_gpus else None,
        "cuDNN": versions.get("cudnn") if on_gpus else None,
        "Python": versions.get("python"),
        "CPU": cpu.get("model"),
        "cores": cpu.get("cores"),
        "memory": f"{memory / 2**30:,.0f} GiB" if isinstance(memory, int | float) else None,
        "host": folded(sorted(record.cell.every_host)) or known.get("host"),
        GPUS: first_gpu(record) and f"{first_gpu(record)}…",
        "SM clock, most": f"{max(clocks)} MHz" if clocks and all(isinstance(one, int) for one in clocks) else None,
        "date": f"{at:%Y-%m-%d}",
        "commit": f"{str(git['commit'])[:7]}{', modified' if git.get('modified') else ''}"
        if git.get("commit")
        else None,
        "code that measures": known.get("code"),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")} | inherited(record)


def _links(links: Mapping[str, object]) -> str:
    """Return `NV18 between all`, or `NV2 between 8 pairs, SYS between 12`."""
    counts = Counter(str(value) for value in links.values())
    if len(counts) == 1:
        return f"{next(iter(counts))} between all"
    pairs = [f"{name} between {number}" for name, number in counts.most_common(MOST)]
    return ", ".join(pairs) + (" pairs" if pairs else "")


def _said(counts: Counter[str], without: int) -> str:
    """Return a fact in words: its value, several values, or the first and the last of many."""
    if len(counts) > MOST:
        return f"{min(counts)} to {max(counts)}"
    values = [name for name, _ in groupby(sorted(counts))]
    return " or ".join(values) + (" or unset" if without else "")
