"""A study whose steps are slower: times planted in the raw lines of real ranks, and records derived from them anew."""

import dataclasses
import json
import shutil

from analysis.verification.rebuild import rebuilt
from benchmarks import record as records
from benchmarks.record import CellFolder, read, read_lines, read_study, record_paths

TIMES = ("ms", "lead_in_ms", "launch_ms", "device_ms", "host_ms")


def slower_study(source, target, factor, only=lambda record: True):
    """Copy a study with raw lines; every time of the cells that `only` chooses takes `factor` times as long."""
    shutil.copytree(source, target)
    known, _ = read_study(target)
    folders = {
        one.record_id: CellFolder(path.parent)
        for path in record_paths(target)
        for one in [read(path)]
    }
    for record in known:
        if only(record):
            folder = folders[record.record_id]
            for rank in range(record.cell.world_size):
                _plant(folder, rank, factor)
            made = rebuilt(record, folder, known, lambda other: folders[other.record_id]).record
            records.write(folder, dataclasses.replace(made, raw_sha256=folder.raw_sha256()))
    return target


def _plant(folder, rank, factor):
    """Make the times of a rank's blocks longer."""
    path = folder.rank_lines(rank)
    lines = [*read_lines(path)]
    for line in lines:
        for name in TIMES:
            if name in line:
                value = line[name]
                line[name] = (
                    [one * factor for one in value] if isinstance(value, list) else value * factor
                )
    path.with_name(f"{path.name}.gz").unlink(missing_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
