"""Check every record of a study against its raw files: their SHA-256, and every value they give.

A report compares less, quickly (QuickCheck): the hashes, and the rate with images and seconds added
up again.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from analysis.findings.communication import rests_on, values_from_baselines
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.validity.checks import changed_limits
from analysis.verification.rebuild import NotRecomputable, Rebuilt, rebuilt
from benchmarks.derived import IncompleteLines
from benchmarks.record import (
    CellFolder,
    Record,
    RecordError,
    decoded,
    read,
    read_line,
    record_paths,
)
from benchmarks.record.folder import ABSENT as NO_FILE
from benchmarks.record.folder import DAMAGED as DAMAGED_FILE
from benchmarks.record.folder import RAW_SINCE_7, SAMPLES, TooLarge, changed, open_raw
from benchmarks.record.metrics import entry_of
from benchmarks.record.record import OLDEST_SCHEMA
from benchmarks.record.safe_files import read_whole
from conf.cell import Cell

RECORD = "record.json"
ABSENT = "absent"
# Numbers that differ by less are equal: another Python, numpy or scipy rounds the last digits.
TOLERANCE = 1e-9
# The schema version of entries that came later than the oldest; Metric.since has that of metrics.
LATER_ENTRIES = {
    ("tables", "residuals"): 5,
    ("checks", "stationarity_in_windows"): 7,
    ("checks", "windows_repeated"): 7,
    ("checks", "iterations_missing"): 7,
    ("checks", "slower_than_warmup"): 7,
    ("checks", "unseen_share"): 7,
    ("checks", "grid_ms"): 7,
    ("checks", "versions_differ"): 7,
    ("checks", "gpu_windows"): 7,
    ("validity", "limits.foreign_growth_gib"): 7,
    ("validity", "limits.foreign_busy_share"): 7,
}
# What raw files that hold something else than Ringside wrote may raise.
DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# What people read; the codes beside them are compared as they are.
SENTENCE = re.compile(
    r"validity (codes|unchecked|not_applicable)\..*|effective findings\..*\.sentence", re.DOTALL
)
# What ranks that measured several cells gave back, and the parts of what such a cell cost.
OF_SHARED_RANKS = ("checks given_back", "tables seconds")
# {metric: (it is this metric, divided by that one)}; None: by the number of ranks.
# True of every record, also without samples.
QUOTIENTS = {
    "throughput/images_per_second": ("throughput/images", "throughput/seconds"),
    "throughput/images_per_second_per_gpu": ("throughput/images_per_second", None),
}


@dataclass(frozen=True)
class Difference:
    """A value that is recorded otherwise than its source gives it."""

    record: str  # the folder of the attempt, within the study
    file: str  # record.json, a raw file, or the run in MLflow's store
    field: str  # metrics step/ms_median; tables p2p.matrices.…; SHA-256
    recorded: Any  # ABSENT where it is not there
    recomputed: Any


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
    # values whose source is not in the folder: of how many records
    not_compared: Counter[str] = field(default_factory=Counter)
    # limits that are not the defaults: of how many records, which they judged all the same
    limits: Counter[str] = field(default_factory=Counter)

    @property
    def right(self) -> bool:
        """Whether nothing differs and nothing is damaged."""
        return not self.differences and not any(omission.wrong for omission in self.omissions)

    def compare(
        self,
        record: str,
        file: str,
        name: str,
        recorded: Any,
        recomputed: Any,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Count a value, and note it if it differs."""
        self.values += 1
        if not same(recorded, recomputed, tolerance):
            self.differences.append(Difference(record, file, name, recorded, recomputed))


