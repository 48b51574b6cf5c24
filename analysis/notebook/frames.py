"""Tables of pandas, which is an extra: rows of {column: value} become a DataFrame in which what is unknown is NA."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from analysis.notebook.columns import as_kind, kind_of
from analysis.report.table import Table
from analysis.study.estimates import Estimate

if TYPE_CHECKING:
    import pandas as pd

MISSING = (
    "tables need pandas, which is not installed: pip install -e '.[notebook]' in Ringside's clone"
)
ENDS = ("low", "high")
NUMBER, INTEGER, TEXT = "float64", "Int64", "string"


def frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> "pd.DataFrame":
    """Return rows as a table. `columns` are {name: its type where no value is known}, in their order.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ImportError(MISSING) from None
    made = {}
    for name, unknown in columns.items():
        values = [row.get(name) for row in rows]
        kind = kind_of(values, unknown)
        made[name] = pd.Series([as_kind(value, kind) for value in values], dtype=kind)
    return pd.DataFrame(made, columns=list(columns))


def with_ends(column: str, value: float | Estimate | None) -> dict[str, float | None]:
    """Return a number and the ends of its 95 % interval: {column, column_low, column_high}; what is not known is None."""
    low, high = (value.low, value.high) if isinstance(value, Estimate) else (None, None)
    known = value.value if isinstance(value, Estimate) else value
    return {
        column: None if known is None else float(known),
        f"{column}_low": low,
        f"{column}_high": high,
    }


def of_table(table: Table) -> "pd.DataFrame":
    """Return a table of the report as its CSV has it: numbers unrounded, shares as parts of one, an interval as two columns.

    Raises:
        ImportError: pandas is not installed.
    """
    columns: dict[str, str] = {}
    for column in table.columns:
        names = [column.key, *(f"{column.key}_{end}" for end in ENDS if column.bounded)]
        columns |= dict.fromkeys(names, TEXT if column.kind == "text" else NUMBER)
    rows: list[dict[str, Any]] = [{} for _ in table.rows]
    for row, cells in zip(rows, table.rows, strict=True):
        for column, value in zip(table.columns, cells, strict=True):
            if column.bounded and not isinstance(value, str):
                row |= with_ends(column.key, value)
            else:
                row[column.key] = (
                    value.value if isinstance(value, Estimate) else None if value == "" else value
                )
    return frame(rows, columns)
