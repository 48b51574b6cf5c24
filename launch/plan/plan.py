"""From requests to an ordered list of cells, in four stages: check, expand, refuse, order. Nothing is started."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.findings.control_cells import control_cells
from analysis.study.names import with_what_differs
from analysis.study.noise_floor import of_other_studies
from analysis.text import count
from benchmarks.record import CellFolder
from benchmarks.record.safe_text import one_line
from conf.cell import Cell
from conf.resolve import CheckedConfig, checked, labelled, resolve, without_effect
from conf.schema import Config, Request
from conf.subsets import by_link, shown
from launch.machine.devices import Machine, look, refuse_small_limits
from launch.machine.fleet import Fleet
from launch.plan.expand import (
    PlannedHost,
    host_names,
    machine_of_topology,
    placements,
    planned_hosts,
    subsets,
    wanted_hosts,
)
from launch.plan.order import (
    PlannedCell,
    choose_replicates,
    known_freedom,
    once_each,
    one_of_each_set,
    ordered,
    parallel_rounds,
    without_settings_alone,
)
from launch.plan.profilers import with_profilers
from launch.plan.refusals import (
    LONGEST,
    THREADS,
    ExpandedSweep,
    refuse_engines,
    refuse_expanded,
    refuse_links,
    refuse_outputs,
    refuse_several_values,
)
from launch.profile.nsys import Nsys
from launch.study.study import study_folder


@dataclass(frozen=True)
class Plan:
    """The cells of one invocation, in the order they will run, and what the user should know."""

    config: (
        Config  # of the first request: study, folders, deadlines and tracking are the same for all
    )
    machine: Machine
    cells: list[PlannedCell]
    notices: list[str] = field(default_factory=list)
    nsys: Nsys | None = None


def plan(
    requests: Sequence[Request], surroundings: Mapping[str, str], fleet: Fleet | None = None
) -> Plan:
    """Return the cells of a sweep, in order. `fleet` are the hosts of `wanted_hosts`, once they have told what they have.

    Without it hosts are taken to be like this machine, or like that of a topology file.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    first = requests[0].config
    is_for_another_machine = first.topology is not None and first.dry_run
    configs, notices = refuse_wrong_options(requests)
    if not is_for_another_machine:
        refuse_small_limits()
    configs, profiler = with_profilers(configs, surroundings)

    if fleet is not None:
        hosts, machine = planned_hosts(fleet), fleet.hosts[0].machine
    else:
        machine = (
            machine_of_topology(first)
            if is_for_another_machine
            else look(first.device, surroundings)
        )
        hosts = {name: PlannedHost(name, machine) for name in wanted_hosts(configs, surroundings)}
        if hosts:
            notices.append(
                _assumed(
                    hosts,
                    f"that of topology={first.topology}"
                    if is_for_another_machine
                    else "this machine",
                )
            )
    cells = _expand(configs, machine, hosts, surroundings)

    refuse_expanded(
        ExpandedSweep(cells, machine, fleet, surroundings, profiler, is_for_another_machine)
    )

    used = without_settings_alone(cells)
    unique = with_what_differs(one_of_each_set(once_each(used)))
    refuse_links(first, unique)
    notices += _about_machine(configs, cells, machine, is_for_another_machine, surroundings)
    notices += _about_cells(configs, cells, used)
    twice = _replicates(unique, first)
    if twice:
        notices.append(
            f"{len(twice)} of {count(len(unique), 'cell')} {'runs' if len(twice) == 1 else 'run'} a second time: so the sweep "
            "knows how far the next run may differ (noise_pairs=0 leaves them out)"
        )
    if first.predict == "auto":
        notices.append(
            "predict=auto says before each cell what it should give; calibrating for that takes a cell up to 1.5 s"
        )
    order = ordered(unique, first.repeats, first.seed, twice, first.predict == "auto")
    if fleet is not None:
        order = parallel_rounds(order, {host.name: host.boot_id for host in fleet})
    return Plan(first, machine, order, list(dict.fromkeys(notices)), profiler.nsys)


