"""Cells of GPUs with a fault planted in their raw files: lines that real H200s wrote, and a record made of them as in a sweep.

`gpu_cell` copies a cell of tests/data/raw_lines, with the samples of GPUs and the NCCL logs that its record tells of; a test
changes a file; `made` makes the record as the launching process does.
"""

import itertools
import json
import shutil
from pathlib import Path

from analysis.findings.communication import with_values
from analysis.validity.checks import judged
from benchmarks import record as records
from benchmarks.record import CellFolder, Lines, read, read_lines
from conf.cell import Cell
from conf.schema import ValidityLimits
from launch.study.study_folder import assemble

RAW = Path(__file__).parent / "data" / "raw_lines"
PAIR = "h200_x2/resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
LOC = "h200_x2/resnet50-nccl_allreduce-gpus0-1-ecee563219"
ALONE = "h200_x4/resnet50-nccl_allreduce-gpus0-a84209de41"
PAIR_OF_FOUR = "h200_x4/resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
WARM_UP_BLOCKS = 12  # of 0.3 s: longer than the cells of then had it
# What ranks of then did not look at, as a rank of now finds it in a cell without a fault.
FACTS = {
    "batches_differ": True, "batches_in_turn": 2, "weights_still": 0, "weights_still_share": 0.0,
    "arithmetic": {"autocast": "bfloat16", "layers": {"bfloat16": 54}, "tf32": False},
    "trained_bytes": 102228128, "gradient_tolerance": 4e-8, "gradient_repeat": 2e-9,
    "gradient_worst": {"array": "fc.bias", "error": 1e-8, "tolerance": 1e-7},
    "exchanged_bytes": 102228128.0, "exchange_error": 0.0, "exchange_tolerance": 2e-7,
}  # fmt: skip
OF_SEVERAL_RANKS = ("gradient_", "exchange")
BEGUN = ("record_id", "started_at", "study", "sweep_id", "overrides", "drift")


def gpu_cell(study, source=PAIR, cell=None, name=None):
    """Copy a cell into a study, changed as given. Return its folder."""
    before = read(RAW / source / "record.json")
    asked = Cell.from_dict(before.cell.to_dict() | (cell or {}))
    folder = CellFolder(study / (name or asked.folder))
    shutil.copytree(RAW / source / "ranks", folder.path / "ranks")
    for part in ("logs", "nccl"):
        (folder.path / part).mkdir()
    folder.cell.write_text(json.dumps(asked.to_dict()))
    begun = {name: getattr(before, name) for name in BEGUN}
    begun["environment"] = dict(before.environment)
    begun["environment"].pop("versions", None)
    folder.attempt.write_text(json.dumps(begun))
    facts = {}
    for fact, value in FACTS.items():
        if len(asked.gpus) > 1 or not fact.startswith(OF_SEVERAL_RANKS):
            facts[fact] = value
    facts["counted"] = {"timed": {"steps": 1, "images": asked.batch_size, "updates": 1}}
    facts["after"] = {**facts, "updates": 2, "steps": 2}
    edit_lines(folder, 0, lambda line: line["checks"].update(facts), kind="result")
    for rank in range(len(asked.gpus)):  # cells of then warmed up for 0.7 s
        lines = read_lines(folder.rank_lines(rank))
        last = [line["time"] for line in lines if line.get("purpose") == "warm-up"][-1]
        repeat_windows(folder, rank, WARM_UP_BLOCKS, time=last, purpose="warm-up")
    sample_gpus(folder, len(asked.gpus))
    sample_cpu(folder)
    if len(asked.gpus) > 1:
        nccl = before.effective["nccl"]
        log_nccl(folder, asked.gpus, nccl["settings"], nccl["transports"]["0->1"][0])
    return folder


def repeat_windows(folder, rank, times, **wanted):
    """Write each of these windows so often; later heartbeats count its iterations so often too."""
    more = [0]

    def change(line):
        if line["kind"] == "beat":
            line["iterations"] += more[0]
        elif all(line.get(name) == value for name, value in wanted.items()):
            more[0] += (times - 1) * (len(line["ms"]) + 1)
            return [line] * times
        return None

    edit_lines(folder, rank, change)


