"""Check every record of a study against its raw files: their SHA-256, and every value that they give when they are read again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from analysis.findings.record_values import again, rests_on
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.verification.comparison import ABSENT, Difference, leaves, same, same_sentence
from analysis.verification.rebuild import NotRecomputable, Rebuilt, rebuilt
from benchmarks.derived import IncompleteLines
from benchmarks.record import CellFolder, Record, RecordError, read, record_paths
from benchmarks.record.folder import ABSENT as NOT_THERE
from benchmarks.record.folder import SAMPLES, changed
from benchmarks.record.metrics import since

RECORD = "record.json"
# What raw files that hold something else than Ringside wrote may raise.
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# What people read; the codes beside them are compared as they are.
SENTENCES = (
    "validity codes.*",
    "validity unchecked.*",
    "validity not_applicable.*",
    "effective findings.*.sentence",
)
# What ranks that measured several cells gave back, and the parts of what such a cell cost.
OF_SHARED_RANKS = ("checks given_back", "tables seconds")
# {metric: (it is this metric, divided by that one)}; None: by the number of ranks. True of every record, also without samples.
QUOTIENTS = {
    "throughput/images_per_second": ("throughput/images", "throughput/seconds"),
    "throughput/images_per_second_per_gpu": ("throughput/images_per_second", None),
}


@dataclass(frozen=True)
class Omission:
    """A record that could not be recomputed."""

    record: str
    reason: str
    wrong: bool  # whether its lines ought to be there: the study is damaged


@dataclass
class Verification:
    """What came of all records of a study."""

    records: int = 0
    recomputed: int = 0
    values: int = 0
    files: int = 0  # raw files whose hash was compared
    differences: list[Difference] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)
    not_compared: Counter[str] = field(
        default_factory=Counter
    )  # values whose source is not in the folder: of how many records

    @property
    def right(self) -> bool:
        """Whether nothing differs and nothing is damaged."""
        return not self.differences and not any(one.wrong for one in self.omissions)

    def compare(self, record: str, file: str, name: str, recorded: Any, recomputed: Any) -> None:
        """Count a value, and note it if it differs."""
        self.values += 1
        if not same(recorded, recomputed):
            self.differences.append(Difference(record, file, name, recorded, recomputed))


def verify(study: Path) -> Verification:
    """Check every record of a study, earlier attempts too."""
    result, records = Verification(), {}
    for path in record_paths(study):
        result.records += 1
        name = str(path.parent.relative_to(study))
        try:
            records[name] = read(path)
        except RecordError as error:
            result.omissions.append(Omission(name, str(error), wrong=True))
    folders = {record.record_id: CellFolder(study / name) for name, record in records.items()}
    ids = Counter(record.record_id for record in records.values())
    for name, record in records.items():
        folder = CellFolder(study / name)
        if ids[record.record_id] > 1:
            result.omissions.append(
                Omission(name, f"{ids[record.record_id]} records have its id", wrong=True)
            )
        _check_quotients(name, record, result)
        _check_files(name, record, folder, result)
        _check_against_baselines(name, record, records.values(), result)
        known = [
            one for one in records.values() if one is not record and one.ended_at <= record.ended_at
        ]
        try:
            made = rebuilt(record, folder, known, lambda one: folders[one.record_id])
        except IncompleteLines as error:
            result.omissions.append(Omission(name, str(error), wrong=record.state == "finished"))
        except NotRecomputable as error:
            result.omissions.append(Omission(name, str(error), wrong=False))
        except DAMAGED as error:
            said = (
                f"its raw files do not hold what Ringside wrote ({type(error).__name__}: {error})"
            )
            result.omissions.append(Omission(name, said, wrong=True))
        else:
            _compare(name, record, made, result)
    return result


def quotient(record: Record, metric: str) -> float | None:
    """Return one of QUOTIENTS from the metrics that it follows from; None where one of them is not there."""
    above, below = QUOTIENTS[metric]
    divisor = record.metrics.get(below) if below else float(record.cell.world_size)
    known = metric in record.metrics and above in record.metrics and divisor
    return record.metrics[above] / divisor if known and divisor else None


def _check_quotients(name: str, record: Record, result: Verification) -> None:
    """Compare metrics that follow from others of the same record."""
    for metric, (above, below) in QUOTIENTS.items():
        if (value := quotient(record, metric)) is not None:
            how = f"metrics {metric} ({above} ÷ {below or 'ranks'})"
            result.compare(name, RECORD, how, record.metrics[metric], value)


def _check_against_baselines(
    name: str, record: Record, records: Iterable[Record], result: Verification
) -> None:
    """Compare what a record states against the one-GPU records that it names; it needs them, and no samples."""
    named = rests_on(record)
    stated = [metric for metric in OF_SEVERAL_RECORDS if metric in record.metrics]
    alone = [one for one in records if one.record_id in named]
    if named and {one.record_id for one in alone} != named:
        result.not_compared.update(f"metrics {metric}" for metric in stated)
    elif named or record.raw_sha256:
        values = again(record, alone) if named else {}
        for metric in stated:
            result.compare(
                name,
                RECORD,
                f"metrics {metric}",
                record.metrics[metric],
                values.get(metric, ABSENT),
            )


def _check_files(name: str, record: Record, folder: CellFolder, result: Verification) -> None:
    """Compare the hashes of the raw files, and what was asked with what the record says was asked."""
    if not record.raw_sha256:
        return
    present = {path.relative_to(folder.path).as_posix() for path in folder.raw_files()}
    if not any(is_sample(one) for one in present):
        return  # published without samples
    wrong = dict(changed(folder.path, record.raw_sha256))
    for file, before in record.raw_sha256.items():
        now = wrong.get(file, before)
        if now == NOT_THERE and not is_sample(file):
            result.not_compared[file] += (
                1  # the record holds what it says, and a trace may be too large to publish
            )
            continue
        result.files += 1
        result.compare(name, file, "SHA-256", before, now)
    for file in sorted(present - record.raw_sha256.keys()):
        result.compare(name, file, "SHA-256", ABSENT, "of a file that the record does not name")


def is_sample(file: str) -> bool:
    """Tell whether a raw file, by its path in the cell's folder, holds samples."""
    return any(fnmatchcase(file, pattern) for pattern in SAMPLES)


