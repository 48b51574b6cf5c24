"""Builders of test data: cells, records, studies, and descriptions of hosts."""

import copy
import dataclasses
import functools
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from analysis.study.conditions import IMAGES_PER_SECOND
from benchmarks import record as records
from benchmarks.agent.processes import merged
from benchmarks.record import CellFolder, Failure, Record, Validity, metrics
from conf import groups
from conf.cell import Cell, Network, Optimizer
from conf.command_line import normalise
from conf.resolve import checked, resolve
from launch.compose import parsed, shared_config
from launch.engines.environment import cell_variables
from launch.machine.facts import RECORDED
from launch.machine.fleet import Fleet, Host
from launch.study.study_folder import ProcessIdentity, Sweep

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
BENCHMARK = {
    "name": "throughput", "min_iterations": 4, "max_iterations": 6, "max_seconds": 0.2,
    "interval_target": 0.0025, "warmup_iterations": 2, "warmup_min_seconds": 0.0,
    "warmup_max_seconds": 0.1, "exchange_iterations": 4, "limit_iterations": 2, "exposed_rounds": 1,
}  # fmt: skip
DDP = {
    "name": "nccl_allreduce", "bucket_cap_mb": 25.0, "gradient_as_bucket_view": True,
    "static_graph": True, "broadcast_buffers": False, "comm_hook": "none", "powersgd_rank": 4,
}  # fmt: skip


# Real ranks spend most of their time on the 1.2 million weights of fmnist_cnn; this has 18,362.
SMALL_CNN = Network("small_cnn", "python", "build:small_cnn", 1, 10, 12, 0.0, {})


def small_cnn(classes, channels):
    """The layers of fmnist_cnn, narrower, for images of 12 × 12."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, classes),
    )  # fmt: skip


def make_cell(gpus=(0, 1), strategy=None, batch_size=2, precision="fp32", **more):
    """A tiny cell of the Fashion-MNIST network on CPU workers; `more` are other fields of it, and
    options of its benchmark."""
    fields = {field.name for field in dataclasses.fields(Cell)} & more.keys()
    benchmark = BENCHMARK | {name: more[name] for name in more.keys() - fields}
    cell = Cell(
        model=Network("fmnist_cnn", "ringside", "fmnist_cnn", 1, 10, 28, 0.0, {}),
        strategy=strategy or DDP,
        benchmark=benchmark,
        declared=declared(strategy or DDP, benchmark),
        nccl={},
        optimizer=Optimizer(),
        profiler="none",
        gpus=gpus,
        device="cpu",
        batch_size=batch_size,
        global_batch_size=None,
        precision=precision,
        optimize="eager",
        channels_last=False,
        seed=0,
    )
    return dataclasses.replace(cell, **{name: more[name] for name in fields})


def declared(strategy, benchmark):
    """What the YAML files of a strategy and a benchmark say beside their options."""
    return {
        "strategy": groups.choice("strategy", strategy["name"]).declared(),
        "benchmark": groups.choice("benchmark", benchmark["name"]).declared(),
    }


def target_of(group, name):
    """The dotted name of what a rank calls for a strategy or benchmark."""
    return groups.choice(group, name).rules["_target_"]


def options_of(group, asked, ranks=2):
    """The options of a strategy or benchmark on CPU workers, with its YAML's defaults."""
    return groups.resolved(group, groups.choice(group, asked["name"]).options | asked, "cpu", ranks)


def changed_cell(cell, **changes):
    """The cell with other fields; of its model those that are named."""
    model = cell.to_dict()["model"] | changes.pop("model", {})
    return Cell.from_dict(cell.to_dict() | changes | {"model": model})


def strategy_of(asked):
    """A strategy with its YAML's defaults."""
    return options_of("strategy", asked)


def exchange_cell(case):
    benchmark = options_of(
        "benchmark",
        {"name": "exchange", "iterations": 3, "limit_iterations": 2, **case["exchange"]},
    )
    cell = make_cell(
        tuple(range(case["workers"])),
        strategy_of(case["strategy"]),
        precision=case.get("precision", "fp32"),
    )
    return dataclasses.replace(
        cell, benchmark=benchmark, declared=declared(cell.strategy, benchmark)
    )


def configuration(*typed):
    """The configuration that launch.py composes for one run (fixture `hydra`)."""
    return shared_config(parsed(normalise(typed)))[1]


