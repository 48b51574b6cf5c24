"""The output of a cell in the layout of nccl-tests 2.19, line for line, for scripts that read that tool's output."""

from typing import Any

from benchmarks.collectives.busbw import COLLECTIVES
from benchmarks.collectives.request import largest_bytes, sizes
from conf.cell import Cell

# Our dtype: its name in the table.
TYPES = {
    "float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16", "int8": "int8", "uint8": "uint8",
    "int32": "int32", "int64": "int64",
}  # fmt: skip
LEFT = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
FIGURES = "  {:>7}  {:>6}  {:>6}  {:>6}"
NAMES, UNITS = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")


def table_lines(cell: Cell, run: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    """Return the whole output of one run of tables["nccl-tests"]; `devices` hold pid, host, device, bus_id and name by rank."""
    asked, collective = cell.benchmark, COLLECTIVES[run["collective"]]
    step, by = (asked["step"], "bytes") if asked["step"] else (cell.benchmark["factor"], "factor")
    found = [
        "# Ringside's benchmark=collectives, in the layout of nccl-tests 2.19: one process for each rank, "
        f"calls={cell.benchmark['calls']}",
        f"# Collective test starting: {collective.program}_perf",
        f"# nThread 1 nGpus 1 minBytes {sizes(cell)[0]} maxBytes {largest_bytes(cell)} step: {step}({by}) "
        f"warmup iters: {cell.benchmark['warmup']} iters: {cell.benchmark['iterations']} agg iters: {asked['coalesced']} "
        f"validation: {int(asked['verify'])} graph: {int(asked['cuda_graph'])} unalign: 0",
        "#",
        "# Using devices",
    ]
    for rank, one in enumerate(devices):
        found.append(
            f"#  Rank {rank:2d} Group  0 Pid {one['pid']:6d} on {one['host']:>10} device {one['device']:2d} "
            f"[{one['bus_id']}] {one['name']}"
        )
    left = "# {:>10}" + LEFT[6:]
    found += [
        "#",
        left.format("", "", "", "", "") + "           out-of-place                       in-place          ",
        left.format("size", "count", "type", "redop", "root") + 2 * FIGURES.format(*NAMES),
        left.format("(B)", "(elements)", "", "", "") + 2 * FIGURES.format(*UNITS),
        *(_row(row) for row in run["rows"]),
    ]
    checked = [row[place] for row in run["rows"] for place in ("out_of_place", "in_place") if row[place]]
    if asked["verify"]:
        wrong = sum(1 for one in checked if one["wrong"])
        found.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    found.append(f"# Avg bus bandwidth    : {run['avg_busbw']:g} ")
    return [*found, "#", f"# Collective test concluded: {collective.program}_perf", "#"]


def _row(row: dict[str, Any]) -> str:
    root = -1 if row["root"] is None else row["root"]
    left = LEFT.format(row["bytes"], row["count"], row["dtype"], row["redop"] or "none", root)
    return left + _figures(row["out_of_place"]) + _figures(row["in_place"])


def _figures(one: dict[str, Any] | None) -> str:
    """Return the columns of one placement: nan where nothing was measured, N/A where nothing was verified."""
    if one is None:
        return FIGURES.format("nan", "nan", "nan", "N/A")
    wrong = "N/A" if one["wrong"] is None else f"{float(one['wrong']):g}"
    return FIGURES.format(_number(one["time_us"], 7), _number(one["algbw"], 6), _number(one["busbw"], 6), wrong)


def _number(value: float, width: int) -> str:
    """Return a number with as many of two decimals as fit into a column."""
    fitting = (text for decimals in (2, 1, 0) if len(text := f"{value:.{decimals}f}") <= width)
    return next(fitting, f"{value:.{1 if width >= 7 else 0}e}")