def verify(study: Path) -> Verification:
    """Check every record of a study, earlier attempts too."""
    result, records, folders = Verification(), {}, {}
    by_id: dict[str, list[Record]] = defaultdict(list)
    for path in record_paths(study):
        result.records += 1
        name = str(path.parent.relative_to(study))
        try:
            record = read(path)
        except RecordError as error:
            result.omissions.append(Omission(name, str(error), wrong=True))
            continue
        records[name] = record
        folders[record.record_id] = CellFolder(path.parent)
        by_id[record.record_id].append(record)
    for name, record in records.items():
        folder = CellFolder(study / name)
        if len(by_id[record.record_id]) > 1:
            why = f"{len(by_id[record.record_id])} records have its id"
            result.omissions.append(Omission(name, why, wrong=True))
        for metric, (dividend, divisor) in QUOTIENTS.items():
            value = quotient(record, metric)
            if value is not None:
                label = f"metrics {metric} ({dividend} ÷ {divisor or 'ranks'})"
                result.compare(name, RECORD, label, record.metrics[metric], value)
        try:
            folder.refuse_too_large()
        except TooLarge as error:
            result.omissions.append(Omission(name, str(error), wrong=True))
            continue
        _check_asked(name, record, folder, result)
        result.limits.update(changed_limits(record))
        _check_files(name, record, folder, result)
        _check_against_baselines(name, record, by_id, result)
        earlier = _ended_before(record, records.values())
        try:
            recomputed = rebuilt(record, folder, earlier, lambda record: folders[record.record_id])
        except IncompleteLines as error:
            is_wrong = record.state == "finished"
            result.omissions.append(Omission(name, str(error), is_wrong))
        except NotRecomputable as error:
            result.omissions.append(Omission(name, str(error), wrong=False))
        except (OSError, *DAMAGED) as error:
            cause = f"{type(error).__name__}: {error}"
            why = f"its raw files do not hold what Ringside wrote ({cause})"
            result.omissions.append(Omission(name, why, wrong=True))
        else:
            _compare_values(name, record, recomputed, result)
    return result


def _ended_before(record: Record, records: Iterable[Record]) -> Iterator[Record]:
    for candidate in records:
        if candidate is not record and candidate.ended_at <= record.ended_at:
            yield candidate


def quotient(record: Record, metric: str) -> float | None:
    """Return one of QUOTIENTS from the metrics that it follows from; None where one is missing."""
    above, below = QUOTIENTS[metric]
    dividend = record.metrics.get(above)
    divisor: float | None = record.cell.world_size
    if below:
        divisor = record.metrics.get(below)
    if metric not in record.metrics or dividend is None or not divisor:
        return None
    return dividend / divisor


def _check_against_baselines(
    name: str, record: Record, by_id: Mapping[str, Sequence[Record]], result: Verification
) -> None:
    """Compare what a record states against the one-GPU records that it names; without samples."""
    ids = rests_on(record)
    if not ids and not record.raw_sha256:
        return
    are_here = ids <= by_id.keys()
    values: Mapping[str, float] = {}
    if ids and are_here:
        baselines = itertools.chain(*(by_id[record_id] for record_id in ids))
        values = values_from_baselines(record, baselines)
    for metric in OF_SEVERAL_RECORDS:
        if metric not in record.metrics:
            continue
        label = f"metrics {metric}"
        if are_here:
            value = values.get(metric, ABSENT)
            result.compare(name, RECORD, label, record.metrics[metric], value)
        else:
            result.not_compared[label] += 1


def _check_asked(name: str, record: Record, folder: CellFolder, result: Verification) -> None:
    result.compare(name, RECORD, "name", record.name, record.cell.name)
    result.compare(name, RECORD, "cell_key", record.cell_key, record.cell.key)
    if not folder.cell.exists():
        return
    recorded = dict(leaves(record.cell.to_dict()))
    try:
        asked = dict(leaves(Cell.from_dict(decoded(read_whole(folder.cell))).to_dict()))
    except (OSError, *DAMAGED) as error:
        result.omissions.append(Omission(name, f"{folder.cell.name}: {error}", wrong=True))
        return
    for key in {**asked, **recorded}:
        before, now = recorded.get(key, ABSENT), asked.get(key, ABSENT)
        result.compare(name, RECORD, f"cell {key}", before, now)


