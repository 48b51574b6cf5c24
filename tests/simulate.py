"""Machines whose truth is known: their records, wires and forecasts."""

import dataclasses
import functools
import hashlib
import math
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from build import changed_cell

from analysis.findings.examine import findings_of
from analysis.prediction.distributions import constant, mean
from analysis.prediction.recorded_forecast import with_forecast
from analysis.prediction.step_model import replay
from analysis.study.study import Study
from analysis.topology.placement import set_bandwidth
from analysis.topology.readers import parse_topology_text
from analysis.topology.subset_classes import subset_classes
from analysis.validity.checks import judge
from benchmarks import record as records
from benchmarks.record import Record, Validity
from conf.cell import Cell
from conf.schema import ValidityLimits
from launch.study.background import Forecasts

STRATEGIES_STUDY = Path(__file__).parent / "data" / "h200_x4" / "strategies"
STRATEGY = "nccl_allreduce"
GRADIENT_BYTES = 102_228_128
CLOCK_MHZ = 1980.0
NV18 = {"link_class": "NV18", "transport": "P2P/CUMEM over NV18"}


@functools.cache
def template(strategy):
    """A real record of four H200s, of which cell and environment are taken."""
    return next(
        record
        for record in records.read_study(STRATEGIES_STUDY)[0]
        if record.cell.strategy["name"] == strategy
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
        computing, exchange = max(self.alone_ms[gpu] for gpu in gpus), 0.0
        if strategy != "none":
            computing += self.overhead_ms
            exchange = self.exposed_ms + self.unexplained_ms
        if len(gpus) == 1:
            return computing
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
        ends = {"low": rate * (1 - 2e-4), "high": rate * (1 + 2e-4)}
        within_run = {"throughput/images_per_second": ends}
        if len(gpus) > 1:
            metrics["gpu/sm_mhz"] *= truth.clock_share
        if len(gpus) > 1 and strategy != "none":
            cost = truth.overhead_ms / truth.clock_share + truth.exposed_ms
            if truth.noise:
                cost += self.generator.normal(0, truth.noise * truth.step_ms(strategy, gpus))
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
            effective=NV18 if len(gpus) > 1 else {},
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
    return dataclasses.replace(record, **fields)


DGX1 = parse_topology_text((Path(__file__).parent / "data" / "topo_dgx1_v100.txt").read_text())
LINKS = DGX1.to_json()["links"]
SUBSETS = tuple(one.representative for size in (2, 3, 4, 8) for one in subset_classes(DGX1, size))


@dataclass(frozen=True)
class WiredTruth:
    """What is planted: ms per step, a share, and shares of noise."""

    fixed_ms: float = 0.5
    share: float = 0.4  # of the exchange that compute does not hide
    noise: float = 0.002  # of a step between runs, and of the strategy's cost in ms of a step
    efficiency_of_nccl: float = 0.85  # of what the wires carry
    alone_ms: float | None = None  # what the strategy costs a step of one GPU; None: not measured


def wire_ms(gpus, gb_per_s=None):
    """The time that an exchange needs on its wires, by their nominal speed where no other is given."""
    megabytes = 2 * (len(gpus) - 1) / len(gpus) * GRADIENT_BYTES / 1e6
    return megabytes / (gb_per_s or set_bandwidth(DGX1, gpus).gb_per_s)


def wired_study(seed=0, truth=None, subsets=SUBSETS):
    """A study of these subsets."""
    truth, chance = truth or WiredTruth(), np.random.default_rng(seed)
    simulator = Simulator(
        Truth(alone_ms=(54.0,) * 8, overhead_ms=0.0, contention_ms=0.0, noise=truth.noise), seed
    )
    around = {"environment": {"links": LINKS}}
    cost = {} if truth.alone_ms is None else {"strategy/cost_ms": truth.alone_ms}
    made = []
    for gpu in range(8):
        record = simulator.record((gpu,), **around)
        made.append(changed(record, metrics=record.metrics | cost))
    for gpus in subsets:
        speed = truth.efficiency_of_nccl * set_bandwidth(DGX1, gpus).gb_per_s
        busbw = speed * (1 + 0.01 * chance.standard_normal())
        exchange_ms = wire_ms(gpus, busbw)
        cost_ms = truth.fixed_ms + truth.share * exchange_ms
        record = simulator.record(gpus, **around)
        rate = record.metrics["throughput/images_per_second"]
        rate *= simulator.truth.step_ms(STRATEGY, gpus) / (54.0 + cost_ms)
        metrics = {
            "throughput/images_per_second": rate,
            "comm/busbw_gb_per_s": busbw,
            "comm/exchange_ms": exchange_ms,
            "strategy/cost_ms": cost_ms + 54.0 * truth.noise * chance.standard_normal(),
        }
        made.append(changed(record, metrics=metrics))
    return Study.of(made)


def lines_by_quantity(study):
    """The lines of a study, by what they are about, and why it has none."""
    findings = findings_of(study)
    missing = [pair for pair in findings.unsaid.items() if pair[0].startswith("Does link speed")]
    return {line.quantity: line for line in findings.wire_lines}, missing


MIB = 2**20
FORECAST_OPTIONS = {"name": "nccl_allreduce", "bucket_cap_mb": 25.0, "comm_hook": "none"}
FORECAST_GRADIENT_BYTES = 100 * MIB


@dataclass(frozen=True)
class ForecastTruth:
    """What a measured cell has."""

    gb_per_s: float = 20.0
    slow_rank: float = 1.0  # its compute, of that of the others
    bucket_mib: float = 25.0
    noise: float = 0.001  # between runs, as a share


SOUND_MACHINE = ForecastTruth()


class ForecastMachine:
    """Four GPUs; measures one cell after the other, each with its forecast."""

    def __init__(self, seed=0):
        self.known, self.scatter = [], random.Random(seed)
        self.simulator = Simulator(Truth(noise=0.0))
        self.forecasts = Forecasts("auto", lambda job: job())

    def measure(self, gpus, batch_size, strategy="nccl_allreduce", truths=SOUND_MACHINE):
        """Return the record of a cell with its forecast, judged by the check of that alone."""
        record = self._measured(gpus, batch_size, strategy, truths)
        predicted = self.forecasts.before(record.cell, record.environment, self.known)
        record = changed(record, predicted=predicted, started_at=predicted["made_at"])
        record = with_forecast(record)
        codes = judge(record, ValidityLimits()).codes
        if "unexplained" not in codes:
            return record
        return changed(record, validity=Validity("suspect", {"unexplained": codes["unexplained"]}))

    def calibrate(self, batches=(64, 128, 192, 256)):
        """Measure every GPU alone, two pairs and all: later forecasts rest on them. Return this machine."""
        alone = [((gpu,), "none") for gpu in range(4)] + [((0,), "nccl_allreduce")]
        together = [(gpus, "nccl_allreduce") for gpus in ((0, 1), (2, 3), (0, 1, 2, 3))]
        for gpus, strategy in (*alone, *together):
            for batch in batches:
                self.known.append(self._measured(gpus, batch, strategy, SOUND_MACHINE))
        self.forecasts.learn(self.known)
        return self

    def _measured(self, gpus, batch_size, strategy, truths):
        made = self.simulator.record(gpus, "nccl_allreduce", batch_size=batch_size)
        chosen = FORECAST_OPTIONS if strategy != "none" else {"name": "none"}
        cell = Cell.from_dict(made.cell.to_dict() | {"strategy": chosen})
        compute = (10 + 0.2 * batch_size) * (truths.slow_rank if len(gpus) > 1 else 1.0)
        sizes = _bucket_bytes(truths.bucket_mib)
        ready = [compute * (1 + 2 * done / sum(sizes)) / 3 for done in accumulate(sizes)]
        times = [_exchange_ms(size, len(gpus), truths.gb_per_s) for size in sizes]
        own = 0.0 if strategy == "none" else 0.5
        played = replay(
            [constant(one) for one in ready], [constant(one if own else 0.0) for one in times], constant(compute), constant(0.0),
            constant(0.1 if len(gpus) > 1 else 0.0),
        )  # fmt: skip
        step = mean(played.step_ms) + own
        noisy = step * (1 + truths.noise * self.scatter.gauss(0, 1))
        metrics = {
            "step/ms_median": noisy,
            "step/ms_p95": noisy,
            "throughput/images_per_second": len(gpus) * batch_size * 1e3 / noisy,
        }
        if own:
            metrics["strategy/cost_ms"] = step - compute + 0.02 * self.scatter.gauss(0, 1)
            metrics["comm/exchange_ms"] = sum(times)
        rows = [{"bytes": size} for size in sizes]
        quiet = {
            "rank": 0, "exchange": False, "ready_ms": ready, "backward_ms": compute,
            "update_ms": compute,
        }  # fmt: skip
        tables = {"buckets": {"rows": rows}, "timeline": {"rows": [quiet]}} if own else {}
        if own and len(gpus) > 1:
            measured = []
            for size in (64 << 10, MIB, *sizes):
                ms = _exchange_ms(size, len(gpus), truths.gb_per_s)
                measured.append({"bytes": size, "ms": ms})
            tables["bucket_exchange"] = {"operation": "all_reduce", "rows": measured}
        return dataclasses.replace(
            made, cell=cell, cell_key=cell.key, metrics=metrics, tables=tables, within_run={}, series={},
            model={"gradient_bytes": FORECAST_GRADIENT_BYTES, "arrays": 161},
        )  # fmt: skip


def _bucket_bytes(cap_mib):
    """The bytes of each bucket, the last one first."""
    full = int(cap_mib * MIB)
    count, rest = divmod(FORECAST_GRADIENT_BYTES, full)
    return [full] * count + [rest] * (rest > 0)


def _exchange_ms(size, ranks, gb_per_s):
    return 0.02 + size * 2 * (ranks - 1) / ranks / gb_per_s / 1e6
