"""Plan a rehearsal (rehearse=): each cell of a study briefly, its ranks sharing what is here."""

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.agent.processes import with_absolute_path
from benchmarks.record import REHEARSAL, read_study
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Config
from launch.machine.devices import Machine
from launch.plan.estimate import worded
from launch.plan.order import PlannedCell
from launch.study.study_folder import study_folder

# Tells which NCCL a rank loads, whatever torch was built with; fails before 2.30.
NCCL_VERSION = """import ctypes, torch
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
print(f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}")
exit(version.value < 23000)"""
LEAST_BATCH = 2  # batch norm refuses one image


def machine_of(config: Config, here: Machine, planned: tuple[int, ...]) -> Machine:
    """Return the machine planned for, of devices that are here; `planned` is what true means."""
    gpus = planned if str(config.rehearse) == "True" else tuple(range(int(config.rehearse)))
    present = len(here.all_gpus)
    devices = tuple(replace(here.devices[gpu % present], id=gpu) for gpu in gpus)
    return replace(here, devices=devices, all_gpus=gpus, present=present)


def refuse_old_nccl(machine: Machine, surroundings: Mapping[str, str]) -> None:
    """Refuse ranks that would share a GPU with an NCCL that cannot. Raises Refused."""
    if not machine.shares_gpus:
        return
    command, around = [sys.executable, "-c", NCCL_VERSION], with_absolute_path(surroundings)
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(
            f"rehearse={len(machine.all_gpus)}: NCCL {done.stdout.strip() or 'is missing'} here, "
            "whose ranks cannot share a GPU; expected 2.30 or newer, as torch 2.14 has it; or pip "
            "install --no-deps --target DIR nvidia-nccl-cu13, and "
            "LD_PRELOAD=DIR/nvidia/nccl/lib/libnccl.so.2"
        )


def rehearsed(
    config: Config, machine: Machine, order: Sequence[PlannedCell]
) -> tuple[Config, list[PlannedCell]]:
    """Return how a sweep is rehearsed, in a study of its own, and its cells. Raises Refused."""
    records, _ = read_study(study_folder(config.output_dir, config.study))
    facts: dict[str, Any] = {"gpus": len(machine.all_gpus), "present": machine.present}
    facts |= {"memory_bytes": machine.memory_bytes, "sweep": worded(order, records)}
    unique: dict[str, PlannedCell] = {}
    for entry in order:
        if machine.shares_gpus and entry.cell.benchmark["name"] == "p2p":
            continue
        facts = facts | {"batch_size": entry.cell.batch_size}
        for cell in _tries(replace(entry.cell, repeat=0), machine.present):
            unique.setdefault(cell.key, PlannedCell(cell, environment={REHEARSAL: facts}))
    if not unique:
        raise Refused(f"rehearse={config.rehearse}: benchmark=p2p needs all GPUs; expected others")
    name = f"{config.study}-rehearsal"
    config = replace(config, study=name, ask=None, predict=False, health=False)
    config = replace(config, sample_gpus=False, tuning_pass="False")
    return config, sorted(unique.values(), key=lambda entry: entry.cell.world_size)


def _tries(cell: Cell, present: int) -> Iterator[Cell]:
    """Yield a cell as it is rehearsed: one rank with the whole batch, then all with less each."""
    options = dict(cell.benchmark)
    rules = groups.choice("benchmark", options["name"]).rules
    for name, most in rules.get("rehearse", {}).items():
        options[name] = most if isinstance(most, str) else min(options.get(name, most), most)
    cell = replace(cell, benchmark=options)
    sharing = math.ceil(cell.world_size / present)  # ranks on one device
    if not cell.trains or sharing == 1:
        yield cell
        return
    try:
        strategy = groups.resolved("strategy", cell.strategy, cell.device, 1)
        alone = replace(cell, gpus=cell.gpus[:1], strategy=strategy, global_batch_size=None)
        yield replace(alone, nccl={}, profiler="none", profiler_options={})
    except Refused:  # such as shards of two ranks
        pass
    images = cell.batch_size // cell.accumulate
    batch_size = max(min(images, LEAST_BATCH), images // sharing) * cell.accumulate
    whole = cell.global_batch_size and batch_size * cell.world_size
    yield replace(cell, batch_size=batch_size, global_batch_size=whole)
