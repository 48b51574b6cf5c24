"""The record of a cell and the lines of its ranks: the face that other packages import. Standard library only."""

from benchmarks.record.model import (
    FILE_NAME,
    OUTPUT_NAME,
    SCHEMA_VERSION,
    STATES,
    VERDICTS,
    Failure,
    Lines,
    Record,
    RecordError,
    Validity,
    read,
    read_line,
    read_lines,
    read_study,
    write,
    write_json,
)

__all__ = [
    "FILE_NAME",
    "OUTPUT_NAME",
    "SCHEMA_VERSION",
    "STATES",
    "VERDICTS",
    "Failure",
    "Lines",
    "Record",
    "RecordError",
    "Validity",
    "read",
    "read_line",
    "read_lines",
    "read_study",
    "write",
    "write_json",
]