def _check_files(name: str, record: Record, folder: CellFolder, result: Verification) -> None:
    present = {path.relative_to(folder.path).as_posix() for path in folder.raw_files()}
    if not record.raw_sha256 or not any(is_sample(file) for file in present):
        return  # published without samples
    wrong = dict(changed(folder.path, record.raw_sha256))
    for file, before in record.raw_sha256.items():
        now = wrong.get(file, before)
        if now == NO_FILE and not is_sample(file):
            # the record holds what it says, and a trace may be too large to publish
            result.not_compared[file] += 1
            continue
        result.files += 1
        result.compare(name, file, "SHA-256", before, now)
    for file in sorted(present - record.raw_sha256.keys()):
        if record.schema_version < 7 and matches(file, RAW_SINCE_7):
            continue
        result.compare(name, file, "SHA-256", ABSENT, "of a file that the record does not name")


def is_sample(file: str) -> bool:
    """Tell whether a raw file, by its path in the cell's folder, holds samples."""
    return matches(file, SAMPLES)


def matches(file: str, patterns: Iterable[str]) -> bool:
    """Tell whether the path of a file, within its cell's folder, is one of some patterns."""
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def _compare_values(name: str, record: Record, rebuild: Rebuilt, result: Verification) -> None:
    result.recomputed += 1
    result.not_compared.update(rebuild.unknown)
    # until 2026-11-23 some ranks measured several cells
    has_shared_ranks = "pool" in set().union(*record.ranks)
    for part in rebuild.parts:
        # a second is less than the tolerance of a time since 1970
        tolerance = 0.0 if part == "started_at" else TOLERANCE
        recorded = dict(leaves(getattr(record, part)))
        recomputed = dict(leaves(getattr(rebuild.record, part)))
        for key in {**recomputed, **recorded}:
            label = f"{part} {key}".strip()
            entry = key if part == "validity" else key.partition(".")[0]
            is_younger = _since(part, entry) > record.schema_version
            is_of_shared_ranks = has_shared_ranks and label.startswith(OF_SHARED_RANKS)
            if is_of_shared_ranks or (is_younger and key not in recorded):
                continue
            before, now = recorded.get(key, ABSENT), recomputed.get(key, ABSENT)
            is_sentence = SENTENCE.fullmatch(label) and ABSENT not in (before, now)
            if is_sentence and numbers_of(before) == numbers_of(now):
                now = before  # a later version may word it otherwise
            result.compare(name, RECORD, label, before, now, tolerance)


