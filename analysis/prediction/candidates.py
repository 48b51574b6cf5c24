"""The cells that are asked for, and the machine that they are for."""

import itertools
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.input_files import UnreadableInput
from analysis.prediction.calibration_data import CalibrationData
from analysis.prediction.link_model import requested_wire
from analysis.prediction.query import CellQuery, Subset, Workload
from analysis.prediction.strategies import exchange_of, refuse_unknown_names, shares_gpu
from analysis.study.provenance import gpus_of, hardware
from analysis.study.study import Study
from analysis.topology.model import Topology, quality
from analysis.topology.readers import parse_topology
from conf.cell import Member
from conf.subsets import CPU_SLOTS

WORK = {"optimize": "eager,graph", "precision": "bf16"}  # options of the work of a rank


@dataclass(frozen=True)
class Candidate:
    """A cell to choose or not; `link_class`: the farthest between its GPUs, if it is known."""

    query: CellQuery
    nccl: tuple[tuple[str, str], ...] = ()
    link_class: str | None = None


def topology_of(study: Study, machine: str) -> Topology | None:
    """Return the topology that the newest record of a machine has; None without any."""
    for record in reversed(study.records):
        text = record.environment.get("topology")
        here = study.single(record).machine == machine
        if here and text:
            try:
                return parse_topology(text)
            except UnreadableInput:
                continue
    return None


def machine_gpus(study: Study, machine: str) -> tuple[int, ...]:
    """Return the GPUs of a machine: by its topology, by the driver, and of its cells."""
    gpus: set[int] = set()
    topology = topology_of(study, machine)
    if topology:
        gpus.update(topology.gpus)
    here = [runs for runs in study.runs if runs.machine == machine]
    device = ""
    if here:
        device = statistics.mode([runs.cell.device for runs in here])
    for runs in here:
        if runs.cell.device != device or runs.cell.hosts:
            continue
        for record in runs.records:
            gpus |= set(record.cell.gpus)
            for gpu in gpus_of(record.environment):
                if "id" in gpu:
                    gpus.add(gpu["id"])
    if device == "cpu":
        gpus |= set(range(CPU_SLOTS))
    return tuple(sorted(gpus))


def farthest_class(topology: Topology | None, members: Sequence[Member]) -> str | None:
    """Return the farthest link class between GPUs; None where it is not known."""
    gpus = [member for member in members if isinstance(member, int)]
    if topology is None or len(gpus) < 2 or not set(gpus) <= set(topology.gpus):
        return None
    links = itertools.starmap(topology.link_between, itertools.combinations(gpus, 2))
    return min(links, key=quality)


def machine_line(study: Study, first: Study, machine: str) -> str:
    """Return which machine forecasts are for, in one sentence; `first` is the study named first."""
    here = [runs for runs in study.runs if runs.machine == machine]
    words = f"These forecasts use runs on {machine}"
    if here and "×" not in machine:
        words += f" ({hardware(here[-1].records[0])})"
    machines = {runs.machine for runs in study.runs}
    if len(machines) > 1:
        words += f": of the {len(machines)} machines in these studies, it has the most runs of "
        words += f"study {first.name}"
    return f"{words}."


def studied_settings(study: Study) -> list[Mapping[str, str]]:
    """Return the NCCL settings of a study's training cells, none at all first."""
    studied: list[Mapping[str, str]] = [{}]
    for runs in study.runs:
        settings = {name: str(value) for name, value in runs.cell.nccl.items()}
        if runs.cell.trains and settings not in studied:
            studied.append(settings)
    return studied


@dataclass(frozen=True)
class ForecastRequest:
    """What the options of `predict` and `advise` ask for; None: what the study has."""

    subsets: Sequence[Subset]
    settings: Sequence[Mapping[str, str]] = ({},)  # of NCCL
    strategies: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    work: Mapping[str, Sequence[str]] = field(default_factory=dict)  # {optimize: words that count}
    gpus_of_host: int | None = None  # servers of weights share GPUs where none is left
    topology: Topology | None = None  # without it links are as those that were measured
    every_option: bool = False  # of a strategy, and every batch size that is as frequent