def composed_cell(*typed, gpus=(0, 1), device="cuda"):
    """The cell of some options, as launch.py composes and resolves them (fixture `hydra`)."""
    config, _ = checked(configuration(*typed))
    return resolve(config, gpus, device)


def links_cell(workers, asked):
    """The cell of a benchmark that trains nothing, with its YAML's defaults."""
    options = options_of("benchmark", asked, workers)
    return dataclasses.replace(
        make_cell(tuple(range(workers))),
        model=Network("none", "ringside", "none", 0, 0, 0, 0.0, {}), strategy={"name": "none"}, benchmark=options,
        declared=declared({"name": "none"}, options),
    )  # fmt: skip


def several_hosts_cells(hosts, gpus):
    staged, hierarchical = (
        {"strategy": strategy_of({"name": name})} for name in ("cpu_staged", "hierarchical")
    )
    cells = {
        "throughput": make_cell(**hierarchical),
        "exchange": exchange_cell({"workers": gpus, "exchange": {}, **staged}),
        "collectives": links_cell(
            hosts * gpus,
            {
                "name": "collectives",
                "min_bytes": "1K",
                "max_bytes": "1KiB",
                "iterations": 2,
                "warmup": 1,
            },
        ),
    }
    placed = {
        "gpus": list(range(gpus)),
        "hosts": [chr(ord("a") + number) for number in range(hosts)],
    }
    return {name: changed_cell(cell, **placed) for name, cell in cells.items()}


REAL = json.loads(
    (
        DATA / "h200_x4/scaling/resnet50-nccl_allreduce-gpus0-1-2-3-9176bc4a60/record.json"
    ).read_text()
)
REAL_IMAGES = REAL["metrics"]["throughput/images"]
EVIL = "=cmd|' /C calc'!A0 <script>alert(1)</script> $x_{1}$ \\input{a} {{ 7*7 }} \"></svg> \u202e\x1b[2J *b* [l](http://x)"

# What the checks say of a short cell on a busy machine, and of ranks that did not start as a cell's do.
BUSY = {"noisy", "warmup_not_flat", "too_few_iterations", "missing_rank", "not_stationary", "pauses", "slow_rank",
        "time_between_steps"}  # fmt: skip


def make_record(**changes):
    made = Record(
        record_id="0" * 32,
        cell_key="1" * 16,
        name="resnet50 · nccl_allreduce · gpus 0,3",
        cell=Cell.from_dict(REAL["cell"] | {"gpus": [0, 3], "nccl": {"NCCL_P2P_LEVEL": "LOC"}}),
        study="default",
        sweep_id="2" * 32,
        overrides=["gpus=0,3"],
        state="finished",
        started_at=1_795_000_000.25,
        ended_at=1_795_000_060.5,
        failure=Failure("hang", 1, "rank 1 gave no sign", "last line"),
        validity=Validity("suspect", {"noisy": "wide"}, {"wrong_gpu": "no identity"}),
        environment={"versions": {"torch": "2.11"}},
        model={"parameters": 1199882},
        metrics={"throughput/images_per_second": 5000.0},
        series={"step/ms_median": [[20, 51.0], [40, 50.0]]},
        checks={"losses": [2.3, 2.2], "half_width": 0.01, "warmup_flat": True},
        ranks=[{"rank": 0, "done": True}],
    )
    return dataclasses.replace(made, **changes)


def run_of(cell, repeat, rate, **changes):
    """A valid run of a cell, with a record_id that follows from cell and rate."""
    cell = dataclasses.replace(cell, repeat=repeat)
    facts = {"failure": None, "validity": Validity("valid", {}, {})} | changes
    number = f"{abs(hash((cell.key, rate))):032x}"[-32:]
    return make_record(
        cell=cell, cell_key=cell.key, record_id=number, series={}, ranks=[],
        metrics={"throughput/images_per_second": rate}, **facts,
    )  # fmt: skip


