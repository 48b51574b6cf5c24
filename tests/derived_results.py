"""What a benchmark gives, facts and derived values, from ranks that tests run themselves; and a study of such cells."""

import contextlib
import dataclasses
import json
import time

from analysis.findings.communication import with_values
from analysis.validity.checks import judged
from benchmarks import record as records
from benchmarks.derived import function_of
from benchmarks.rank.ranks import Reporter
from benchmarks.record import CellFolder, Lines, read_line
from conf.schema import ValidityLimits
from launch.study.study_folder import assemble


def run_whole(run, cell, ranks, folder):
    """Return {metrics, series, tables, model, checks, output} of a benchmark, as the launching process derives them.

    The lines in the cell folder may begin with those of benchmarks before. The lines of this one are also left in `cells/<key>`
    inside it, as a cell's folder has them. Collective.
    """
    paths = [folder.rank_lines(number) for number in range(ranks.world_size)]
    ranks.barrier()
    before = [path.stat().st_size if path.exists() else 0 for path in paths]
    ranks.barrier()
    reporter = Reporter(folder, ranks.rank)
    result = run(cell, ranks, reporter)
    if ranks.rank == 0:
        reporter.line("result", **dataclasses.asdict(result))
    ranks.barrier()
    lines = {rank: _since(path, before[rank]) for rank, path in enumerate(paths)}
    _keep(cell, ranks.rank, lines[ranks.rank], CellFolder(folder.path / "cells" / cell.key))
    derived = function_of(cell)(lines, cell)
    whole = derived.with_facts(dataclasses.asdict(result))
    with contextlib.suppress(OSError):
        whole["output"] = folder.output.read_text()
    return whole | ({"output": derived.output + "\n"} if derived.output else {})


def _since(path, start):
    """The lines of a rank from a byte on."""
    with path.open("rb") as file:
        file.seek(start)
        return [line for text in file if (line := read_line(text))]


def _keep(cell, rank, lines, folder):
    """Leave what a rank of a cell wrote as a cell's folder has it."""
    folder.rank_lines(rank).parent.mkdir(parents=True, exist_ok=True)
    kept = Lines(folder.rank_lines(rank))
    for line in [*lines, {"kind": "done", "time": time.time()}]:
        kept.write(**line)
    if rank == 0:
        folder.cell.write_text(json.dumps(cell.to_dict()))


def write_record(folder, number):
    """Make the record of a cell's folder that `run_whole` left, as the launching process does. Return it."""
    facts = {"study": "forked", "sweep_id": "", "overrides": [], "drift": False, "environment": {}}
    begun = {"record_id": f"{number:032x}", "started_at": 1e9 + number, **facts}
    folder.attempt.write_text(json.dumps(begun))
    record = judged(
        with_values(assemble(folder, "finished", None, 1e9 + number + 1, [], CellFolder), []),
        ValidityLimits(),
    )
    records.write(folder, record)
    return record
