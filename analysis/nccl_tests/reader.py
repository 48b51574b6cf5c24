"""Read nccl-tests' output, text or JSON, and records of `benchmark=collectives`, as runs."""

from analysis.nccl_tests.json_output import read_json
from analysis.nccl_tests.record import read_record, record_in
from analysis.nccl_tests.run import Run, annotate
from analysis.nccl_tests.text import read_tables

__all__ = ["Run", "parse_nccl_tests"]


def parse_nccl_tests(text: str) -> list[Run]:
    """Read every run of one text, in order, with notes on contradictions.

    Source: the format strings of nccl-tests 2.0 to 2.19 (src/common.cu, each collective's print_header; from 2.17.3
    src/util.cu).

    Raises:
        UnreadableInput: the text holds no row; it says what is accepted and where.
    """
    is_json = text.lstrip().startswith("{")
    record = record_in(text) if is_json else None
    runs = (
        read_record(record)
        if record is not None
        else read_json(text)
        if is_json
        else read_tables(text)
    )
    for run in runs:
        annotate(run)
    return runs
