"""The rate that the cells of each benchmark are compared in, and what may differ between two that do the same amount of work.

More of a rate is faster. Of a time the rate is 1 ÷ time, so that 5 % always are 5 % more in the same time. METHOD.md,
"Comparisons".
"""

from dataclasses import dataclass

from analysis.findings.baselines import RATE
from conf.cell import Cell


@dataclass(frozen=True)
class Headline:
    """One benchmark's. `rate` names for people what is compared, `metric` is what records have of it.

    `choices` are the options of the benchmark that leave the amount of work as it is, `work` what changes it beside the
    other options.
    """

    rate: str
    metric: str
    is_time: bool = False  # less of the metric is faster
    choices: tuple[str, ...] = ()
    work: tuple[str, ...] = ()

    def may_differ(self, asked: str) -> bool:
        """Whether cells that differ in an asked thing do the same amount of work."""
        return asked in self.choices if asked.startswith("benchmark.") else asked not in self.work

    def change(self, first: float, second: float) -> float:
        """From one value of the metric to another, as a share of the first rate."""
        return (first / second if self.is_time else second / first) - 1


IMAGES = Headline("images/s", RATE)
HEADLINES = {
    "throughput": IMAGES,
    "exchange": Headline(
        "exchanges/s", "comm/exchange_ms", is_time=True, choices=("benchmark.per_key",), work=("precision",)
    ),
    "collectives": Headline(
        "busbw of the largest message",
        "collectives/busbw_gb_per_s",
        choices=("benchmark.calls", "benchmark.cuda_graph"),
    ),
    "jacobi": Headline("solves/s", "jacobi/seconds", is_time=True, choices=("benchmark.exchange",)),
}


def headline(cell: Cell) -> Headline:
    """Of a cell's benchmark; images per second, which others do not count, where that has none of its own."""
    return HEADLINES.get(cell.benchmark["name"], IMAGES)