def refuse_wrong_options(requests: Sequence[Request]) -> tuple[list[CheckedConfig], list[str]]:
    """Check every option of every request, as far as that needs no machine; return the configurations and notices.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    refuse_several_values(
        [request.config for request in requests], [request.overrides for request in requests]
    )
    configs: list[CheckedConfig] = []
    notices: list[str] = []
    for request in requests:
        config, found = checked(request.config)
        configs.append(config)
        notices += found
        benchmark = config.benchmark["name"]
        if idle := without_effect(benchmark, request.overrides):
            notices.append(
                f"benchmark={benchmark} trains nothing: {', '.join(idle)} changes nothing in it"
            )
    refuse_engines(configs)
    refuse_outputs(requests[0].config)
    return configs, notices


def _expand(
    configs: Sequence[CheckedConfig],
    machine: Machine,
    hosts: Mapping[str, PlannedHost],
    surroundings: Mapping[str, str],
) -> list[Cell]:
    """Return a cell for every subset of every configuration, each after its control cells. Raises Refused."""
    names = host_names(configs, surroundings) if hosts else ()
    all_gpus = {name: host.machine.all_gpus for name, host in hosts.items()} or {
        "": machine.all_gpus
    }
    cells: list[Cell] = []
    for config in configs:
        alone = (((), subset) for subset in (() if config.nodes else subsets(config, machine)))
        for on, subset in placements(config, names, hosts) if config.nodes else alone:
            kind = hosts[on[0]].machine.kind if on else machine.kind
            cell = resolve(config, subset, kind, hosts=on, all_gpus=all_gpus)
            controls = control_cells(cell) if config.waterfall else []
            cells += [*(labelled(one, config) for one in controls), cell]
    return cells


def _assumed(hosts: Iterable[str], like: str) -> str:
    """Return the notice that nothing is known of hosts."""
    return f"no host is asked what it has: {shown([*hosts])} {'is' if len([*hosts]) == 1 else 'are'} taken to be like {like}"


def _replicates(cells: Sequence[Cell], config: Config) -> list[Cell]:
    """Return the cells that run a second time, the same in every launch of a sweep. Raises Refused."""
    folder = study_folder(config.output_dir, config.study)
    known = known_freedom(of_other_studies(folder))
    return choose_replicates(
        cells, config, known, lambda cell: CellFolder(folder / cell.folder).record.exists()
    )


def _about_machine(
    configs: Sequence[Config],
    cells: Sequence[Cell],
    machine: Machine,
    is_for_another_machine: bool,
    surroundings: Mapping[str, str],
) -> Iterator[str]:
    """Yield notices about the machine that is planned for."""
    if is_for_another_machine:
        yield f"planned for the machine of topology={configs[0].topology}, not for this one"
    elif machine.kind == "cpu":
        cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
        on_hosts, there = (
            (" on the hosts", "on each") if any(cell.hosts for cell in cells) else ("", "here")
        )
        yield (
            f"no GPU is used{on_hosts}: {machine.why}. Cells run on CPU workers instead, over gloo and with small images; "
            f"gpus=all is {','.join(map(str, machine.all_gpus))} {there} ({cores})"
        )
        if (most := max((len(cell.gpus) for cell in cells), default=0)) > machine.cores:
            yield f"{most} CPU workers share {cores}: each gets less than a core, and the efficiency falls for that reason alone"
        said = surroundings.get(THREADS, "")
        if said not in ("", str(machine.threads)) and not on_hosts:
            share = count(machine.threads, "thread")
            yield f"{THREADS}={one_line(said, LONGEST)} has no effect on CPU workers: each has {share}, its share of {cores}"
        if any(by_link(config.gpus) for config in configs):
            yield "CPU workers have no links: the first are the best, the worst and the only class"
        if any(cell.nccl for cell in cells):
            yield (
                "NCCL settings have no effect on CPU workers, which use gloo: of cells that differ in them only, one is measured"
            )
        if any(cell.strategy.get("server_gpus", "free") != "free" for cell in cells):
            yield "strategy.server_gpus has no effect on CPU workers: servers keep weights in host memory there"


def _about_cells(
    configs: Sequence[Config], cells: Sequence[Cell], used: Sequence[Cell]
) -> Iterator[str]:
    """Yield notices about listed cells that do not run, and about control cells that there are none of."""
    if any(config.waterfall for config in configs) and not any(map(control_cells, cells)):
        yield (
            "waterfall=true adds no cell: it explains the speed of several GPUs or CPU workers that exchange gradients, with "
            "benchmark=throughput"
        )
    if len(used) < len(cells) and any(
        cell.device == "cuda" for cell in cells
    ):  # for CPU workers another one says it
        yield "NCCL settings do not reach a GPU alone: each is measured once, without them"
    twice = len(used) - len(once_each(used))
    if twice and not any(
        config.waterfall for config in configs
    ):  # one control cell explains several cells
        yield f"{twice} {'cell was' if twice == 1 else 'cells were'} asked for twice and measured once"
