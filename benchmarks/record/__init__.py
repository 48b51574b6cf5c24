"""The record of a cell and the lines of its ranks: the face that other packages import."""

from benchmarks.record.encoding import decoded, encoded, finite, restored
from benchmarks.record.folder import CellFolder, record_paths
from benchmarks.record.lines import Kind, Lines, read_line, read_lines
from benchmarks.record.record import (
    FINDINGS,
    REHEARSAL,
    SCHEMA_VERSION,
    STATES,
    VERDICTS,
    Failure,
    Record,
    RecordError,
    Validity,
    as_read,
    read,
    read_study,
    write,
    write_json,
)