def record(number, gpus, rate, *, strategy="nccl_allreduce", **changes):
    """A record made from a real one; `changes` are fields of it, those of the cell and of metrics are merged."""
    made = copy.deepcopy(REAL) | {
        "record_id": f"{number:032x}",
        "cell_key": f"{number:016x}",
        "series": {},
    }
    cell = changes.pop("cell", {})
    model = made["cell"]["model"] | cell.get("model", {})
    made["cell"] |= {"gpus": gpus, "strategy": {"name": strategy}} | cell | {"model": model}
    made["name"] = f"{made['cell']['model']['name']} · {strategy} · gpus {','.join(map(str, gpus))}"
    made["started_at"] += 60 * number
    made["ended_at"] = made["started_at"] + 50
    follows = {
        f"{IMAGES_PER_SECOND}_per_gpu": rate / len(gpus),
        "throughput/seconds": REAL_IMAGES / rate,
    }
    made["metrics"] |= {IMAGES_PER_SECOND: rate} | follows | changes.pop("metrics", {})
    made["within_run"] = {IMAGES_PER_SECOND: {"low": 0.999 * rate, "high": 1.001 * rate}}
    uuids = {gpu["id"]: gpu["uuid"] for gpu in made["environment"]["gpu"]["gpus"]}
    made["environment"] |= {"planned_uuids": [uuids[gpu] for gpu in gpus]} | changes.pop(
        "environment", {}
    )
    return made | changes


INTERFACES = {"a": "eth0", "b": "eth1", "c": "eth0"}  # and their interfaces


def facts_of(host, gpus=4, mbit=1000):
    """What a record says of a host: GPUs of its own, and the interface that leads to the others."""
    real = REAL["environment"]
    listed = [one | {"uuid": f"GPU-{host}{one['id']}"} for one in real["gpu"]["gpus"][:gpus]]
    return {
        "name": host,
        "host": f"node-{host}",
        "cpu": real["cpu"],
        "gpu": real["gpu"] | {"gpus": listed},
        "interface": INTERFACES[host],
        "interfaces": [{"name": INTERFACES[host], "mbit_per_s": mbit}],
    }


def on_hosts(number, hosts, gpus, rate, **changes):
    """A record of a cell with hosts, as `record` makes one."""
    environment = {
        "inherited": [],
        "hosts": [facts_of(host) for host in hosts],
        "host": f"node-{hosts[0]}",
    } | changes.pop("environment", {})
    metrics = {f"{IMAGES_PER_SECOND}_per_gpu": rate / len(gpus) / len(hosts)} | changes.pop(
        "metrics", {}
    )
    cell = {"hosts": list(hosts)} | changes.pop("cell", {})
    made = record(
        number, gpus, rate, cell=cell, metrics=metrics, environment=environment, **changes
    )
    uuids = [f"GPU-{host}{gpu}" for host in hosts for gpu in gpus]
    of_rank = [made["ranks"][0] | {"rank": rank, "uuid": uuid} for rank, uuid in enumerate(uuids)]
    made["environment"] |= {"planned_uuids": uuids, "gpu": facts_of(hosts[0])["gpu"]}
    return made | {"ranks": of_rank, "name": Cell.from_dict(made["cell"]).name}


def without_entry(records):
    """The names of metrics and series in records that the table of metrics does not have."""
    return {
        name
        for one in records
        for name in (*one.metrics, *one.series)
        if metrics.known(name) is None
    }


def study(folder, records):
    for one in records:
        cell = folder / one["record_id"]
        cell.mkdir(parents=True)
        (cell / "record.json").write_text(json.dumps(one))
    return folder


def words(value):
    """Every name and value in nested JSON."""
    if isinstance(value, dict):
        return [*value, *(one for inner in value.values() for one in words(inner))]
    if isinstance(value, list):
        return [one for inner in value for one in words(inner)]
    return [value]


def files_with_auto(study):
    """The files of a study that say `auto` of a cell: cell.json, attempt.json and record.json, but for the typed command line."""
    found = []
    for path in sorted(study.glob("**/*.json")):
        if path.name in ("cell.json", "attempt.json", "record.json"):
            content = json.loads(path.read_text())
            content.pop("overrides", None)
            found += [path] * ("auto" in words(content))
    return found


TRACKED_START = 1_795_000_000.0


