"""From requests to an ordered list of cells, in four stages: check, expand, refuse, order. Nothing
is started."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.findings.baselines import control_cells
from analysis.study.names import with_what_differs
from analysis.study.noise_floor import of_other_studies
from analysis.text import count
from benchmarks.record import CellFolder, read_study
from benchmarks.record.safe_text import one_line
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.question import FASTEST, GAINS, RATES, SCALES, Question, asked_question
from conf.resolve import CheckedConfig, checked, labelled, resolve, without_effect
from conf.schema import Config, Request
from conf.subsets import by_link, shown
from launch.machine.devices import Machine, look, too_small
from launch.machine.fleet import Fleet
from launch.nsys import Nsys, find
from launch.plan import rehearsal
from launch.plan.estimate import duration, estimates
from launch.plan.expand import (
    PlannedHost,
    host_names,
    machine_of_topology,
    placements,
    subsets,
    wanted_hosts,
)
from launch.plan.order import (
    PlannedCell,
    choose_replicates,
    known_freedom,
    one_per_cpu_cell,
    ordered,
    unique_cells,
    without_unused_nccl,
)
from launch.plan.refusals import (
    SWEEP_REFUSALS,
    ExpandedSweep,
    refuse_links,
    refuse_outputs,
    refuse_requests,
    refuse_several_values,
)
from launch.study.study_folder import study_folder

LONGEST = 40  # characters of a value of the environment


@dataclass(frozen=True)
class Plan:
    """The cells of one invocation, in the order they will run, and what the user should know."""

    config: Config  # of the first request; what all share: study, folders, deadlines and tracking
    machine: Machine
    cells: list[PlannedCell]
    notices: list[str] = field(default_factory=list)
    nsys: Nsys | None = None
    question: Question | None = None  # the cells are its candidates
    training: tuple[Cell, ...] = ()  # the same candidates in training, where cells are of links


def plan(
    requests: Sequence[Request], surroundings: Mapping[str, str], fleet: Fleet | None = None
) -> Plan:
    """Return the cells of a sweep, in order. `fleet` are the hosts of `wanted_hosts`, with what
    each has. Without it hosts are taken to be like this machine, or like that of a topology file.

    Raises Refused: names the field, the value and what is accepted.
    """
    first = requests[0].config
    is_for_another_machine = first.topology is not None and first.dry_run
    for request in requests:
        if first.search is not None:
            config = replace(request.config, benchmark=request.config.search)
            requests = [*requests, Request(config, [])]
    configs, notices = refuse_wrong_options(requests)
    if not is_for_another_machine:
        for sentence in too_small():
            raise Refused(sentence)
    if first.topology is not None:
        machine_of_topology(first)  # also where only gpus=classes would read the file
    configs, nsys, nsys_missing = with_profilers(configs, surroundings)

    if first.rehearse is not False and any(config.nodes for config in configs):
        raise Refused(f"rehearse={first.rehearse}: works on this machine only, without nodes=")
    hosts = {}
    if fleet is not None:
        machine = fleet.hosts[0].machine
        for host in fleet:
            hosts[host.name] = PlannedHost(host.machine, str(host.facts.get("topology", "")))
    else:
        like = "this machine"
        if is_for_another_machine:
            machine, like = machine_of_topology(first), f"topology={first.topology}"
        else:
            machine = look(first.device, surroundings)
            if first.rehearse is not False:
                wanted = machine if first.topology is None else machine_of_topology(first)
                machine = rehearsal.machine_of(first, machine, wanted.all_gpus)
        names = wanted_hosts(configs, surroundings)
        hosts = dict.fromkeys(names, PlannedHost(machine))
        if hosts:
            verb = "are"
            if len(names) == 1:
                verb = "is"
            hint = ""
            if machine.kind == "cpu" and first.device != "cpu":
                hint = "; topology=FILE, of nvidia-smi topo -m there, plans for its GPUs"
            notices.append(
                f"no host was contacted: {shown(names)} {verb} assumed to have the GPUs and links "
                f"of {like}{hint}"
            )
    cells = _expand(configs, machine, hosts, surroundings)
    sweep = ExpandedSweep(cells, machine, fleet, surroundings, nsys_missing, is_for_another_machine)
    for refuse in SWEEP_REFUSALS:
        refuse(sweep)

    used = without_unused_nccl(cells)
    unique = with_what_differs(one_per_cpu_cell(unique_cells(used)))
    refuse_links(first, unique)
    if is_for_another_machine:
        notices.append(f"planned for the machine of topology={first.topology}, not for this one")
    elif machine.kind == "cpu":
        notices += _about_cpu_workers(configs, cells, machine, surroundings)
    notices += _about_cells(configs, cells, used)

    folder = study_folder(first.output_dir, first.study)
    question = asked_question(first)
    if question is not None and not machine.present:
        training = tuple(cell for cell in unique if cell.trains and first.search is not None)
        searched = [cell for cell in unique if cell not in training]
        if training and len(training) != len(searched):
            why = "candidates differ in more than settings of NCCL; expected the same of all else"
            raise Refused(f"search: {why}")
        strategies = {cell.strategy["name"] for cell in searched}
        if question.kind == FASTEST and "none" in strategies and len(strategies) > 1:
            searched = [cell for cell in searched if cell.strategy["name"] != "none"]
            notices.append(
                "strategy=none is left out: without an exchange no strategy can be faster"
            )
        refuse_question(question, first, searched, folder)
        notices.append(
            f"ask={question.kind}: measures each of {count(len(searched), 'candidate')} once, then "
            "repeats those that are undecided"
        )
        if first.repeats > 1:
            notices.append(
                f"repeats={first.repeats} is not used: ask={question.kind} repeats each candidate "
                f"until it is decided; for {first.repeats} runs of each, leave ask= out"
            )
        candidates = list(map(PlannedCell, searched))
        notices = list(dict.fromkeys(notices))
        return Plan(first, machine, candidates, notices, nsys, question, training)
    twice = choose_replicates(
        unique,
        first,
        known_freedom(of_other_studies(folder)),
        was_replicated=lambda cell: CellFolder(folder / cell.folder).record.exists(),
    )
    if machine.present:
        if not first.dry_run:
            rehearsal.refuse_old_nccl(machine, surroundings)
        order = ordered(unique, first.repeats, first.seed, twice)
        notices = [
            "a rehearsal: runs are brief, and their times are not used",
            *dict.fromkeys(notices),
        ]
        config, order = rehearsal.rehearsed(first, machine, order)
        return Plan(config, machine, order, notices, nsys)
    if twice:
        notices.append(
            f"{len(twice)} of {count(len(unique), 'configuration')} measured twice, to learn the "
            "run-to-run variation (noise_pairs=0 leaves that out)"
        )
    if first.predict == "auto":
        notices.append(
            "predict=auto forecasts each run before it starts; calibration adds up to 1.5 s to each"
        )
    order = ordered(unique, first.repeats, first.seed, twice, first.predict == "auto")
    return Plan(first, machine, order, list(dict.fromkeys(notices)), nsys)


def refuse_question(
    question: Question, config: Config, cells: Sequence[Cell], folder: Path
) -> None:
    """Refuse a question that these candidates cannot answer; `folder` is the study's.

    Raises:
        Refused: one candidate, pairs that are asked for too, numbers of GPUs that do not fit the
            question, or a budget that is too short for one run of each.
    """
    ask = f"ask={question.kind}"
    if config.noise_pairs not in ("auto", 0):
        typed = f"noise_pairs={config.noise_pairs}"
        raise Refused(f"{ask} {typed}: a question chooses what runs again; leave {typed} out")
    if config.waterfall:
        raise Refused(f"{ask} waterfall=true: control runs are not candidates; leave one out")
    first, last = cells[0], cells[-1]
    exchanges = first.strategy != last.strategy or not first.trains
    if question.kind == GAINS and first.world_size < 2 and exchanges:
        raise Refused(
            f"gpus={','.join(config.gpus)}: {ask} and tune= need two or more GPUs or workers, as "
            "in gpus=0,1; one alone exchanges nothing"
        )
    if question.kind == GAINS and first.device == "cpu" and not first.trains:
        raise Refused(
            f"{ask} nccl=…: CPU workers use gloo, which has no settings of NCCL; expected GPUs"
        )
    if len(cells) < 2:
        raise Refused(
            f"{ask}: there is one candidate, {cells[0].name}; expected two or more, as in "
            "strategy=nccl_allreduce,kvstore_device"
        )
    sizes = [cell.world_size for cell in cells]
    if question.kind == SCALES:
        alike = {replace(cell, gpus=(0,), labels=()).key for cell in cells}
        if len(set(sizes)) < len(cells) or len(alike) > 1:
            raise Refused(
                f"{ask}: candidates differ in more than their number of GPUs; expected one of each "
                "number, as in gpus=scale"
            )
    elif question.kind in (FASTEST, GAINS) and len(set(sizes)) > 1 and question.rate is None:
        raise Refused(
            f"{ask}: candidates run on {min(sizes)} to {max(sizes)} GPUs or workers; expected "
            f"rate={' or rate='.join(RATES)}, to say which rate counts"
        )
    if question.budget_s is not None:
        records, _ = read_study(folder)
        planned = list(map(PlannedCell, cells))
        once_s = sum(each.seconds for each in estimates(planned, records))
        if once_s > question.budget_s:
            raise Refused(
                f"budget={config.budget}: expected {duration(once_s)} or more, which one run of "
                f"each of {len(cells)} candidates takes"
            )


def refuse_wrong_options(requests: Sequence[Request]) -> tuple[list[CheckedConfig], list[str]]:
    """Check every option of every request, as far as that needs no machine; return the
    configurations and notices.

    Raises Refused: names the field, the value and what is accepted.
    """
    refuse_several_values(requests)
    configs: list[CheckedConfig] = []
    notices: list[str] = []
    for request in requests:
        config, translated = checked(request.config)
        configs.append(config)
        notices += translated
        benchmark = config.benchmark["name"]
        idle = without_effect(benchmark, request.overrides)
        if idle:
            notices.append(
                f"benchmark={benchmark} trains nothing: {', '.join(idle)} changes nothing in it"
            )
    refuse_requests(configs)
    refuse_outputs(requests[0].config)
    return configs, notices


def with_profilers(
    configs: Sequence[CheckedConfig], surroundings: Mapping[str, str]
) -> tuple[list[CheckedConfig], Nsys | None, Refused | None]:
    """Return the configurations without `profiler=auto`, the nsys that they use, and why there is
    none where a request names it.

    `auto` means nsys where it is found and new enough, else torch; torch with nodes= and for a
    script. A plan for another machine runs no nsys here.

    Raises Refused: two configurations name different programs.
    """
    paths: dict[str | None, bool] = {}  # of nsys, and whether a request names it
    for config in configs:
        profiler, benchmark = config.profiler, config.benchmark["name"]
        trains = groups.choice("benchmark", benchmark).trains
        is_nsys = profiler["name"] == "nsys" and (trains or benchmark == "script")
        if is_nsys or (profiler["name"] == "auto" and trains and not config.nodes):
            path = profiler["nsys_path"]
            paths[path] = paths.get(path, path is not None) or is_nsys
    if len(paths) > 1:
        raise Refused(
            f"profiler.nsys_path={','.join(map(str, paths))}: a sweep has one; run one sweep "
            "for each"
        )
    nsys: Nsys | None = None
    missing: Refused | None = None
    for path, is_named in paths.items():
        try:
            nsys = find(path, surroundings)
        except Refused as error:
            if is_named and not (configs[0].topology is not None and configs[0].dry_run):
                missing = error
    chosen = []
    for config in configs:
        if config.profiler["name"] == "auto":
            name = "torch"
            if nsys and not config.nodes and config.benchmark["name"] != "script":
                name = "nsys"
            config = replace(config, profiler=config.profiler | {"name": name})
        chosen.append(config)
    return chosen, nsys, missing


def _expand(
    configs: Sequence[CheckedConfig],
    machine: Machine,
    hosts: Mapping[str, PlannedHost],
    surroundings: Mapping[str, str],
) -> list[Cell]:
    """Return a cell for every subset of every configuration, each after its control cells."""
    names: tuple[str, ...] = ()
    all_gpus = {"": machine.all_gpus}
    if hosts:
        names = host_names(configs, surroundings)
        all_gpus = {name: host.machine.all_gpus for name, host in hosts.items()}
    cells: list[Cell] = []
    for config in configs:
        if config.nodes:
            placed = list(placements(config, names, hosts))
        else:
            placed = [((), subset) for subset in subsets(config, machine)]
        for on, subset in placed:
            kind = machine.kind
            if on:
                kind = hosts[on[0]].machine.kind
            cell = resolve(config, subset, kind, hosts=on, all_gpus=all_gpus)
            if config.waterfall:
                cells += [labelled(control, config) for control in control_cells(cell)]
            cells.append(cell)
    return cells


def _about_cpu_workers(
    configs: Sequence[Config],
    cells: Sequence[Cell],
    machine: Machine,
    surroundings: Mapping[str, str],
) -> Iterator[str]:
    cores = count(machine.cores, "core")
    on_hosts = ""
    most = 0
    has_settings = shares_gpus = False
    for cell in cells:
        most = max(most, len(cell.gpus))
        has_settings = has_settings or bool(cell.nccl)
        shares_gpus = shares_gpus or cell.strategy.get("server_gpus", "free") != "free"
        if cell.hosts:
            on_hosts = " on each host"
    if most > machine.cores:
        yield (
            f"{most} CPU workers share {cores}: each gets less than a core, and the efficiency "
            "falls for that reason alone"
        )
    threads = surroundings.get("OMP_NUM_THREADS", "")
    if threads not in ("", str(machine.threads)) and not on_hosts:
        share = count(machine.threads, "thread")
        yield (
            f"OMP_NUM_THREADS={one_line(threads, LONGEST)} has no effect on CPU workers: each has "
            f"{share}, its share of {cores}"
        )
    if any(by_link(config.gpus) for config in configs):
        yield "CPU workers have no links, so there is one class: the first ones stand for all"
    if has_settings:
        yield (
            "NCCL settings have no effect on CPU workers, which use gloo: of runs that differ in "
            "them only, one is measured"
        )
    if shares_gpus:
        yield (
            "strategy.server_gpus has no effect on CPU workers: servers keep weights in host "
            "memory there"
        )
    why = f"no NVIDIA GPU found ({machine.why.partition(' (')[0]})"
    if machine.why.startswith("device="):
        why = machine.why
    workers = count(most, "CPU worker")
    where = f"running on {workers}{on_hosts} (gloo, small images)"
    yield f"{why}: {where}. These numbers say nothing about GPUs."


def _about_cells(
    configs: Sequence[Config], cells: Sequence[Cell], used: Sequence[Cell]
) -> Iterator[str]:
    typed = configs[0].gpus
    if len(configs) == 1 and len(typed) == 1 and typed[0].isdecimal() and int(typed[0]) > 1:
        several = ",".join(map(str, range(int(typed[0]))))
        yield f"gpus={typed[0]} is number {typed[0]} alone; the first {typed[0]} are gpus={several}"
    if len(configs) == 1 and ",".join(typed) in ("1,2,4", "1,2,4,8"):
        yield f"gpus={','.join(typed)} is one subset; for 1, then 2, then 4 GPUs write gpus=scale"
    has_waterfall = any(config.waterfall for config in configs)
    if has_waterfall and not any(map(control_cells, cells)):
        yield (
            "waterfall=true has no effect here; it needs benchmark=throughput, and at least two "
            "GPUs or two CPU workers that exchange gradients"
        )
    # For CPU workers another notice says it.
    if len(used) < len(cells) and any(cell.device == "cuda" for cell in cells):
        yield "NCCL settings have no effect on one GPU: it is measured once, without them"
    twice = len(used) - len(unique_cells(used))
    if twice and not has_waterfall:  # one control cell explains several cells
        yield f"{count(twice, 'duplicate')}: measured once"
