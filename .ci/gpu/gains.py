"""What each rewrite of optimize=max gains alone, on one GPU: `.ci/gpu/gains.py FOLDER OPTION...`.

One model for each variant, all in this process; their steps are timed in turns, so that clocks
drift over all alike. `device=cpu` tries it on a CPU, where nothing is compiled.
"""

import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from scipy.special import stdtrit

from conf import schema
from conf.cell import Cell
from conf.command_line import normalise
from conf.resolve import checked, resolve
from trainers import compile_passes
from trainers.compile_passes import (
    Rewrites,
    masks_for_each_reader,
    masks_from_inputs,
    sums_written_once,
    variances_from_sums,
    widened_by_each_reader,
)
from trainers.step import Training

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, STEPS, WARM_UP_STEPS = 8, 15, 3
CPU_ROUNDS, CPU_STEPS, CPU_WARM_UP_STEPS = 2, 2, 1


@dataclass(frozen=True)
class Variant:
    """What is changed of a compiled step."""

    has_faster_forms: bool = False  # of layers
    joint: tuple[Callable[[Any], int], ...] = ()  # to forward and backward in one graph
    split: tuple[Callable[[Any], int], ...] = ()  # and after it is split
    optimize: str = "max"


ALL_JOINT = compile_passes.JOINT.changes
ALL_SPLIT = compile_passes.SPLIT.changes
BASE = "compile"  # that the others are compared with
VARIANTS = {
    BASE: Variant(),
    "first convolution": Variant(has_faster_forms=True),
    "sums in batch norm": Variant(joint=(variances_from_sums,)),
    "widened by readers": Variant(split=(widened_by_each_reader,)),
    "sums written once": Variant(split=(widened_by_each_reader, sums_written_once)),
    "masks from inputs": Variant(
        joint=(masks_from_inputs,), split=(widened_by_each_reader, masks_for_each_reader)
    ),
    "max": Variant(True, ALL_JOINT, ALL_SPLIT),
    "max_graph": Variant(True, ALL_JOINT, ALL_SPLIT, "max_graph"),
}


def compose_cell(overrides: list[str], device: str) -> Cell:
    """Return the cell that these options mean on one device, composed as launch.py does."""
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("config", normalise(overrides)))
    return resolve(checked(config)[0], (0,), device)


def build_training(variant: Variant, overrides: list[str], device: torch.device) -> Training:
    """Return the training of a variant after its first step, which compiles it."""
    is_on_gpu = device.type == "cuda"
    optimize = "max"
    if is_on_gpu:
        optimize = variant.optimize
    cell = compose_cell([*overrides, "strategy=none", f"optimize={optimize}"], device.type)
    changed: dict[str, Any] = {"JOINT": Rewrites(*variant.joint), "SPLIT": Rewrites(*variant.split)}
    if not variant.has_faster_forms:
        changed["in_faster_forms"] = lambda model: model
    if not is_on_gpu:
        changed["compiled"] = lambda model: model
    elif not (variant.joint or variant.split):
        changed["compiled"] = torch.compile  # as optimize=compile, without a pass of ours
    with mock.patch.multiple(compile_passes, **changed):
        training = Training(cell, device, 0)
    training.step()
    wait(device)
    if is_on_gpu:
        # A training with a graph leaves the default stream.
        torch.cuda.set_stream(torch.cuda.default_stream(device))
    return training


def wait(device: torch.device) -> None:
    """Wait for the work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(training: Training, steps: int, warm_up_steps: int) -> float:
    """Return the mean ms of a step, by the host's clock around a window of steps."""
    stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if training.graphs is not None:
        # A graph is replayed where it was captured.
        stream = torch.cuda.stream(training.graphs._capture._stream)
    with stream:
        for _ in range(warm_up_steps):
            training.step()
        wait(training.device)
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        wait(training.device)
        return (time.perf_counter() - began) / steps * 1e3


def main(folder: Path, overrides: list[str]) -> None:
    """Measure every variant, write ms of all steps to FOLDER/gains.json, print the gains."""
    device = torch.device("cuda", 0)
    rounds, steps, warm_up_steps = ROUNDS, STEPS, WARM_UP_STEPS
    if "device=cpu" in overrides:
        device = torch.device("cpu")
        rounds, steps, warm_up_steps = CPU_ROUNDS, CPU_STEPS, CPU_WARM_UP_STEPS
    torch._dynamo.config.recompile_limit = 8 * len(VARIANTS)  # one model is compiled by each
    trainings: dict[str, Training] = {}
    step_ms: dict[str, list[float]] = {}
    for name, variant in VARIANTS.items():
        trainings[name] = build_training(variant, overrides, device)
        step_ms[name] = []
    for round_number in range(rounds):
        names = list(VARIANTS)
        if round_number % 2:
            names.reverse()
        for name in names:
            step_ms[name].append(time_step(trainings[name], steps, warm_up_steps))
    content = {"options": overrides, "step_ms": step_ms, "torch": torch.__version__}
    if device.type == "cuda":
        content["gpu"] = torch.cuda.get_device_name(device)
    (folder / "gains.json").write_text(json.dumps(content, indent=1) + "\n")
    images = trainings[BASE].cell.batch_size * 1e3
    for name, variant_ms in step_ms.items():
        gains = []
        for base_ms, ms in zip(step_ms[BASE], variant_ms, strict=True):
            gains.append((base_ms / ms - 1) * 100)
        half = float(stdtrit(rounds - 1, 0.975)) * statistics.stdev(gains) / math.sqrt(rounds)
        print(
            f"{name}: {images / statistics.median(variant_ms):,.0f} images/s, "
            f"{statistics.mean(gains):+.2f} % ± {half:.2f} (95 %, {rounds} rounds)"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
