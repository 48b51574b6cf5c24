"""What a benchmark gives, facts and derived values, from ranks that tests run themselves."""

import contextlib
import dataclasses

from benchmarks.derived import function_of
from benchmarks.rank.reporter import Reporter
from benchmarks.record import read_lines


def run_whole(run, cell, ranks, paths):
    """Return {metrics, series, tables, model, checks, output} of a benchmark, as the launching process derives them.

    `paths` are the files of lines by rank; they may hold lines of benchmarks before. Collective.
    """
    ranks.barrier()
    before = [len(list(read_lines(path))) for path in paths]
    ranks.barrier()
    reporter = Reporter(paths[ranks.rank])
    result = run(cell, ranks, reporter)
    if ranks.rank == 0:
        reporter.line("result", **dataclasses.asdict(result))
    ranks.barrier()
    lines = {rank: list(read_lines(path))[before[rank] :] for rank, path in enumerate(paths)}
    derived = function_of(cell)(lines, cell)
    whole = derived.with_facts(dataclasses.asdict(result))
    with contextlib.suppress(OSError):
        whole["output"] = (reporter.folder / "output.txt").read_text()
    return whole | ({"output": derived.output + "\n"} if derived.output else {})
