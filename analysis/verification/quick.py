"""Compare the records that a report shows with their raw samples, as far as that takes no time that a reader would notice.

It compares the hashes of the raw files, and the rate with images and seconds that are added up again: an edit of a sample or of a
rate is found. Everything else that a record states is compared by `python -m analysis verify`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from analysis.verification.comparison import same
from analysis.verification.verify import QUOTIENTS, is_sample, quotient
from benchmarks.record import CellFolder, Record, read_line
from benchmarks.record.folder import DAMAGED, changed, open_raw

CODE = "does_not_verify"
# What a report reads of raw files: as much as a report of some hundred cells, in a tenth of the time that it takes.
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
        """Return the record; one that does not verify is invalid, with the code CODE and the reason."""
        reason = next(self._reasons(record, folder), None)
        if reason is None:
            return record
        self.wrong += 1
        codes = {
            **record.validity.codes,
            CODE: f"{reason} (`python -m analysis verify` names all that differs)",
        }
        return dataclasses.replace(
            record, validity=dataclasses.replace(record.validity, verdict="invalid", codes=codes)
        )

    def _reasons(self, record: Record, folder: CellFolder) -> Iterator[str]:
        readable = (
            record.state == "finished" and bool(record.raw_sha256) and folder.rank_files_exist()
        )
        within = self._files < MOST_FILES and self._bytes < MOST_BYTES
        self.with_samples += readable
        self.compared += readable and within
        for metric in QUOTIENTS:
            if (value := quotient(record, metric)) is not None and not same(
                record.metrics[metric], value
            ):
                yield f"{metric} is {record.metrics[metric]:g}, and {value:g} by other metrics of the same record"
        if not (readable and within):
            return
        self._files += len(record.raw_sha256)
        self._bytes += sum(path.stat().st_size for path in folder.path.glob("ranks/*"))
        samples = {file: before for file, before in record.raw_sha256.items() if is_sample(file)}
        for file, _ in changed(folder.path, samples):
            yield f"{file} is not what it was when the record was made"
        metrics = record.metrics
        if "throughput/seconds" in metrics and "throughput/images" in metrics:
            yield from _other_sums(metrics, folder, record.cell.world_size)

    def sentence(self) -> str:
        """Return what was compared, for the report; empty where no record has raw samples."""
        if not self.with_samples:
            return (
                "No cell has its raw samples here, so none was compared with them."
                if not self.wrong
                else ""
            )
        if self.compared == self.with_samples:
            said, rest = "every cell that has them here", ""
        else:
            said = f"{self.compared:,} of {self.with_samples:,} cells that have them here"
            rest = " (`python -m analysis verify` compares all)"
        found = f"{self.wrong:,} do not agree with them" if self.wrong else "all agree with them"
        return f"Compared with their raw samples: {said}{rest}; {found}."


def _other_sums(metrics: Mapping[str, float], folder: CellFolder, ranks: int) -> Iterator[str]:
    """Yield what differs if the images and seconds of the timed windows are added up again."""
    images, ms = 0, []
    try:
        for rank in range(ranks):
            with open_raw(folder.rank_lines(rank)) as file:
                lines = [
                    line
                    for text in file
                    if b'"timed"' in text and (line := read_line(text)) and "ms" in line
                ]
            images += sum(int(line["images"]) for line in lines)
            ms.append(math.fsum(math.fsum(line["ms"]) for line in lines))
    except (*DAMAGED, TypeError, ValueError, KeyError):
        yield f"the lines of its {ranks} ranks cannot be read"
        return
    for name, value in (("throughput/images", images), ("throughput/seconds", max(ms) / 1e3)):
        if not same(metrics[name], float(value)):
            yield f"{name} is {metrics[name]:g}, and {value:g} by the lines of the ranks"
