"""A few untimed steps and exchanges while NCCL logs the algorithm and protocol of every collective. Measures nothing."""

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from conf.cell import Cell
from trainers.step import Training

STEPS = 3


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Step and exchange. Collective."""
    reporter.phase("tuning pass")
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(STEPS):
        training.step()
        reporter.beat()
    with training.strategy.gradients_only():
        exchange = training.strategy.exchange_alone(training.parameters)
        if exchange:
            exchange()
    ranks.barrier()
    training.close()
    return Result()
