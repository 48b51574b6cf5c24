"""Faults of ranks on GPUs: the right rank and the right cause, and the cell after them is as if nothing had been.

python -m pytest -m 'gpu or multi_gpu' -n 0 tests/test_faults_gpu.py [--campaign-to FILE]
"""

import shutil

import pytest
from faults import Fault, PlantedSweep
from faults_seen import examine, record_outcomes

SILENCE_S = 8.0
HANG = {"cause": "hang", "deadline_s": SILENCE_S}
STRANGER, SHIFTED = "stranger", "another collective of NCCL"
ON_ANY = {  # kind: what must come of it; the stranger first, since it outlives its cell by seconds
    STRANGER: {}, "SIGKILL": {"cause": "killed"}, "SIGSTOP": HANG, "sleep": HANG,
    "illegal access": {"cause": "exception"}, "out of GPU memory": {"cause": "oom"},
}  # fmt: skip
BETWEEN_RANKS = {"wrong collective": HANG, "message that nobody sends": HANG, SHIFTED: {}}
# What the cell of each kind that ends nothing must be told as.
TOLD = {STRANGER: {"foreign_load"}, SHIFTED: {"replicas_differ", "exchange_wrong"}}
HEALTHY = 50  # its bucket_cap_mb
OPTIONS = [
    "device=cuda", "model=resnet18", "batch_size=512", f"engine.silence_timeout_s={SILENCE_S:g}", "report=false",
    "benchmark.max_seconds=3", "benchmark.warmup_min_seconds=0.5", "benchmark.limit_iterations=0",
    "benchmark.exposed_rounds=0", "benchmark.exchange_iterations=5", "noise_pairs=0",
]  # fmt: skip


def strike(folder, record_property, kinds, process, gpus, sharing=()):
    """Run a sweep with one faulty cell for each kind and a healthy one at the end; look at all of them."""
    faults = {
        10 + number: Fault(
            kind, "timed", "rank", rank=process if expected else None, process=process, **expected
        )
        for number, (kind, expected) in enumerate(kinds.items())
    }
    sweep = PlantedSweep(folder, faults, *OPTIONS, f"gpus=[{gpus}]", *sharing, healthy=(HEALTHY,))
    try:
        sweep.run(timeout_s=560)
        if sharing:
            sweep.study_dir = sweep.output_dir / "default-rehearsal"
            for alone in sweep.study_dir.glob(f"*-gpus0-{10 * '?'}"):  # one rank: its memory
                shutil.rmtree(alone)
        outcomes = [examine(fault, sweep, cap) for cap, fault in faults.items()]
    finally:
        sweep.end()
    record_outcomes(record_property, outcomes)
    (healthy,) = sweep.records(HEALTHY)
    assert healthy.state == "finished" and healthy.validity.verdict != "invalid", healthy.validity
    for number, kind in enumerate(kinds):
        (record,) = sweep.records(10 + number)
        assert TOLD.get(kind, set()) <= record.validity.codes.keys(), (kind, record.validity)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_one_gpu(tmp_path, record_property):
    strike(tmp_path, record_property, ON_ANY, 0, "0")


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.timeout(600)
def test_two_gpus(tmp_path, record_property, sharing):
    kinds = ON_ANY | BETWEEN_RANKS
    if sharing:
        del kinds[STRANGER]  # a rehearsal does not ask who else is there
    strike(tmp_path, record_property, kinds, 1, "0,1", sharing)
