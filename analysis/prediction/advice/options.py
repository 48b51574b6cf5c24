"""What an advice chooses from: subsets of GPUs, strategies, batch sizes and NCCL settings."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.errors import UnreadableInput
from analysis.prediction.asked import like, worded_machine
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question, Workload
from analysis.prediction.links.wires import asked_wire
from analysis.prediction.strategies import exchange_of, refuse_unknown_names, shares_gpu
from analysis.study.estimates import Member
from analysis.study.study import Study
from analysis.topology.model import Topology, quality
from analysis.topology.placement import choose_gpus
from analysis.topology.readers import parse_topology
from analysis.topology.subsets import classes
from conf.subsets import CPU_SLOTS

MOST_SUBSETS = 512  # that are told apart by their GPUs: of more, one of each kind of wiring counts
Settings = dict[str, str]


@dataclass(frozen=True)
class Candidate:
    """One cell to choose or not. `links`: the farthest link class between its GPUs, if it is known."""

    question: Question
    nccl: tuple[tuple[str, str], ...] = ()
    links: str | None = None


def advised_machine(calibration: Calibrated) -> str:
    """Return the machine that an advice is for: that of most cells of one host with a step time. Raises ValueError."""
    timed = [one for one in calibration.cells if one.timed and one.question.hosts == 1]
    if not timed:
        raise ValueError("no cell of one host has a step time; advice is on the GPUs of one host")
    return statistics.mode(one.question.machine for one in timed)


def topology_of(study: Study, machine: str) -> Topology | None:
    """Return the topology that the newest record of a machine has; None where none of its records has one."""
    for record in reversed(study.records):
        if study.single(record).provenance.get("machine", "") != machine:
            continue
        text = record.environment.get("topology")
        if isinstance(text, str) and text:
            try:
                return parse_topology(text)
            except UnreadableInput:
                continue
    return None


def machine_gpus(
    calibration: Calibrated, topology: Topology | None, machine: str
) -> tuple[int, ...]:
    """Return the GPUs of a machine; without a topology those of its cells."""
    here = [one.question for one in calibration.cells if one.question.machine == machine]
    seen = {member for one in here for member in one.members if isinstance(member, int)}
    slots = range(CPU_SLOTS) if calibration.unit != "GPU" else ()
    return topology.gpus if topology else tuple(sorted({*seen, *slots}))


def subsets(
    calibration: Calibrated, topology: Topology | None, count: int, machine: str = ""
) -> list[tuple[Member, ...]]:
    """Return the subsets of `count` GPUs that a forecast may tell apart, that of the best links first.

    Those are subsets whose members all ran alone, or that ran together, and one subset of each kind of wiring.
    Without `machine` it is that of most cells. Raises ValueError where the machine has fewer GPUs.
    """
    machine = machine or advised_machine(calibration)
    everyone = machine_gpus(calibration, topology, machine)
    where = worded_machine(machine, (one.question.machine for one in calibration.cells))
    if not everyone:
        raise ValueError(
            f"--gpus {count}: no record of {where} names its {calibration.unit}s; accepted are subsets, as 0+1"
        )
    if not 1 <= count <= len(everyone):
        has = f"{len(everyone)} {calibration.unit}s; accepted are 1 to {len(everyone)}"
        has = has if len(everyone) > 1 else f"1 {calibration.unit}; accepted is 1"
        raise ValueError(f"--gpus {count}: {where} has {has}")
    here = [
        one.question.members
        for one in calibration.cells
        if one.timed and one.question.machine == machine
    ]
    alone = {members[0] for members in here if len(members) == 1}
    together = {frozenset(members) for members in here}
    known: list[tuple[int, ...]] = []
    of_all = math.comb(len(everyone), count)
    if of_all <= MOST_SUBSETS:
        every = itertools.combinations(sorted(everyone), count)
        known = [one for one in every if alone.issuperset(one) or frozenset(one) in together]
    by_links = choose_gpus(topology, count).best.order if topology else sorted(everyone)[:count]
    kinds = classes(topology, count) if topology and count > 1 and len(known) < of_all else ()
    return list(
        dict.fromkeys([tuple(sorted(by_links)), *known, *(one.representative for one in kinds)])
    )


def farthest(topology: Topology | None, members: Sequence[Member]) -> str | None:
    """Return the farthest link class between GPUs; None where it is not known."""
    gpus = [one for one in members if isinstance(one, int)]
    if topology is None or len(gpus) < 2 or not set(gpus) <= set(topology.gpus):
        return None
    return min(
        (topology.link_between(*pair) for pair in itertools.combinations(gpus, 2)), key=quality
    )


def options(
    calibration: Calibrated,
    placed: Sequence[tuple[tuple[Member, ...], str | None]],
    settings: Sequence[Settings],
    strategies: Sequence[str] | None,
    batches: Sequence[int] | None,
    gpus: int,
    machine: str = "",
    gpu_spread: float | None = None,
) -> dict[Workload, list[Candidate]]:
    """Return every combination for each workload; `placed`: subsets with the farthest link between their GPUs.

    `gpus` is the number of GPUs of the machine: where none is left, servers of weights on GPUs share those of the ranks.
    Settings that choose the same wire count once, and those that do not reach a strategy not at all. Without `strategies` it is
    every strategy with every option that the study has, without `batches` the most frequent ones, without `machine` that of most
    cells. Raises ValueError.
    """
    machine = machine or advised_machine(calibration)
    refuse_unknown_names(strategies or (), [one.question for one in calibration.cells])
    timed = [one for one in calibration.cells if one.timed and one.question.hosts == 1]
    found: dict[Workload, list[Candidate]] = {}
    for workload in dict.fromkeys(one.question.workload for one in timed):
        here = [one for one in timed if one.question.workload == workload]
        sizes = batches or statistics.multimode(one.question.batch_size for one in here)
        if strategies:
            kinds = [like(timed, here, name) for name in strategies]
        else:
            known = {
                one.question.options: one.question
                for one in here
                if one.question.strategy != "none"
            }
            kinds = list(known.values()) or _without_exchange(here, placed)
        made: dict[Question, Candidate] = {}
        for kind, batch, (members, links), typed in itertools.product(
            kinds, sizes, placed, settings
        ):
            nccl = (
                typed if exchange_of(kind).by_nccl and len(members) > 1 else {}
            )  # it reaches no other
            question = replace(
                kind, workload=workload, batch_size=batch, wire=asked_wire(nccl, links), gpus=len(members), hosts=1,
                members=members, network=None, machine=machine, gpu_spread=gpu_spread,
            )  # fmt: skip
            question = replace(question, shares_gpu=shares_gpu(question, gpus))
            made.setdefault(question, Candidate(question, tuple(sorted(nccl.items())), links))
        found[workload] = told_apart(calibration, list(made.values()))
    return found


def _without_exchange(
    cells: Sequence[MeasuredCell], placed: Sequence[tuple[tuple[Member, ...], str | None]]
) -> list[Question]:
    """Return the question of strategy=none, where a study has no other and one GPU is asked for: several train apart."""
    return (
        [one.question for one in cells][:1]
        if all(len(members) == 1 for members, _ in placed)
        else []
    )


def told_apart(calibration: Calibrated, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates without those that differ only in GPUs that forecasts cannot tell apart: the first stands for them.

    Forecasts know GPUs that ran alone, or all together, with the same workload and batch.
    """
    found: dict[object, Candidate] = {}
    for one in candidates:
        question = one.question
        same = [
            each.question.members
            for each in calibration.cells
            if each.timed and _alike(each.question, question)
        ]
        alone = {members[0] for members in same if len(members) == 1}
        is_known = alone.issuperset(question.members) or set(question.members) in map(set, same)
        found.setdefault(question if is_known else (replace(question, members=()), one.links), one)
    return list(found.values())


def _alike(one: Question, other: Question) -> bool:
    return (one.workload, one.batch_size, one.machine) == (
        other.workload,
        other.batch_size,
        other.machine,
    )


def studied_settings(study: Study) -> list[Settings]:
    """Return the NCCL settings of a study's training cells, none at all first."""
    found: list[Settings] = [{}]
    for one in study.runs:
        nccl = {name: str(value) for name, value in one.cell.nccl.items()}
        if one.trains and nccl not in found:
            found.append(nccl)
    return found
