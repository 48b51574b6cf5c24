"""The questions of a command line: which cells to forecast, of what a study has measured."""

import argparse
import contextlib
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from analysis.errors import UnreadableInput
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question, Workload, workload_of
from analysis.prediction.links.network import HostNetwork
from analysis.prediction.links.wires import asked_wire
from analysis.prediction.strategies import refuse_unknown_names, shares_gpu
from analysis.study.provenance import facts_of_hosts, gpus_of
from analysis.study.study import Study, request_of
from analysis.topology.readers import parse_topology
from benchmarks.record import Record
from conf.cell import Cell
from conf.nccl import FIELDS, Nccl, settings, unknown_setting
from conf.subsets import CPU_SLOTS

MOST_GPUS, MOST_BATCH, MOST_SPREAD = 1 << 20, 1 << 24, 0.5
_FORM = "GPUs of this machine as 0,1,2,3 (several subsets: 0+1,0+1+2+3), or with --per-node numbers of GPUs as 16,64,256"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --strategy, --batch and --gpu-spread: what else than the study's own is forecast."""
    parser.add_argument(
        "--strategy",
        metavar="NAMES",
        help="such as nccl_allreduce,kvstore_device (default: the study's)",
    )
    parser.add_argument(
        "--batch", metavar="SIZES", help="images per GPU, such as 128,256 (default: the study's)"
    )
    parser.add_argument(
        "--gpu-spread",
        metavar="SHARE",
        help="how far GPUs of one model differ, such as 2%% (default: as the study's do)",
    )


@dataclass(frozen=True)
class Subset:
    """GPUs to forecast for: of one machine by number, or so many on each of several hosts."""

    gpus: int
    hosts: int = 1
    members: tuple[int, ...] = ()


def read_subsets(text: str, per_node: int | None) -> list[Subset]:
    """Read --gpus. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if per_node is None:
        named = [part.split("+") for part in parts] if "+" in text else [parts]
        if not all(
            one.isascii() and one.isdigit() and len(one) < 8 for part in named for one in part
        ):
            raise ValueError(f"--gpus {text!r}: accepted are {_FORM}")
        subsets = [tuple(int(one) for one in part) for part in named]
        if any(len(set(one)) < len(one) for one in subsets):
            raise ValueError(
                f"--gpus {text!r}: a GPU stands twice in a subset; accepted are {_FORM}"
            )
        return [Subset(len(one), members=one) for one in subsets]
    if not 1 <= per_node <= MOST_GPUS:
        raise ValueError(
            f"--per-node {per_node}: accepted is a number of GPUs from 1 to {MOST_GPUS}"
        )
    found = []
    for part in parts:
        count = int(part) if part.isascii() and part.isdigit() and len(part) < 8 else 0
        if not 1 <= count <= MOST_GPUS or (count > per_node and count % per_node):
            raise ValueError(
                f"--gpus {text!r}: {part!r} is no multiple of --per-node {per_node}; accepted are multiples, such as 16,64,256"
            )
        found.append(Subset(min(count, per_node), max(1, count // per_node)))
    return found


def gpus_here(study: Study, machine: str) -> set[int]:
    """Return the ids of the GPUs of a machine."""
    here = [one for one in study.runs if one.provenance.get("machine", "") == machine]
    device = statistics.mode(one.cell.device for one in here)
    return _ids([record for one in here for record in one.records if one.cell.device == device])


def refuse_absent(
    text: str, subsets: Sequence[Subset], study: Study, calibration: Calibrated, machine: str = ""
) -> None:
    """Refuse subsets of --gpus with a GPU that a machine does not have; '': that of most cells. Raises ValueError."""
    machine = machine or machine_of(calibration)
    known = gpus_here(study, machine)
    missing = [gpu for one in subsets for gpu in one.members if gpu not in known]
    if not missing:
        return
    where = worded_machine(machine, (one.provenance.get("machine", "") for one in study.runs))
    raise ValueError(
        f"--gpus {text!r}: {where} has no {calibration.unit} {missing[0]}; "
        f"accepted are {', '.join(map(str, sorted(known)))}"
    )


def worded_machine(machine: str, machines: Iterable[str]) -> str:
    """Return what a sentence calls the machine of most cells: its name, where the study has several."""
    several = len({*machines}) > 1
    return (
        f"{machine}, where most cells of the study ran," if several else "the machine of the study"
    )


def machine_of(calibration: Calibrated) -> str:
    """Return the machine that most cells with a step time ran on."""
    return statistics.mode(one.question.machine for one in calibration.cells if one.timed)


def _ids(records: Sequence[Record]) -> set[int]:
    """Return the ids of the devices of a machine: by its topology, by the driver, and of those that its cells ran on."""
    found: set[int] = set()
    topologies: set[str] = set()
    for record in records:
        found |= {*record.cell.gpus, *(range(CPU_SLOTS) if record.cell.device == "cpu" else ())}
        for facts in facts_of_hosts(record).values():
            found |= {gpu["id"] for gpu in gpus_of(facts) if isinstance(gpu.get("id"), int)}
            topologies |= {
                text for text in [facts.get("topology")] if text and isinstance(text, str)
            }
    for text in topologies:
        with contextlib.suppress(UnreadableInput):
            found |= {*parse_topology(text).gpus}
    return found


def read_nccl(text: str) -> dict[str, str]:
    """Read --nccl as a study has it: P2P_LEVEL=LOC,ALGO=Ring. Raises ValueError."""
    typed: dict[str, str] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (one.strip() for one in part.partition("="))
        setting = name.lower().removeprefix("nccl_")
        if not equals or not value:
            raise ValueError(f"--nccl {part!r}: accepted is NAME=VALUE, such as P2P_LEVEL=LOC")
        if setting not in FIELDS:
            raise ValueError(f"--nccl {part!r}: {unknown_setting(setting, value)}")
        if setting in typed:
            raise ValueError(
                f"--nccl {text!r}: {name} stands there twice; accepted is each setting once"
            )
        typed[setting] = value
    nccl = Nccl()
    for name, value in typed.items():
        setattr(
            nccl,
            name,
            int(value) if value.isascii() and value.isdigit() and len(value) < 12 else value,
        )
    return settings(nccl)[0]


def read_batches(text: str) -> list[int]:
    """Read --batch. Raises ValueError."""
    found = [
        int(part) if part.isascii() and part.isdigit() and len(part) < 10 else 0
        for part in text.split(",")
    ]
    if not all(1 <= one <= MOST_BATCH for one in found):
        raise ValueError(f"--batch {text!r}: accepted are images per GPU, such as 128,256")
    return found


def read_spread(text: str) -> float:
    """Read --gpu-spread, 2% or 0.02, as a share. Raises ValueError."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= MOST_SPREAD:
        raise ValueError(
            f"--gpu-spread {text!r}: accepted is how far GPUs of one model differ, from 0% to 50%, such as 2%"
        )
    return share