def _compare(name: str, record: Record, made: Rebuilt, result: Verification) -> None:
    """Compare one record with what its files give."""
    result.recomputed += 1
    result.compare(name, RECORD, "cell_key", record.cell_key, record.cell.key)
    for one in made.unknown:
        result.not_compared[one] += 1
    for part in made.parts:
        recorded, again = (
            dict(leaves(_plain(getattr(one, part)))) for one in (record, made.record)
        )
        for key in {**again, **recorded}:
            is_younger = since(part, key.partition(".")[0]) > record.schema_version
            if not (is_younger and key not in recorded) and not _is_of_shared_ranks(
                record, f"{part} {key}"
            ):
                _compare_leaf(name, part, key, recorded, again, result)


def _is_of_shared_ranks(record: Record, field: str) -> bool:
    """Tell whether a value is one that ranks which measured several cells had otherwise: until 2026-11-23 some did."""
    return field.startswith(OF_SHARED_RANKS) and any("pool" in rank for rank in record.ranks)


def _compare_leaf(
    name: str,
    part: str,
    key: str,
    recorded: Mapping[str, Any],
    again: Mapping[str, Any],
    result: Verification,
) -> None:
    field, one, other = f"{part} {key}".strip(), recorded.get(key, ABSENT), again.get(key, ABSENT)
    told = any(fnmatchcase(field, pattern) for pattern in SENTENCES) and ABSENT not in (one, other)
    result.compare(name, RECORD, field, one, one if told and same_sentence(one, other) else other)


def _plain(value: Any) -> Any:
    """Return a field of a record in the types of JSON."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
