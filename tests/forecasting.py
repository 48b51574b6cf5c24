"""Cells of a machine that a test invents, forecast and measured one after the other as the launching process does it.

A step is what the model's own replay gives; a fault changes what happens in the measured cell, and nothing before it.
"""

import dataclasses
import random
from dataclasses import dataclass

from simulated import Simulator, Truth

from analysis.prediction.draws import constant, mean
from analysis.prediction.recorded_forecast import with_forecast
from analysis.prediction.step import replay
from analysis.validity.checks import judge
from conf.cell import Cell
from conf.schema import ValidityLimits
from launch.study.forecasts import Forecasts

MIB = 2**20
OPTIONS = {"name": "nccl_allreduce", "bucket_cap_mb": 25.0, "comm_hook": "none"}
GRADIENT_BYTES = 100 * MIB


@dataclass(frozen=True)
class Truths:
    """What a measured cell has."""

    gb_per_s: float = 20.0
    slow_rank: float = 1.0  # its compute, of that of the others
    bucket_mib: float = 25.0
    noise: float = 0.001  # between runs, as a share


SOUND = Truths()


class Machine:
    """Four GPUs; measures one cell after the other, each with its forecast."""

    def __init__(self, seed=0):
        self.known, self.scatter, self.simulator = (
            [],
            random.Random(seed),
            Simulator(Truth(noise=0.0)),
        )
        self.forecasts = Forecasts("auto", lambda job: job())

    def measure(self, gpus, batch_size, strategy="nccl_allreduce", truths=SOUND):
        """Return the record of a cell with its forecast, judged by the check of that alone."""
        record = self._measured(gpus, batch_size, strategy, truths)
        predicted = self.forecasts.before(record.cell, record.environment, self.known)
        record = with_forecast(
            dataclasses.replace(record, predicted=predicted, started_at=predicted["made_at"])
        )
        codes = {
            code: said
            for code, said in judge(record, ValidityLimits()).codes.items()
            if code == "unexplained"
        }
        validity = dataclasses.replace(
            record.validity, verdict="suspect" if codes else "valid", codes=codes
        )
        return dataclasses.replace(record, validity=validity)

    def calibrate(self, batches=(64, 128, 192, 256)):
        """Measure every GPU alone, two pairs and all: later forecasts rest on them. Return this machine."""
        alone = [((gpu,), "none") for gpu in range(4)] + [((0,), "nccl_allreduce")]
        together = [(gpus, "nccl_allreduce") for gpus in ((0, 1), (2, 3), (0, 1, 2, 3))]
        for gpus, strategy in (*alone, *together):
            self.known += [self._measured(gpus, batch, strategy, SOUND) for batch in batches]
        self.forecasts.learn(self.known)
        return self

    def _measured(self, gpus, batch_size, strategy, truths):
        made = self.simulator.record(gpus, "nccl_allreduce", batch_size=batch_size)
        chosen = OPTIONS if strategy != "none" else {"name": "none"}
        cell = Cell.from_dict(made.cell.to_dict() | {"strategy": chosen})
        compute = (10 + 0.2 * batch_size) * (truths.slow_rank if len(gpus) > 1 else 1.0)
        sizes = _sizes(truths.bucket_mib)
        ready = [
            compute * (1 + 2 * sum(sizes[: place + 1]) / sum(sizes)) / 3
            for place in range(len(sizes))
        ]
        times = [_ms(size, len(gpus), truths.gb_per_s) for size in sizes]
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
            "rank": 0,
            "exchange": False,
            "ready_ms": ready,
            "backward_ms": compute,
            "update_ms": compute,
        }
        tables = {"buckets": {"rows": rows}, "timeline": {"rows": [quiet]}} if own else {}
        if own and len(gpus) > 1:
            measured = [
                {"bytes": size, "ms": _ms(size, len(gpus), truths.gb_per_s)}
                for size in (64 << 10, MIB, *sizes)
            ]
            gammas = [{"rank": 0, "gamma": 0.1, "gamma_error": 0.01}]
            tables |= {
                "bucket_exchange": {"operation": "all_reduce", "rows": measured},
                "interference": {"operation": "all_reduce", "rows": gammas},
            }
        return dataclasses.replace(
            made, cell=cell, cell_key=cell.key, metrics=metrics, tables=tables, within_run={}, series={},
            model={"gradient_bytes": GRADIENT_BYTES, "arrays": 161},
        )  # fmt: skip


def _sizes(cap_mib):
    """The bytes of each bucket, the last one first."""
    full = int(cap_mib * MIB)
    return [full] * (GRADIENT_BYTES // full) + [GRADIENT_BYTES % full] * (GRADIENT_BYTES % full > 0)


def _ms(size, ranks, gb_per_s):
    return 0.02 + size * 2 * (ranks - 1) / ranks / gb_per_s / 1e6