def tracked_record(number=0, **changes):
    """A finished cell; `number` makes its ids and times its own."""
    made = make_record(
        record_id=f"{number:032x}",
        cell_key=f"{number:016x}",
        name="resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC",
        study="scaling",
        sweep_id="a" * 32,
        overrides=["gpus=0,3", "nccl.p2p_level=LOC"],
        started_at=TRACKED_START + number,
        ended_at=TRACKED_START + number + 60,
        model={"parameters": 25557032.0, "gradient_bytes": 102228128.0},
        metrics={"throughput/images_per_second": 5000.0, "comm/busbw_gb_per_s": 12.5},
        series={"step/ms": [[0, 51.0], [1, 50.0], [2, 50.0]]},
        effective={"transport": "SHM", "link_class": "NV18"},
        environment={
            "host": "launcher",
            "cpu": {"model": "Xeon"},
            "gpu": {
                "driver": "580.159.04",
                "gpus": [{"id": 0, "name": "NVIDIA H200"}, {"id": 3, "name": "NVIDIA H200"}],
            },
            "versions": {"torch": "2.11.0+cu130", "nccl": "2.28.9"},
            "git": {"commit": "c" * 40},
        },
        ranks=[{"rank": 0, "host": "node7"}, {"rank": 1, "host": "node7"}],
        failure=None,
        validity=Validity(),
        checks={},
    )
    return dataclasses.replace(made, **changes)


def tracked_folder(study_dir, record):
    """A cell's folder with its record, as the supervisor leaves it."""
    folder = study_dir / f"cell-{record.record_id[-6:]}"
    for name in ("ranks", "logs", "nccl"):
        (folder / name).mkdir(parents=True)
    (folder / "ranks" / "0.jsonl").write_text('{"kind": "start", "time": 1}\n')
    (folder / "logs" / "0.log").write_text("rank 0\n")
    (folder / "nccl" / "0.log").write_text("NCCL INFO\n")
    (folder / "topology.txt").write_text("GPU0\n")
    records.write(CellFolder(folder), record)
    return folder


def make_sweep(cells=2):
    return Sweep("a" * 32, "scaling", ["gpus=0,3"], TRACKED_START, cells, ProcessIdentity.own())


def database_rows(file):
    """Every row of every table: what 'changes nothing' means."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        return {
            name: sorted(map(repr, connection.execute(f'SELECT * FROM "{name}"')))
            for name in tables
        }


def tracked_runs(tracker):
    return {run.info.run_name: run for run in tracker._client.search_runs([tracker._experiment])}


GPUS = [
    {
        "id": number,
        "uuid": f"GPU-{number}",
        "bus_id": f"0000:0{number}:00.0",
        "name": "NVIDIA H200",
        "memory_bytes": 1 << 37,
    }
    for number in range(2)
]
WITH_GPUS = {
    "machine": {"kind": "cuda", "devices": GPUS, "all_gpus": [0, 1], "cores": 8, "why": ""},
    "facts.gpu": {"driver": "580.65.06", "gpus": [{**one, "max_sm_mhz": 1980} for one in GPUS]},
}


@functools.cache
def printed():
    """What the command prints on this host, as text, whatever of what a record keeps is set around pytest."""
    around = {name: value for name, value in os.environ.items() if not name.startswith(RECORDED)}
    command = [sys.executable, "-m", "launch.machine.facts", "cpu"]
    return subprocess.run(
        command, cwd=ROOT, env=around, capture_output=True, check=True, timeout=60
    ).stdout


def described(**changes):
    """The description of this host with some fields replaced: `facts__cpu` or "facts.cpu" is a field of a field."""
    plain = copy.deepcopy(json.loads(printed()))
    for path, value in changes.items():
        *inside, last = path.replace("__", ".").split(".")
        functools.reduce(lambda part, name: part[name], inside, plain)[last] = copy.deepcopy(value)
    return plain


def host(name, **changes):
    return Host.described(name, described(**changes))


def interface(name, *addresses, mbit_per_s=1000, loopback=False, inner=False):
    return {
        "name": name,
        "addresses": list(addresses),
        "mbit_per_s": mbit_per_s,
        "loopback": loopback,
        "inner": inner,
    }


def fleet(**changes_of):
    return Fleet(tuple(host(name, **changes) for name, changes in changes_of.items()))


def environment(cell, machine, folder, token, surrounding):
    """The environment of a cell's processes on a machine with such variables around the launcher."""
    return merged(cell_variables(cell, machine, folder, token), surrounding)


def steps(function, *arguments, of=""):
    """The lines of Python that a call takes, each turn of a loop counted; of functions of a name."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += of in ("", frame.f_code.co_name)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count
