"""Records of a machine whose truth is known: what every step costs, how GPUs differ, how runs scatter."""

import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cells import changed_cell

from benchmarks import record as records
from benchmarks.record import Record, Validity

REAL = Path(__file__).parent / "data" / "h200_x4" / "strategies"
STRATEGY = "nccl_allreduce"
GRADIENT_BYTES = 102_228_128
CLOCK_MHZ = 1980.0


@functools.cache
def template(strategy):
    """A real record of four H200s, of which cell and environment are taken."""
    return next(
        record for record in records.read_study(REAL)[0] if record.cell.strategy["name"] == strategy
    )


@dataclass(frozen=True)
class Truth:
    """Step times in ms: `alone_ms` of each GPU without a strategy, the others are added to the slowest's."""

    alone_ms: tuple = (54.0, 54.3, 53.8, 54.1)
    overhead_ms: float = 0.5  # the strategy with one rank
    contention_ms: float = 0.3  # ranks side by side
    exposed_ms: float = 0.8  # communication that compute does not hide
    unexplained_ms: float = 0.0  # what no control sees
    noise: float = 0.002  # standard deviation between runs, as a share
    batch_size: int = 256
    clock_share: float = 1.0  # SM clock of ranks side by side, of that of a GPU alone

    def step_ms(self, strategy, gpus):
        """Without any noise."""
        computing = max(self.alone_ms[gpu] for gpu in gpus) + (
            self.overhead_ms if strategy != "none" else 0.0
        )
        if len(gpus) == 1:
            return computing
        exchange = self.exposed_ms + self.unexplained_ms if strategy != "none" else 0.0
        return computing / self.clock_share + self.contention_ms + exchange

    def rate(self, strategy, gpus):
        """Images per second of all GPUs."""
        return len(gpus) * self.batch_size * 1e3 / self.step_ms(strategy, gpus)


class Simulator:
    """Makes records; equal seeds make equal records."""

    def __init__(self, truth=None, seed=0):
        self.truth = truth or Truth()
        self.generator = np.random.default_rng(seed)
        self.made = 0

    def record(
        self, gpus, strategy=STRATEGY, repeat=0, *, factor=1.0, drift=False, verdict="valid", state="finished",
        environment=None, **cell
    ):  # fmt: skip
        """One run; `factor` is planted into its rate, `cell` replaces what was asked."""
        self.made += 1
        of, truth = template(strategy), self.truth
        asked = {"batch_size": truth.batch_size} | cell
        asked = {"gpus": list(gpus), "labels": [], "repeat": repeat, "server_gpus": [], **asked}
        cell = changed_cell(of.cell, **asked)
        rate = truth.rate(strategy, gpus) * factor * cell.batch_size / truth.batch_size
        rate *= math.exp(self.generator.normal(0, truth.noise)) if truth.noise else 1.0
        metrics = {"throughput/images_per_second": rate, "gpu/sm_mhz": CLOCK_MHZ}
        within_run = {
            "throughput/images_per_second": {"low": rate * (1 - 2e-4), "high": rate * (1 + 2e-4)}
        }
        if len(gpus) > 1:
            metrics["gpu/sm_mhz"] *= truth.clock_share
        if len(gpus) > 1 and strategy != "none":
            cost = truth.overhead_ms / truth.clock_share + truth.exposed_ms
            cost += (
                self.generator.normal(0, truth.noise * truth.step_ms(strategy, gpus))
                if truth.noise
                else 0.0
            )
            metrics |= {
                "strategy/cost_ms": cost,
                "comm/busbw_gb_per_s": 270.0 * math.exp(self.generator.normal(0, truth.noise)),
            }
            within_run["strategy/cost_ms"] = {"low": cost - 0.02, "high": cost + 0.02}
        return Record(
            record_id=f"{self.made:032x}",
            cell_key=hashlib.sha256(repr(sorted(cell.to_dict().items())).encode()).hexdigest()[:16],
            name=f"{strategy} {gpus} {repeat}",
            cell=cell,
            study="simulated",
            sweep_id="",
            overrides=[],
            state=state,
            started_at=1e9 + self.made,
            ended_at=1e9 + self.made + 1,
            validity=Validity(verdict),
            environment={
                **template(STRATEGY).environment,
                "planned_uuids": [f"GPU-{gpu}" for gpu in gpus],
                "gpu": {"driver": "580"},
                **(environment or {}),
            },
            model={"gradient_bytes": GRADIENT_BYTES},
            metrics=metrics if state == "finished" else {},
            within_run=within_run if state == "finished" else {},
            effective={"link_class": "NV18", "transport": "P2P/CUMEM over NV18"}
            if len(gpus) > 1
            else {},
            drift=drift,
        )

    def explained(self, gpus, repeats=3, **cell):
        """A subset with every control cell, repeats interleaved."""
        made = []
        for repeat in range(repeats):
            for strategy in ("none", STRATEGY):
                made += [self.record((gpu,), strategy, repeat, **cell) for gpu in gpus]
                made.append(self.record(gpus, strategy, repeat, **cell))
        return made


def changed(record, **fields):
    """A record with other fields."""
    return dataclasses.replace(record, **fields)
