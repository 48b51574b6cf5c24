"""A DGX-1 whose truth is known: every step loses a fixed time and a share of what its exchange needs on the wires."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from simulated import GRADIENT_BYTES, Simulator, Truth, changed

from analysis.findings.examine import findings_of
from analysis.study.study import Study
from analysis.topology.bandwidth import MachineWires, set_bandwidth
from analysis.topology.readers import parse_topology_text
from analysis.topology.subsets import classes
from benchmarks.record import CellFolder, write

DGX1 = parse_topology_text((Path(__file__).parent / "data" / "topo_dgx1_v100.txt").read_text())
LINKS = DGX1.to_json()["links"]
SUBSETS = tuple(one.representative for size in (2, 3, 4, 8) for one in classes(DGX1, size))


@dataclass(frozen=True)
class WiredTruth:
    """What is planted: ms per step, a share, and shares of noise."""

    fixed_ms: float = 0.5
    share: float = 0.4  # of the time on the wires that compute does not hide
    noise: float = 0.002  # of a step between runs, and of the strategy's cost in ms of a step
    efficiency_of_nccl: float = 0.85  # of what the wires carry
    alone_ms: float | None = None  # what the strategy costs a step of one GPU; None: not measured


def wire_ms(gpus, gb_per_s=None):
    """The time that an exchange needs on its wires, by their nominal speed where no other is given."""
    megabytes = 2 * (len(gpus) - 1) / len(gpus) * GRADIENT_BYTES / 1e6
    return megabytes / (gb_per_s or set_bandwidth(DGX1, gpus).gb_per_s)


def wired_study(seed=0, truth=None, subsets=SUBSETS, lost=None, peers=True, repeats=1, folder=None):
    """A study of these subsets with peer copies between all GPUs; `lost` is {subset: further ms that it loses}.

    With a folder the peer copies are a record of another study, beside it.
    """
    truth, chance = truth or WiredTruth(), np.random.default_rng(seed)
    simulator = Simulator(
        Truth(alone_ms=(54.0,) * 8, overhead_ms=0.0, contention_ms=0.0, noise=truth.noise), seed
    )
    around = {"environment": {"links": LINKS}}
    matrix = np.array(MachineWires.of(DGX1).every.gb_per_s) * (
        1 + 0.01 * chance.standard_normal((8, 8))
    )
    peer_copies = changed(
        simulator.record(range(8), benchmark={"name": "p2p"}, **around),
        metrics={},
        tables={"p2p": {"matrices": {"unidirectional_enabled": matrix.tolist()}}},
    )
    made = [peer_copies] if peers and folder is None else []
    if folder is not None:
        place = CellFolder(folder.parent / "links" / "p2p-gpus0-7")
        place.path.mkdir(parents=True)
        write(place, changed(peer_copies, study="links"))
    for repeat in range(repeats):
        alone = [simulator.record((gpu,), repeat=repeat, **around) for gpu in range(8)]
        cost = {} if truth.alone_ms is None else {"strategy/cost_ms": truth.alone_ms}
        made += [changed(record, metrics=record.metrics | cost) for record in alone]
        for gpus in subsets:
            carried = set_bandwidth(DGX1, gpus, matrix.tolist()).gb_per_s
            cost = (
                truth.fixed_ms + truth.share * wire_ms(gpus, carried) + (lost or {}).get(gpus, 0.0)
            )
            record = simulator.record(gpus, repeat=repeat, **around)
            rate = record.metrics["throughput/images_per_second"] * simulator.truth.step_ms(
                "nccl_allreduce", gpus
            )
            busbw = truth.efficiency_of_nccl * carried * (1 + 0.002 * chance.standard_normal())
            metrics = {
                "throughput/images_per_second": rate / (54.0 + cost),
                "comm/busbw_gb_per_s": busbw,
                "comm/exchange_ms": wire_ms(gpus, busbw),
                "strategy/cost_ms": cost + 54.0 * truth.noise * chance.standard_normal(),
            }
            made.append(
                changed(record, metrics=metrics, effective={"transport": "P2P/direct pointer"})
            )
    return Study.of(made, folder=folder)


def lines_of(study):
    """The lines of a study, by what they are about."""
    found = findings_of(study)
    return {line.quantity: line for line in found.wire_lines}, found.no_wire_line


def told(study):
    """The subsets that lose more or less than their wires explain: {subset: which}."""
    lines, _ = lines_of(study)
    return {
        point.gpus: point.verdict
        for line in lines.values()
        for point in line.points
        if point.verdict
    }
