"""Links of a study's machine that other studies beside it measured: benchmark=p2p and collectives, in the same output_dir."""

from itertools import islice

from analysis.findings.machines.identity import Machines
from analysis.findings.provenance import provenance
from analysis.findings.runs import named
from analysis.findings.study import Study
from benchmarks.record import CellFolder, Record, RecordError, read

BENCHMARKS = ("p2p", "collectives")
MOST = 200  # records that are read
SAME = ("machine", "driver", "NCCL")


def measured_beside(study: Study) -> tuple[Record, ...]:
    """Return the usable records of other studies that measured links of the machine on which this one trained.

    A benchmark that this study ran itself is not looked for elsewhere, and nothing is where it trained on several machines.
    The name of a cell's folder begins with its benchmark, so no other record is read.
    """
    trained = [runs for runs in study.timed if runs.world_size > 1]
    if study.folder is None or not trained:
        return ()
    wanted = [name for name in BENCHMARKS if all(named(runs.records[0], "benchmark") != name for runs in study.runs)]
    folder = study.folder.absolute()
    try:
        others = [other for other in sorted(folder.parent.iterdir()) if other != folder and other.is_dir()]
        cells = [CellFolder(cell) for other in others for name in wanted for cell in sorted(other.glob(f"{name}-*"))]
    except OSError:
        return ()
    found = []
    for cell in islice(cells, MOST):
        try:
            record = read(cell.record)
        except (RecordError, OSError):
            continue
        found += [record] * record.usable
    own = [runs.records[0] for runs in trained]
    machines = Machines([*own, *found])
    here = {_surroundings(record, machines) for record in own}
    return tuple(record for record in found if here == {_surroundings(record, machines)})


def _surroundings(record: Record, machines: Machines) -> tuple[str, ...]:
    known = provenance(record, machines)
    return tuple(known[name] for name in SAME)