def sample_gpus(folder, gpus, change=lambda phase, gpu: {}):
    """Write samples of the GPUs, half a second apart; `change(phase, gpu)` returns what is otherwise in a sample."""
    folder.gpu_samples.unlink(missing_ok=True)
    lines = Lines(folder.gpu_samples)
    idle = {
        "sm_mhz": 345, "power_w": 77.0, "temperature_c": 30, "reasons": 1, "memory_bytes": 0,
        "own_bytes": 0, "processes": 0, "busy_percent": 0,
    }  # fmt: skip
    busy = {
        "sm_mhz": 1980, "power_w": 600.0, "temperature_c": 50, "reasons": 0, "memory_bytes": 40 << 30,
        "own_bytes": 40 << 30, "processes": 1, "busy_percent": 99,
    }  # fmt: skip
    phases = phases_of(folder)
    before = phases[0][1] - 1
    for phase, begun, end in [(None, before, before), *phases]:
        at, sample = begun + 0.01, busy if phase else idle
        while at <= max(end, begun + 0.01):
            rows = [{**sample, "foreign_pids": [], **change(phase, gpu)} for gpu in range(gpus)]
            lines.write("sample" if phase else "before", at, gpus=rows)
            at += 0.5


def sample_cpu(folder, others=lambda phase: 0.0):
    """Write samples of the CPU, twice a second; `others(phase)` is the share of its cores that strangers use."""
    folder.cpu_samples.unlink(missing_ok=True)
    lines, busy_s, own_s = Lines(folder.cpu_samples), 0.0, 0.0
    for phase, begun, end in phases_of(folder):
        for number in range(int((end - begun) * 2) + 1):
            lines.write("sample", begun + number / 2, cores=32, busy_s=busy_s, own_s=own_s)
            own_s += 1.0
            busy_s += 1.0 + others(phase) * 32 / 2


def phases_of(folder):
    """(Name, begin, end) of each phase of rank 0, which ends with its result."""
    lines = read_lines(folder.rank_lines(0))
    begun = [line for line in lines if line["kind"] in ("phase", "result")]
    pairs = itertools.pairwise(begun)
    return [(line["phase"], line["time"], end["time"]) for line, end in pairs if "phase" in line]


def log_nccl(folder, gpus, announced, transport, channels=24, ranks=None):
    """Write NCCL's logs, one for each rank; `announced` are variables and values, of the ranks of `ranks` alone if given."""
    count = len(gpus)
    shutil.rmtree(folder.path / "nccl")
    (folder.path / "nccl").mkdir()
    for rank, gpu in enumerate(gpus):
        peer = (rank + 1) % count
        slash = "/0" if transport.startswith("P2P") else ""
        member = f"ncclCommInitRankConfig comm 0x{rank}a rank {rank} nranks {count} cudaDev {rank} nvmlDev {gpu}"
        member += f" busId {gpu}0 commId 0x1 - Init"
        said = announced if ranks is None or rank in ranks else {}
        rows = [
            "Bootstrap: Using eth0",
            "NCCL version 2.28.9+cuda13.0",
            "Comm config Blocking set to 1",
            f"{member} START",
            *(f"{name} set by environment to {value}" for name, value in said.items()),
            f"{channels} coll channels, {channels} collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer",
            f"{member} COMPLETE",
            f"Channel 00{slash} : {rank}[{gpu}] -> {peer}[{gpus[peer]}] via {transport}",
        ]
        text = "".join(f"vm:{600 + rank}:1 [0] NCCL INFO {row}\n" for row in rows)
        (folder.path / "nccl" / f"vm.{600 + rank}.log").write_text(text)


def edit_lines(folder, rank, change, **wanted):
    """Change the lines of a rank that have these values: `change(line)` alters it, or returns the lines in its place."""
    path, out = folder.rank_lines(rank), []
    for line in map(json.loads, path.read_text().splitlines()):
        fits = all(line.get(name) == value for name, value in wanted.items())
        given = change(line) if fits else None
        out += [line] if given is None else given
    path.write_text("".join(json.dumps(line) + "\n" for line in out))


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def made(folder, known=()):
    """Make the record of a folder as the launching process does, write it, and return it."""

    def where(other):
        return CellFolder(folder.path.parent / other.cell.folder)

    known, attempt = list(known), json.loads(folder.attempt.read_text())
    last = max(line["time"] for line in read_lines(folder.rank_lines(0)))
    record = assemble(folder, "finished", None, max(last, attempt["started_at"]) + 1, known, where)
    record = judged(with_values(record, known), ValidityLimits())
    records.write(folder, record)
    return record
