"""Records for tests: one with every field filled, and studies of records made from a real one."""

import copy
import dataclasses
import json
from pathlib import Path

from analysis.study.rates import IMAGES_PER_SECOND
from benchmarks.record import Failure, Record, Validity, metrics
from conf.cell import Cell

H200_X4 = Path(__file__).parent / "data" / "h200_x4"
REAL = json.loads(
    (H200_X4 / "scaling/resnet50-nccl_allreduce-gpus0-1-2-3-9176bc4a60/record.json").read_text()
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


HOSTS = {"a": "eth0", "b": "eth1", "c": "eth0"}  # and their interfaces


def facts_of(host, gpus=4, mbit=1000):
    """What a record says of a host: GPUs of its own, and the interface that leads to the others."""
    real = REAL["environment"]
    listed = [one | {"uuid": f"GPU-{host}{one['id']}"} for one in real["gpu"]["gpus"][:gpus]]
    return {
        "name": host,
        "host": f"node-{host}",
        "cpu": real["cpu"],
        "gpu": real["gpu"] | {"gpus": listed},
        "interface": HOSTS[host],
        "interfaces": [{"name": HOSTS[host], "mbit_per_s": mbit}],
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
