"""How long a barrier takes."""

import time

from benchmarks.rank.ranks import Result


def run(cell, ranks, reporter):
    reporter.phase("timed")
    seconds = []
    for _ in range(cell.benchmark["rounds"]):
        ranks.barrier()
        opened = time.perf_counter()
        ranks.barrier()
        seconds.append(time.perf_counter() - opened)
    return Result(metrics={"barrier/us": 1e6 * min(seconds), "barrier/rounds": len(seconds)})
