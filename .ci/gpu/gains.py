"""What each rewrite of optimize=max gains alone, on one GPU: `.ci/gpu/gains.py FOLDER OPTION...`.

One model for each variant, all in this process; their steps are timed in turns, so that clocks
drift over all alike. Then the kernels of the first and of the last variant that take most time.
VARIANTS names them, separated by "; ", first the one that the others are compared with.
`device=cpu` tries it on a CPU, where nothing is compiled.
"""

import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composed import cell_of
from scipy.special import stdtrit
from torch import nn

from trainers import compile_passes, models
from trainers.step import Training

ROUNDS, STEPS, WARM_UP, PROFILED = 8, 15, 3, 3
KERNELS = 25  # that are shown
ON_CPU = (2, 2, 1)  # rounds, steps, warm-up


@dataclass(frozen=True)
class Variant:
    """What is changed of a compiled step."""

    prepare: Callable[[nn.Module], nn.Module] = lambda model: model  # the layers
    joint: tuple[Any, ...] = ()  # changes to the traced graph, forward and backward in one
    split: tuple[Any, ...] = ()  # and after it is split
    options: dict[str, Any] = field(default_factory=dict)  # inductor's
    optimize: str = "max"

    def compiled(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model as inductor compiles it with the changes."""
        passes = {"joint_custom_post_pass": self.joint, "post_grad_custom_post_pass": self.split}
        options = {
            name: compile_passes.Rewrites(*changes) for name, changes in passes.items() if changes
        } | self.options
        return COMPILE(model, options=options or None)


COMPILE = torch.compile
SUMS, MASKS = compile_passes.variances_from_sums, (compile_passes.masks_from_inputs,)
READERS = (compile_passes.widened_by_each_reader, compile_passes.masks_for_each_reader)
MAX = Variant(compile_passes.in_faster_forms, (SUMS, *MASKS), compile_passes.SPLIT.changes)
VARIANTS = {
    "compile": Variant(),
    "first convolution": Variant(compile_passes.in_faster_forms),
    "sums in batch norm": Variant(joint=(SUMS,)),
    "widened by readers": Variant(split=(compile_passes.widened_by_each_reader,)),
    "sums written once": Variant(
        split=(compile_passes.widened_by_each_reader, compile_passes.sums_written_once)
    ),
    "masks from inputs": Variant(joint=MASKS, split=READERS),
    "max": MAX,
    "max_graph": replace(MAX, optimize="max_graph"),
    "max, tuned": replace(MAX, options={"coordinate_descent_tuning": True}),
    "max, 1x1 as products": replace(MAX, options={"conv_1x1_as_mm": True}),
}


USUAL = "; ".join(one for one, variant in VARIANTS.items() if not variant.options)


def built(name: str, overrides: list[str], device: torch.device) -> tuple[Training, float]:
    """Return the training of a variant after its first steps, and the seconds of the first."""
    began = time.perf_counter()
    variant = VARIANTS[name]
    on_gpu = device.type == "cuda"
    cell = cell_of(
        [*overrides, "strategy=none", f"optimize={variant.optimize if on_gpu else 'max'}"],
        (0,),
        device.type,
    )
    compiled = variant.compiled if on_gpu else lambda model: model
    build = models.build
    with (
        mock.patch.object(compile_passes, "in_faster_forms", lambda model: model),
        mock.patch.object(models, "build", lambda *args: variant.prepare(build(*args))),
        mock.patch.object(compile_passes, "compiled", compiled),
        mock.patch.object(torch, "compile", compiled),
    ):
        training = Training(cell, device, 0)
    training.step()
    wait(device)
    if on_gpu:
        torch.cuda.set_stream(
            torch.cuda.default_stream(device)
        )  # which a training with a graph leaves
    return training, time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_ms(training: Training, steps: int, warm_up: int) -> float:
    """Return the mean ms of a step, by the host's clock around a window."""
    with in_its_stream(training):
        for _ in range(warm_up):
            training.step()
        wait(training.device)
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        wait(training.device)
        return (time.perf_counter() - began) / steps * 1e3


def in_its_stream(training: Training) -> AbstractContextManager[Any]:
    """Let a step with a graph run where it was captured; the others run on the default stream."""
    return (
        nullcontext()
        if training.graphs is None
        else torch.cuda.stream(training.graphs._capture._stream)
    )


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
    torch._dynamo.config.recompile_limit = 8 * len(VARIANTS)  # one model is compiled by each
    names = os.environ.get("VARIANTS", USUAL).split("; ")
    trainings = {}
    for name in names:
        trainings[name], seconds = built(name, overrides, device)
        print(f"{name}: first step after {seconds:.1f} s, loss {trainings[name].loss}")
    images = trainings[names[0]].cell.batch_size * 1e3
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(step_ms(trainings[name], steps, warm_up))
    content: dict[str, Any] = {"options": overrides, "step_ms": found, "torch": torch.__version__}
    for name, ms in found.items():
        gains = [(base / one - 1) * 100 for base, one in zip(found[names[0]], ms, strict=True)]
        half = float(stdtrit(rounds - 1, 0.975)) * statistics.stdev(gains) / math.sqrt(rounds)
        rate = images / statistics.median(ms)
        print(
            f"{name}: {rate:,.0f} images/s, {statistics.mean(gains):+.2f} % ± {half:.2f} "
            f"(95 %, {rounds} rounds)"
        )
    if device.type == "cuda":
        content["gpu"] = torch.cuda.get_device_name(device)
        content["kernels_ms"] = {name: kernels(trainings[name]) for name in (names[0], names[-1])}
    (folder / "gains.json").write_text(
        json.dumps(content, indent=1) + "\n"
    )  # before what is only shown
    for name, of_step in content.get("kernels_ms", {}).items():
        print(f"{name}: {sum(of_step.values()):.2f} ms of kernels in a step")
        for kernel, ms in list(of_step.items())[:KERNELS]:
            print(f"  {ms:7.3f}  {kernel[:110]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