def questions(
    calibration: Calibrated,
    subsets: Sequence[Subset] | None,
    nccl: dict[str, str],
    strategies: Sequence[str] | None,
    batches: Sequence[int] | None,
    network: HostNetwork | None,
    gpu_spread: float | None = None,
    gpus_of_host: int | None = None,
) -> list[Question]:
    """Return every combination that is asked for, in order of models, strategies, batches and GPUs.

    Without `strategies` it is those that the study has, `none` where it has no other; without `batches` the most frequent one of
    each model; without `subsets` twice as many GPUs as the most that were measured. Servers of weights share GPUs of ranks where
    `gpus_of_host` leaves none for them; without it where those of the study do. Raises ValueError.
    """
    refuse_unknown_names(strategies or (), [one.question for one in calibration.cells])
    if subsets is not None and network is None and any(one.hosts > 1 for one in subsets):
        measured = any(one.hosts > 1 for one in calibration.known.links.curves)
        if not measured:
            raise ValueError(
                "--gpus on several hosts: no cell was measured between hosts; say --net 8x50GB/s,5us"
            )
    timed = [one for one in calibration.cells if one.timed]
    machine = machine_of(calibration)
    most = max(one.question.gpus for one in timed)
    wanted = list(subsets) if subsets is not None else [Subset(2 * most)]
    found = []
    for workload in dict.fromkeys(one.question.workload for one in timed):
        of_workload = [one for one in timed if one.question.workload == workload]
        sizes = (
            list(batches)
            if batches
            else [statistics.mode(one.question.batch_size for one in of_workload)]
        )
        known = dict.fromkeys(one.question.strategy for one in of_workload)
        names = strategies or [name for name in known if name != "none"] or ["none"]
        for alike in (like(timed, of_workload, name) for name in names):
            for batch in sizes:
                for subset in wanted:
                    wire = asked_wire(nccl, calibration.link_class, subset.hosts)
                    placed = replace(
                        alike, batch_size=batch, wire=wire, gpus=subset.gpus, hosts=subset.hosts
                    )
                    crossing = network if subset.hosts > 1 else None
                    placed = replace(
                        placed, members=subset.members, network=crossing, machine=machine
                    )
                    placed = replace(placed, workload=workload, gpu_spread=gpu_spread)
                    if gpus_of_host is not None:
                        placed = replace(placed, shares_gpu=shares_gpu(placed, gpus_of_host))
                    found.append(placed)
    return found


def like(timed: Sequence[MeasuredCell], of_workload: Sequence[MeasuredCell], name: str) -> Question:
    """Return the question of a strategy with the options that the study has most often, else without any."""
    cells = [one for one in of_workload if one.question.strategy == name] or [
        one for one in timed if one.question.strategy == name
    ]
    if not cells:
        return replace(
            of_workload[0].question, options=(("name", name),), shares_gpu=False, exchange=""
        )
    common = statistics.mode(one.question.options for one in cells)
    return next(one.question for one in cells if one.question.options == common)


def workload_here(calibration: Calibrated, cell: Cell) -> Workload:
    """Return the workload of a cell with its gradients, which measured cells know. Raises ValueError where none has it."""
    asked = workload_of(request_of(cell), {})
    known = (one.question.workload for one in calibration.cells if one.timed)
    alike = [one for one in known if (one.model, one.rest) == (asked.model, asked.rest)]
    if not alike:
        raise ValueError(
            f"no cell of the study that trains {asked} like this was measured before it"
        )
    return max(alike, key=lambda one: one.gradient_bytes)