def _since(part: str, name: str) -> int:
    """Return the schema version from which a part of a record may have an entry of this name."""
    if part in ("metrics", "within_run", "series"):
        return entry_of(name).since
    return LATER_ENTRIES.get((part, name), OLDEST_SCHEMA)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, word and empty container of nested JSON, with the path to it."""
    if value is None or isinstance(value, str | int | float):  # most of them, and quickest to tell
        yield key, value
        return
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        items = [*value.items()]
    elif isinstance(value, list | tuple):
        items = [*enumerate(value)]
        if items:
            yield f"{key}.length".removeprefix("."), len(items)
    else:
        yield key, value
        return
    for name, item in items:
        yield from leaves(item, f"{key}.{name}".removeprefix("."))
    if not items and key:
        yield key, []  # JSON has no tuple, and a part without entries may be a list or a mapping


def same(recorded: Any, recomputed: Any, tolerance: float = TOLERANCE) -> bool:
    """Tell whether two values are equal as JSON has them; NaN equals NaN."""
    if isinstance(recorded, bool) or isinstance(recomputed, bool):
        return recorded is recomputed
    are_numbers = isinstance(recorded, int | float) and isinstance(recomputed, int | float)
    are_whole = isinstance(recorded, int) and isinstance(recomputed, int)
    if not are_numbers or are_whole:
        return bool(recorded == recomputed)
    try:
        if math.isnan(recorded) or math.isnan(recomputed):
            return math.isnan(recorded) and math.isnan(recomputed)
        return math.isclose(recorded, recomputed, rel_tol=tolerance)
    except OverflowError:  # a whole number beyond every double
        return False


def numbers_of(sentence: str) -> list[str]:
    """Return the numbers of a sentence, sorted."""
    return sorted(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", sentence))


CODE = "does_not_verify"
# What a report reads of raw files: that of some hundred cells, in a tenth of the report's time.
MOST_FILES, MOST_BYTES = 4000, 64 << 20


@dataclass
class QuickCheck:
    """Marks the records of one study; holds what was compared so far."""

    with_samples: int = 0  # records whose folder has raw samples
    compared: int = 0
    wrong: int = 0
    _files: int = field(default=0, repr=False)
    _bytes: int = field(default=0, repr=False)

    def marked(self, record: Record, folder: CellFolder) -> Record:
        """Return the record; one that does not verify is invalid, with CODE and the reason."""
        reason = next(self._reasons(record, folder), None)
        if reason is None:
            return record
        self.wrong += 1
        sentence = f"{reason} (`python -m analysis verify` names all that differs)"
        codes = {**record.validity.codes, CODE: sentence}
        validity = dataclasses.replace(record.validity, verdict="invalid", codes=codes)
        return dataclasses.replace(record, validity=validity)

    def _reasons(self, record: Record, folder: CellFolder) -> Iterator[str]:
        names_samples = record.state == "finished" and bool(record.raw_sha256)
        has_samples = names_samples and folder.rank_lines(0).parent.is_dir()
        is_compared = has_samples and self._files < MOST_FILES and self._bytes < MOST_BYTES
        self.with_samples += has_samples
        self.compared += is_compared
        metrics = record.metrics
        for metric in QUOTIENTS:
            value = quotient(record, metric)
            if value is not None and not same(metrics[metric], value):
                yield (
                    f"{metric} is {metrics[metric]:g}, and {value:g} by other metrics of the same "
                    "record"
                )
        if not is_compared:
            return
        try:
            folder.refuse_too_large()
        except TooLarge as error:
            yield str(error)
            return
        self._files += len(record.raw_sha256)
        self._bytes += sum(path.stat().st_size for path in folder.path.glob("ranks/*"))
        samples = {file: digest for file, digest in record.raw_sha256.items() if is_sample(file)}
        for name, _ in changed(folder.path, samples):
            yield f"{name} is not what it was when the record was made"
        if record.cell.runs_script:  # derive finds where its timed windows begin
            return
        if "throughput/seconds" not in metrics or "throughput/images" not in metrics:
            return
        ranks = record.cell.world_size
        try:
            sums = _timed_sums(folder, ranks)
        except (*DAMAGED_FILE, TypeError, ValueError, KeyError):
            yield f"the lines of its {ranks} ranks cannot be read"
            return
        for name, value in sums.items():
            if not same(metrics[name], value):
                yield f"{name} is {metrics[name]:g}, and {value:g} by the lines of the ranks"

    def sentence(self) -> str:
        """Return what was compared, for the report; empty where no record has raw samples."""
        if not self.with_samples:
            if self.wrong:
                return ""
            return "No run has its raw samples here, so none was compared with them."
        runs, rest = f"{self.compared:,}", ""
        if self.compared != self.with_samples:
            runs = f"{self.compared:,} of {self.with_samples:,}"
            rest = " `python -m analysis verify` compares all."
        verdict = "all agree"
        if self.wrong:
            verdict = f"{self.wrong:,} do not agree"
        return f"Runs compared with their raw samples: {runs}; {verdict}.{rest}"


def _timed_sums(folder: CellFolder, ranks: int) -> dict[str, float]:
    """Return images and seconds of the timed windows, added up again from the ranks' lines."""
    images, slowest_rank_ms = 0, 0.0
    for rank in range(ranks):
        windows_ms = []
        with open_raw(folder.rank_lines(rank)) as file:
            for text in file:
                if b'"timed"' not in text:
                    continue
                line = read_line(text)
                if line and "ms" in line:
                    images += int(line["images"])
                    windows_ms.append(math.fsum(line["ms"]))
        slowest_rank_ms = max(slowest_rank_ms, math.fsum(windows_ms))
    return {"throughput/images": float(images), "throughput/seconds": slowest_rank_ms / 1e3}
