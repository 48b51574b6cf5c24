"""What the report says of barriers."""

from analysis.report.section import Section
from analysis.report.table import Column, Table


def section(study, findings):
    times = [one.metrics["barrier/us"] for one in study.usable if "barrier/us" in one.metrics]
    columns = (Column("us", "shortest, µs", "number"),)
    table = Table("barriers", "How long a barrier takes.", columns, tuple(zip(times)))
    finding = f"The shortest barrier took {min(times):.9f} µs."
    return Section("barrier", "Barriers", tables=(table,), finding=(finding,))
