"""What each NCCL setting changed, against the same cell with the setting untouched: a table."""

from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings
from analysis.study.names import NAMES_BETWEEN as BETWEEN
from analysis.study.names import gpu_ids, unit_of
from analysis.study.study import Study
from analysis.text import single_line

ABOVE = 55  # place of the section: before the strategies


def settings(study: Study, findings: Findings) -> Section | None:
    """Return the transport, the time of an exchange and the rate with each setting and without it; None without settings."""
    if not findings.settings:
        return None
    rows = tuple(
        (
            single_line(one.setting), _others(one.compared.first), gpu_ids(one.compared.gpus), *one.transports,
            *one.exchange_ms, one.exchange_ratio, one.compared.rate, one.compared.difference,
            one.compared.verdict or "no verdict",
        )
        for one in findings.settings
    )  # fmt: skip
    table = Table(
        "settings", "Each NCCL setting against the same cell in which it is untouched; the rate with its 95 % interval.",
        (
            Column("setting", "setting"), Column("cell", "untouched cell"), Column("gpus", unit_of(study)),
            Column("transport_untouched", "transport untouched"), Column("transport", "transport with it"),
            Column("exchange_ms_untouched", "exchange ms untouched", "number"), Column("exchange_ms", "with it", "number"),
            Column("exchange_ratio", "times as long", "ratio"),
            Column("rate", "rate", shown=len({row[8] for row in rows}) > 1),
            Column("difference", "rate changes by", "change", True),
            Column("verdict", "verdict"),
        ),
        rows,
    )  # fmt: skip
    lines = ("The verdict needs repeats: a single run does not show how far runs differ.",)
    missing = all(one.compared.verdict for one in findings.settings)
    return Section(
        "settings", "NCCL settings", () if missing else lines, tables=(table,), place=ABOVE
    )


def _others(label: str) -> str:
    """Return the untouched cell's label without its GPUs, which have a column, and without the word that the table says."""
    parts = [part for part in label.split(BETWEEN)[1:] if not part.endswith(" untouched")]
    return single_line(BETWEEN.join(parts))


SECTIONS = (settings,)
