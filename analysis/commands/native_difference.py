"""Find where two measurements of the native tools differ beyond noise: matrices of p2p, or tables of nccl-tests.

The rule. An entry of A and one of B are the same quantity of the same pair or row. They differ when both hold:
- their medians differ by more than the tolerance: `tolerance` of A, or `latency_tolerance` for latency matrices and
  messages of 64 KiB and less, where a microsecond matters;
- if a file holds the entry more than once (several runs, -N), the ranges from least to greatest value do not overlap:
  the scatter of the repetitions does not explain the gap.
Single measurements have no scatter, so the tolerance alone decides, and the result says so (`single`).
p2pBandwidthLatencyTest repeats 5 times and varies by 5 to 8 % on some machines (cuda-samples issue 449): repeat it, or raise
the tolerance.
"""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from analysis.errors import UnreadableInput
from analysis.nccl_tests.reader import Run, parse_nccl_tests
from analysis.p2p.source import read_p2p

TOLERANCE, LATENCY_TOLERANCE = 0.03, 0.10
_SMALL = 65536  # bytes
_TWO_SPEEDS = (
    2.0  # what launches take at the slower of their two speeds, at most (benchmarks/RESULTS.md)
)
EntryKey = tuple[Any, ...]


@dataclass(slots=True)
class Entry:
    """One quantity with all its values in a file: GB/s (more is better) or µs. Only tables have `busbw`."""

    name: str
    unit: str
    latency: bool
    values: list[float] = field(default_factory=list)
    busbw: list[float] = field(default_factory=list)


@dataclass(slots=True)
class NativeMeasurement:
    """The entries of one file; `variants` are those of each table by NCCL settings, `matrices` those of p2p."""

    matrices: dict[EntryKey, Entry] = field(default_factory=dict)
    variants: dict[str, dict[str, dict[EntryKey, Entry]]] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def what(self) -> str:
        """Describe the contents of the file."""
        tables = [*self.variants][:4] + ["…"] * (len(self.variants) > 4)
        kinds = ["matrices of p2p"] if self.matrices else []
        return " and ".join(
            kinds + ([f"tables of nccl-tests ({', '.join(tables)})"] if tables else [])
        )


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """One entry that differs; `ratio` is B ÷ A, None if A is 0."""

    entry: Entry
    a: float
    b: float
    other: Entry
    ratio: float | None

    @property
    def better(self) -> bool:
        """Tell whether B is faster."""
        return (self.b > self.a) == (self.entry.unit == "GB/s")

    def as_json(self) -> dict[str, Any]:
        """Return the medians, their ratio, and their values."""
        whole: dict[str, Any] = {
            "entry": self.entry.name,
            "unit": self.entry.unit,
            "a": self.a,
            "b": self.b,
        }
        whole |= {
            "ratio": self.ratio,
            "better": self.better,
            "values_a": self.entry.values,
            "values_b": self.other.values,
        }
        if self.entry.busbw and self.other.busbw:
            whole |= {"busbw_a": median(self.entry.busbw), "busbw_b": median(self.other.busbw)}
        return whole