def candidates(
    calibration: CalibrationData, request: ForecastRequest
) -> dict[Workload, list[Candidate]]:
    """Return every combination that is asked for, by workload. Raises ValueError.

    Settings that choose the same wire count once, and those that do not reach a strategy not at
    all. Strategies have the options that the study has most often, or all of them.
    """
    queries = [cell.query for cell in calibration.timed]
    refuse_unknown_names(request.strategies or (), [cell.query for cell in calibration.cells])
    by_workload: dict[Workload, list[Candidate]] = {}
    of_workload: dict[Workload, list[CellQuery]] = {}
    for query in queries:
        of_workload.setdefault(query.workload, []).append(query)
    for workload in _chosen_workloads(of_workload, request.work):
        here = of_workload[workload]
        sizes = statistics.multimode([query.batch_size for query in here])
        if not request.every_option:
            sizes = sizes[:1]
        by_query: dict[CellQuery, Candidate] = {}
        for kind, batch_size, subset, settings in itertools.product(
            _kinds(queries, here, request),
            request.batches or sizes,
            request.subsets,
            request.settings,
        ):
            alone = subset.gpus * subset.hosts == 1
            if kind.strategy == "none" and not alone and not request.strategies:
                continue  # ranks that train apart
            if not exchange_of(kind).by_nccl or alone:
                settings = {}  # it reaches no other
            link_class = farthest_class(request.topology, subset.members) or calibration.link_class
            query = replace(
                kind,
                workload=workload,
                batch_size=batch_size,
                wire=requested_wire(settings, link_class, subset.hosts),
                gpus=subset.gpus,
                hosts=subset.hosts,
                members=subset.members,
                machine=calibration.machine,
            )
            if request.gpus_of_host is not None:
                query = replace(query, shares_gpu=shares_gpu(query, request.gpus_of_host))
            typed = tuple(sorted(settings.items()))
            by_query.setdefault(query, Candidate(query, typed, link_class))
        by_workload[workload] = list(by_query.values())
    return by_workload


def _chosen_workloads(
    workloads: Iterable[Workload], work: Mapping[str, Sequence[str]]
) -> list[Workload]:
    """Return the workloads with the words that are asked for. Raises ValueError for others."""
    chosen = list(workloads)
    for name, values in work.items():
        accepted = list(dict.fromkeys(workload.requested(name) for workload in chosen))
        for value in values:
            if value not in accepted:
                raise ValueError(
                    f"--{name} {value!r}: the study has no such training run; expected one of: "
                    f"{', '.join(accepted)}"
                )
        chosen = [workload for workload in chosen if workload.requested(name) in values]
    return chosen


def _kinds(
    queries: Sequence[CellQuery], here: Sequence[CellQuery], request: ForecastRequest
) -> list[CellQuery]:
    by_options: dict[object, CellQuery] = {}
    studied: dict[str, None] = {}
    for query in here:
        if query.strategy != "none":
            by_options[query.options] = query
            studied[query.strategy] = None
    if request.every_option and by_options and not request.strategies:
        return list(by_options.values())
    kinds = []
    for name in request.strategies or list(studied) or ["none"]:
        alike = [query for query in here if query.strategy == name]
        if not alike:  # with another workload
            alike = [query for query in queries if query.strategy == name]
        if alike:
            options = statistics.mode([query.options for query in alike])
            kinds.append(next(query for query in alike if query.options == options))
        else:
            kinds.append(replace(here[0], options=(("name", name),), shares_gpu=False, sends=""))
    return kinds


def measuring_command(several: Sequence[Candidate], gpus: Sequence[int], study: Path) -> str:
    """Return the command that measures candidates of one workload and size, each with each value
    of the others; of more ranks than this machine has GPUs what can be measured on it.
    """
    first, workload = several[0].query, several[0].query.workload
    where = "gpus=scale repeats=3"
    if first.across_hosts:
        where = "engine=ssh nodes=1,2 hosts=FILE gpus=all"
    elif first.ranks <= len(gpus):
        subsets = [each.query.members or gpus[: first.ranks] for each in several]
        mark = "," if len(set(subsets)) == 1 else "+"
        where = _swept("gpus", [mark.join(map(str, subset)) for subset in subsets])
    model = f"model={workload.model}"
    if workload.requested("model.library") == "python":
        model = f"model.library=python model.builder={workload.requested('model.builder')}"
    words = ["python launch.py -m", where, model]
    words.append(_swept("strategy", [each.query.strategy for each in several]))
    words.append(_swept("batch_size", [str(each.query.batch_size) for each in several]))
    words += [f"{name}={workload.requested(name)}" for name in WORK if workload.requested(name)]
    for name in sorted({name for each in several for name, _ in each.nccl}):
        values = [dict(each.nccl).get(name, "null") for each in several]
        words.append(_swept(f"nccl.{name.removeprefix('NCCL_').lower()}", values))
    if study.name in ("", ".."):
        study = study.resolve()
    words.append(f"output_dir={shlex.quote(str(study.parent))} study={shlex.quote(study.name)}")
    return " ".join(words)


def _swept(name: str, values: Iterable[str]) -> str:
    return f"{name}={','.join(dict.fromkeys(values))}"
