"""What each rewrite of optimize=max gains alone: `python .ci/gpu/gains.py FOLDER OPTION...`, on one GPU.

One model for each variant, all in this process; their steps are timed in turns, so that clocks drift over all alike. Then the
kernels of the first and of the last variant that take most time. `device=cpu` tries it on a CPU, where nothing is compiled.
"""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composed import cell_of
from scipy.special import stdtrit
from torch import nn

from trainers.fastest import compiling
from trainers.step import Training

ROUNDS, STEPS, WARM_UP, PROFILED = 8, 20, 5, 3
KERNELS = 25  # that are shown
ON_CPU = (2, 2, 1)  # rounds, steps, warm-up


def as_it_is(model: nn.Module) -> nn.Module:
    """Return the model."""
    return model


def plainly(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch.compile alone makes."""
    return torch.compile(model)


# What stands for compiling.prepare (the first convolution) and compiling.compiled (the traced graph).
VARIANTS = {
    "compile": (as_it_is, plainly),
    "first convolution": (compiling.prepare, plainly),
    "sums in batch norm": (as_it_is, compiling.compiled),
    "max": (compiling.prepare, compiling.compiled),
}


def built(name: str, overrides: list[str], device: torch.device) -> tuple[Training, float]:
    """Return the training of a variant after its first step, and the seconds that this took."""
    began = time.perf_counter()
    prepare, compiled = VARIANTS[name]
    cell = cell_of([*overrides, "strategy=none", "optimize=max"], (0,), device.type)
    if device.type == "cpu":
        compiled = as_it_is
    with mock.patch.object(compiling, "prepare", prepare), mock.patch.object(compiling, "compiled", compiled):
        training = Training(cell, device, 0)
    training.step()
    wait(device)
    return training, time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_ms(training: Training, steps: int, warm_up: int) -> float:
    """Return the mean ms of a step, by the host's clock around a window."""
    for _ in range(warm_up):
        training.step()
    wait(training.device)
    began = time.perf_counter()
    for _ in range(steps):
        training.step()
    wait(training.device)
    return (time.perf_counter() - began) / steps * 1e3


def kernels(training: Training) -> dict[str, float]:
    """Return the ms of a step that each kernel takes, by its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            training.step()
        wait(training.device)
    found: Counter[str] = Counter()
    for one in profiler.key_averages():
        found[one.key] += one.self_device_time_total / 1e3 / PROFILED
    return dict(found.most_common())


def main(folder: Path, overrides: list[str]) -> None:
    """Measure every variant, print the gains, and write everything to FOLDER/gains.json."""
    device = torch.device("cpu") if "device=cpu" in overrides else torch.device("cuda", 0)
    rounds, steps, warm_up = (ROUNDS, STEPS, WARM_UP) if device.type == "cuda" else ON_CPU
    trainings = {}
    for name in VARIANTS:
        trainings[name], seconds = built(name, overrides, device)
        print(f"{name}: first step after {seconds:.1f} s, loss {trainings[name].loss}")
    images = trainings["compile"].cell.batch_size * 1e3
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
            found[name].append(step_ms(trainings[name], steps, warm_up))
    content: dict[str, Any] = {"options": overrides, "step_ms": found, "torch": torch.__version__}
    for name, ms in found.items():
        gains = [(base / one - 1) * 100 for base, one in zip(found["compile"], ms, strict=True)]
        half = float(stdtrit(rounds - 1, 0.975)) * statistics.stdev(gains) / math.sqrt(rounds)
        rate = images / statistics.median(ms)
        print(f"{name}: {rate:,.0f} images/s, {statistics.mean(gains):+.2f} % ± {half:.2f} (95 %, {rounds} rounds)")
    if device.type == "cuda":
        content["gpu"] = torch.cuda.get_device_name(device)
        content["kernels_ms"] = {name: kernels(trainings[name]) for name in ("compile", "max")}
    (folder / "gains.json").write_text(json.dumps(content, indent=1) + "\n")  # before what is only shown
    for name, of_step in content.get("kernels_ms", {}).items():
        print(f"{name}: {sum(of_step.values()):.2f} ms of kernels in a step")
        for kernel, ms in list(of_step.items())[:KERNELS]:
            print(f"  {ms:7.3f}  {kernel[:110]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
