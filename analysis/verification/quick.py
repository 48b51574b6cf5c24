"""Compare the records that a report shows with their raw samples, as far as that is quick.

It compares the hashes of the raw files, and the rate with images and seconds that are added up
again: an edit of a sample or of a rate is found. `python -m analysis verify` compares the rest.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from analysis.verification.verify_study import QUOTIENTS, is_sample, quotient, same
from benchmarks.record import CellFolder, Record, read_line
from benchmarks.record.folder import DAMAGED, TooLarge, changed, open_raw

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
        has_samples = record.state == "finished" and bool(record.raw_sha256)
        has_samples = has_samples and folder.rank_lines(0).parent.is_dir()
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
        # images and seconds of the timed windows, added up again
        ranks, images, longest_ms = record.cell.world_size, 0, 0.0
        try:
            for rank in range(ranks):
                sums_ms = []
                with open_raw(folder.rank_lines(rank)) as file:
                    for text in file:
                        if b'"timed"' not in text:
                            continue
                        line = read_line(text)
                        if line and "ms" in line:
                            images += int(line["images"])
                            sums_ms.append(math.fsum(line["ms"]))
                longest_ms = max(longest_ms, math.fsum(sums_ms))
        except (*DAMAGED, TypeError, ValueError, KeyError):
            yield f"the lines of its {ranks} ranks cannot be read"
            return
        sums = {"throughput/images": float(images), "throughput/seconds": longest_ms / 1e3}
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
