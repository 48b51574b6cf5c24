"""How long the benchmarks that train will measure, by a rule of thumb. Without torch.

Seen on one core of a server CPU: 17 to 51 · 10⁹ operations a second, by the model. Seen on an H200: ResNet-50 in bf16 at
114 · 10¹². The rules take rounder ones.
"""

from collections.abc import Mapping
from typing import Any

from conf import groups
from conf.cell import Cell

FLOPS = {"cpu": 25e9, "cuda": 60e12}  # operations a second of one rank
PASSES = 3  # forward, and backward, which takes twice as long
USUAL_STEP_SECONDS = 0.1  # of a model of which nothing is known
FIRST_STEPS, WARM_UP_STEPS, CHECKED_STEPS, LEAD_IN = 2, 10, 6, 1
GRAPH_STEPS = 40  # before the captures of a cell with CUDA graphs, and to compare them
FEWEST_STEPS, ABBA_SECONDS = 3, 0.5  # of a window of A B B A
WITH_IT, WITHOUT_IT = 2, 2  # windows of a round, A B B A
CALIBRATION_SECONDS = 1.5  # of benchmark.calibrate=all, at most; else it takes little
EXCHANGE_SECONDS = {"cpu": 8.0, "cuda": 4.0}  # of benchmark=exchange with ResNet-50


def step_seconds(cell: Cell) -> float:
    """Return the seconds of a training step, from the operations that the model's YAML has."""
    gigaflop, pixels = (groups.of_model(cell.model.name, name) for name in ("gigaflop", "gpu.image_size"))
    if not gigaflop or not pixels:
        return USUAL_STEP_SECONDS
    share = (cell.model.image_size / pixels) ** 2
    return float(PASSES * gigaflop * 1e9 * share * cell.batch_size / FLOPS[cell.device])


def throughput(cell: Cell) -> float:
    """Return the seconds that benchmark=throughput measures."""
    options, step = cell.benchmark, step_seconds(cell)
    timed = max(float(options["max_seconds"]), step * int(options["min_iterations"]))
    window = max(FEWEST_STEPS * step, ABBA_SECONDS) + LEAD_IN * step
    rounds = int(options["exposed_rounds"]) if cell.world_size > 1 else 0
    # Without a loader the timed windows are the steps with exchange, mostly; a power cap or asynchronous ranks need their own.
    windows = WITHOUT_IT if rounds_between(options) and not cell.data else WITH_IT + WITHOUT_IT
    calibration = CALIBRATION_SECONDS if options.get("calibrate") == "all" else 0.0
    return _begun(cell, step) + timed + rounds * windows * window + calibration


def rounds_between(options: Mapping[str, Any]) -> int:
    """Return the rounds of A B B A of which the timed windows may be the A; 0 where too few iterations are allowed."""
    rounds = int(options["exposed_rounds"])
    return rounds if int(options["max_iterations"]) >= WITH_IT * rounds * FEWEST_STEPS else 0


def overhead(cell: Cell) -> float:
    """Return the seconds that benchmark=overhead measures."""
    step = step_seconds(cell)
    window = max(float(cell.benchmark["window_seconds"]), step) + LEAD_IN * step
    return _begun(cell, step) + 2 * int(cell.benchmark["rounds"]) * window


def exchange(cell: Cell) -> float:
    """Return the seconds that benchmark=exchange measures: the launching process does not know the model's bytes."""
    return EXCHANGE_SECONDS[cell.device]


def _begun(cell: Cell, step: float) -> float:
    """Return the seconds before the first timed step."""
    warm_up = max(float(cell.benchmark.get("warmup_min_seconds", 0.0)), WARM_UP_STEPS * step)
    return (FIRST_STEPS + CHECKED_STEPS + GRAPH_STEPS * cell.graphed) * step + warm_up