@dataclass(slots=True)
class NativeDifference:
    """The result: `differ` has the greatest ratios first; `only_a` and `only_b` name entries without a partner."""

    compared: int = 0
    single: bool = (
        True  # no entry was measured more than once in both files: the scatter is not known
    )
    differ: list[EntryDifference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_measurement(text: str) -> NativeMeasurement:
    """Read every entry of nccl-tests (text or JSON), p2pBandwidthLatencyTest or a record of benchmark=collectives or p2p.

    Raises UnreadableInput for any other text.
    """
    found = NativeMeasurement()
    reasons = []
    try:
        for run in parse_nccl_tests(text):
            _add_run(found, run)
    except UnreadableInput as error:
        reasons.append(str(error))
    try:
        for matrices in read_p2p(text).samples:
            found.devices |= {device["name"] for device in matrices.devices.values()}
            found.notes += matrices.notes
            for name, entries in matrices.entries.items():
                latency = name.startswith("latency")
                for (row, column), value in entries.items():
                    entry = Entry(f"{name} {row}->{column}", "µs" if latency else "GB/s", latency)
                    found.matrices.setdefault((name, row, column), entry).values.append(value)
    except UnreadableInput as error:
        reasons.append(str(error))
    if len(reasons) == 2:
        raise UnreadableInput("; or ".join(reasons))
    return found


def _add_run(found: NativeMeasurement, run: Run) -> None:
    ranks = run.as_json()["implied_ranks"] if run.ranks is None else run.ranks
    said = "ranks not said" if ranks is None else f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    table = f"{run.collective or 'a collective not said'} on {said}"
    settings = " ".join(f"{name}={value}" for name, value in sorted(run.environment.items()))
    entries = found.variants.setdefault(table, {}).setdefault(settings, {})
    found.devices |= {str(device["name"]) for device in run.devices if device.get("name")}
    found.notes += run.notes
    for row in run.rows:
        kind = " ".join(str(part) for part in (row.dtype, row.redop) if part is not None)
        kind += "" if row.root is None else f" root {row.root}"
        for placement, one in row.placements():
            value, what = (
                (one.cputime_us, ", CPU time") if one.cputime_us is not None else (one.time_us, "")
            )
            if value is None:
                continue
            name = f"{table}, {row.bytes} B {kind}, {placement.replace('_', ' ')}{what}"
            key = (table, row.bytes, kind, placement, what)
            entry = entries.setdefault(key, Entry(name, "µs", row.bytes <= _SMALL))
            entry.values.append(value)
            if one.busbw is not None:
                entry.busbw.append(one.busbw)


def compare_measurements(
    a: NativeMeasurement,
    b: NativeMeasurement,
    tolerance: float = TOLERANCE,
    latency_tolerance: float = LATENCY_TOLERANCE,
) -> NativeDifference:
    """Return the entries of two files that differ beyond noise, by the rule above.

    Raises ValueError for a tolerance that is not a number from 0, and if the files have no entry in common.
    """
    for name, value in (("tolerance", tolerance), ("latency tolerance", latency_tolerance)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value}: accepted is a number from 0, such as 0.03 for 3 %")
    result = NativeDifference()
    _compare_entries(a.matrices, b.matrices, result, tolerance, latency_tolerance)
    for table in dict.fromkeys([*a.variants, *b.variants]):
        for left, right in _pair(
            a.variants.get(table, {}), b.variants.get(table, {}), table, result
        ):
            _compare_entries(left, right, result, tolerance, latency_tolerance)
    if not result.compared:
        raise ValueError(f"nothing in common: A holds {a.what()}; B holds {b.what()}")
    if a.devices and b.devices and a.devices != b.devices:
        names = " against ".join(", ".join(sorted(devices)) for devices in (a.devices, b.devices))
        result.notes.append(f"different GPUs: {names}")
    for side, notes in (("A", a.notes), ("B", b.notes)):
        result.notes += [f"{side}: {note}" for note in notes]
    result.notes[:0] = _bimodal(result)
    result.differ.sort(key=lambda one: -math.inf if not one.ratio else -abs(math.log(one.ratio)))
    return result


def _bimodal(result: NativeDifference) -> list[str]:
    """Return a note on differences that are no greater than those of the two speeds at which CPUs launch such work."""
    near = [
        one.entry
        for one in result.differ
        if one.ratio and 1 / _TWO_SPEEDS < one.ratio < _TWO_SPEEDS
    ]
    found = (
        (sum("latency_cpu" in entry.name for entry in near), "latencies by the CPU's clock"),
        (sum(bool(entry.busbw) and entry.latency for entry in near), "messages of at most 64 KiB"),
    )
    return [
        f"{count} of {len(result.differ)} differences: {what}, whose single measurements are bimodal: a factor below 2 says "
        "nothing"
        for count, what in found
        if count and result.single
    ]


def _pair(
    a: dict[str, dict[EntryKey, Entry]],
    b: dict[str, dict[EntryKey, Entry]],
    table: str,
    result: NativeDifference,
) -> list[tuple[dict[EntryKey, Entry], dict[EntryKey, Entry]]]:
    """Pair the runs of a table: the only one of each file, else those with the same NCCL settings."""
    if len(a) == 1 and len(b) == 1:
        (settings_a, left), (settings_b, right) = *a.items(), *b.items()
        if settings_a != settings_b:
            result.notes.append(
                f"{table}: {settings_a or 'no setting'} against {settings_b or 'no setting'}"
            )
        return [(left, right)]
    if a and b and not a.keys() & b.keys():
        result.notes.append(
            f"{table}: several runs with different settings, and no setting is in both files"
        )
    return [(a.get(settings, {}), b.get(settings, {})) for settings in dict.fromkeys([*a, *b])]


def _compare_entries(
    a: dict[EntryKey, Entry],
    b: dict[EntryKey, Entry],
    result: NativeDifference,
    tolerance: float,
    latency_tolerance: float,
) -> None:
    result.only_a += [entry.name for key, entry in a.items() if key not in b]
    result.only_b += [entry.name for key, entry in b.items() if key not in a]
    for key in a.keys() & b.keys():
        left, right = a[key], b[key]
        result.compared += 1
        result.single &= min(len(left.values), len(right.values)) == 1
        before, after = median(left.values), median(right.values)
        allowed = (latency_tolerance if left.latency else tolerance) * abs(before)
        apart = min(left.values) > max(right.values) or min(right.values) > max(left.values)
        if apart and abs(after - before) > allowed:
            result.differ.append(
                EntryDifference(left, before, after, right, after / before if before else None)
            )
