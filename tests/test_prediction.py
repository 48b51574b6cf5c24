"""Forecasts: their equations against cases worked by hand and against other ways to compute them, and what the command says."""

import heapq
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.prediction import tables
from analysis.prediction.asked import Subset, questions, read_nccl, read_subsets, refuse_absent
from analysis.prediction.calibration import Calibrated, calibrate, exchange_curve
from analysis.prediction.cells import MeasuredCell, Question, Workload
from analysis.prediction.draws import about, best, exactly, near
from analysis.prediction.forecast import conformal, forecast
from analysis.prediction.holdout import HeldOut, hold_out, scores
from analysis.prediction.links.host import HostLink, Known
from analysis.prediction.links.model import (
    DIRECT,
    HOST_MEMORY,
    MEASURED,
    NETWORK,
    SCALED,
    ExchangeWire,
    KnownLinks,
    NoLink,
    TimeCurve,
)
from analysis.prediction.links.nccl_constants import constants, nvlink
from analysis.prediction.links.network import read_network
from analysis.prediction.links.ring import NvLinks, modelled_us
from analysis.prediction.links.wires import asked_wire, used_wire
from analysis.prediction.parts.exchange import buckets, exchange
from analysis.prediction.replay import replay
from analysis.prediction.scores import collective_errors, mean_error, summary
from analysis.prediction.strategies import as_in_a_step, by_collective, refuse_unknown_names
from analysis.prediction.waiting import expected_largest, largest_normal, wait_of_residuals
from analysis.study.study import Study, open_study
from benchmarks.record import read_study
from conf import groups

DATA = Path(__file__).parent / "data"
EVERY = sorted({path.parent.parent for path in DATA.glob("h200_*/*/*/record.json")})
H200 = [path for path in EVERY if path.parent.name != "h200_x1"]


@pytest.fixture(scope="module")
def h200():
    return calibrate(Study.of(record for folder in H200 for record in read_study(folder)[0]))


@pytest.fixture(scope="module")
def conditions(h200):
    return hold_out(h200, "condition")


def replayed(ready, exchange, end, own=0.0, gamma=0.0):
    values = [[exactly(one) for one in several] for several in (ready, exchange)]
    return replay(*values, exactly(end), exactly(0.0), exactly(own), exactly(gamma))


def test_the_default_case_by_hand():
    """ResNet-50 on two H200s over NVLink: buckets ready at 26.5, 27.5, 31.7 and 54.8 of 54.8 ms, 0.08 ms each."""
    found = replayed([26.5, 27.5, 31.7, 54.8], [0.14, 0.13, 0.14, 0.08], 54.8, own=0.55)
    assert best(found.exposed_ms) == pytest.approx(0.63) and best(found.tail_ms) == pytest.approx(
        0.08
    )


def test_the_case_through_host_memory_by_hand():
    """The same with P2P_LEVEL=LOC: 1.14, 1.02, 1.06 and 0.66 ms; γ = 0.22 of the 3.2 ms that overlap explains the rest."""
    times = [1.14, 1.02, 1.06, 0.66]
    without = replayed([26.5, 27.5, 31.7, 54.8], times, 54.8, own=0.55)
    assert best(without.exposed_ms) == pytest.approx(1.21) and best(
        without.overlap_ms
    ) == pytest.approx(3.22)
    slowed = replayed([26.5, 27.5, 31.7, 54.8], times, 54.8, own=0.55, gamma=0.22)
    assert best(slowed.contention_ms) == pytest.approx(0.22 * 3.22)
    assert best(slowed.exposed_ms) == pytest.approx(1.21 + 0.22 * 3.22)


def simulated(ready, exchange, end, gamma):
    """Step through the events of one step: compute goes on at rate 1 − γ while an exchange runs."""
    now = done = busy = 0.0
    waiting, marks, queue, running = [], sorted({*ready, end}), list(enumerate(ready)), None
    ended = {}
    while marks or waiting or running:
        rate = 1 - gamma if running else 1.0
        events = [(now + (marks[0] - done) / rate, "mark")] if marks else []
        if running:
            heapq.heappush(events, (running[0], "exchange"))
        at, what = min(events)
        done, busy, now = done + (at - now) * rate, busy + (at - now) * bool(running), at
        if what == "mark":
            mark = marks.pop(0)
            done = mark
            waiting += [index for index, when in queue if when == mark]
            if mark == end:
                ended["end"] = now
        else:
            running = None
        if running is None and waiting:
            running = (now + exchange[waiting.pop(0)],)
    return ended["end"], now


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 9.0), st.floats(0.01, 6.0)), min_size=1, max_size=6),
    st.floats(0.0, 5.0),
    st.floats(0.0, 0.9),
)
def test_a_replay_equals_a_simulation_of_its_events(parts, after, gamma):
    ready = list(np.cumsum([gap for gap, _ in parts]))
    exchange = [ms for _, ms in parts]
    end = ready[-1] + after
    found = replayed(ready, exchange, end, gamma=gamma)
    backward_end, last = simulated(ready, exchange, end, gamma)
    assert best(found.step_ms) == pytest.approx(max(backward_end, last), rel=1e-9)
    assert best(found.contention_ms) == pytest.approx(backward_end - end, abs=1e-9)
    assert best(found.tail_ms) == pytest.approx(max(0.0, last - backward_end), abs=1e-9)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, 0.5642), (8, 1.4236), (64, 2.3437), (1024, 3.2497)]
)
def test_the_largest_of_normal_numbers(ranks, expected, monkeypatch):
    """Known values (Harter 1961); √(2 ln n) would say 1.18, 2.04, 2.88 and 3.72. With numpy 1.26 too, which may be installed."""
    monkeypatch.delattr(np, "trapezoid", raising=False)
    largest_normal.cache_clear()
    assert largest_normal(ranks) == pytest.approx(expected, abs=2e-3)


def test_the_largest_of_unlike_normal_numbers():
    assert expected_largest([1.0, 5.0], 0.0) == 5.0
    assert expected_largest([0.0, 0.0], 2.0) == pytest.approx(2 * 0.5642, abs=1e-3)
    assert expected_largest([0.0, 100.0], 1.0) == pytest.approx(
        100.0, abs=1e-3
    )  # the slow one decides


def test_a_heavy_tail_waits_longer_than_a_normal_one():
    normal = np.random.default_rng(1).standard_normal(500)
    light, heavy = (
        wait_of_residuals(normal, 64),
        wait_of_residuals(normal * (1 + 4 * (normal > 1.5)), 64),
    )
    assert light.ms == pytest.approx(2.34, rel=0.15) and not light.beyond
    assert heavy.ms > 2 * light.ms and heavy.bound_ms >= heavy.ms and light.bound_ms > light.ms
    assert wait_of_residuals(normal, 1024).beyond
    with pytest.raises(ValueError, match="at least 2"):
        wait_of_residuals([1.0], 8)


def test_a_collective_between_measured_sizes_and_on_more_ranks():
    curve = TimeCurve(
        "all_reduce", ExchangeWire(DIRECT), 2, 1, (1e3, 1e6, 1e8), (10.0, 14.0, 510.0), "a"
    )
    links = KnownLinks((curve,), nccl="2.28.9")
    inside = links.time("all_reduce", 1e6, 2, ExchangeWire(DIRECT))
    assert best(inside.ms) == pytest.approx(0.014) and inside.source == MEASURED
    more = links.time("all_reduce", 1e8, 4, ExchangeWire(DIRECT))
    assert more.source == SCALED and best(more.ms) == pytest.approx(
        0.510 * 1.5, rel=0.03
    )  # 2(n − 1) ÷ n: 1 to 1.5
    with pytest.raises(NoLink, match="host memory was measured"):
        links.time("all_reduce", 1e6, 2, ExchangeWire(HOST_MEMORY))
    copies = KnownLinks((curve,), {DIRECT: 400.0, HOST_MEMORY: 40.0})
    assert best(copies.time("all_reduce", 1e8, 2, ExchangeWire(HOST_MEMORY)).ms) == pytest.approx(
        5.0, rel=0.05
    )


def test_a_ring_on_more_ranks_keeps_what_a_share_takes_beyond_the_wire():
    """NV18 of H200s: 370.8 GB/s each way by NCCL. 1 GB on two ranks takes 2,697 µs of wire and 500 of something else."""
    links = NvLinks(370.8, 141.0)
    two = TimeCurve(
        "all_reduce", ExchangeWire(DIRECT), 2, 1, (5e8, 1e9, 2e9), (1598.5, 3197.0, 6394.0), "a"
    )
    known = KnownLinks((two,), nccl="2.28.9", nvlinks=links)
    four = best(known.time("all_reduce", 1e9, 4, ExchangeWire(DIRECT)).ms)
    assert four == pytest.approx(
        1e-3 * (1e9 * 1.5 / 370.8e3 + 250 + 4 * 3.4), abs=1e-3
    )  # half as large a share: 250 µs
    without = best(replace(known, nvlinks=None).time("all_reduce", 1e9, 4, ExchangeWire(DIRECT)).ms)
    assert without == pytest.approx(3.197 * 1.5, rel=0.01)  # all of it grows
    assert modelled_us("all_reduce", 64, 4, links, constants("2.28.9")[0]) == pytest.approx(
        6.6 + 6 * 0.6, abs=0.01
    )
    assert nvlink("NVIDIA H200") == (20.6, 141.0) and nvlink("NVIDIA L40S") is None


def test_a_network_that_was_described():
    curve = TimeCurve(
        "all_reduce", ExchangeWire(DIRECT), 8, 1, (1e3, 1e6, 1e9), (15.0, 25.0, 4900.0), "a"
    )
    network = read_network("8x50GB/s,5us")
    assert (network.host_gb_per_s, network.latency_us) == (400.0, 5.0)
    links = KnownLinks((curve,), nccl="2.28.9")
    two, many = (
        links.time("all_reduce", 1e8, 8 * n, ExchangeWire(NETWORK), n, network) for n in (2, 128)
    )
    assert best(two.ms) > 2 * 1e8 * 15 / 16 / 400 / 1e6  # no faster than its slowest wire
    assert best(many.ms) < 3 * best(two.ms)  # a tree: 7 hops of 5 µs each way, not 254
    slow = links.time("all_reduce", 1e8, 16, ExchangeWire(NETWORK), 2, read_network("1x10GB/s,5us"))
    assert best(slow.ms) == pytest.approx(2 * 1e8 * 15 / 16 / 10 / 1e6, rel=0.01)


def test_constants_of_another_version_are_said():
    assert constants("2.28.9")[1] == "" and constants("2.30.7")[0].version == "2.30"
    assert "those of 2.30" in constants("2.32.6")[1] and "those of 2.28" in constants(None)[1]


def test_the_wire_of_every_measured_cell_is_said_before_it_runs():
    """What is asked of NCCL and the link class decide; NCCL's log agrees but for the cell whose setting NCCL ignored."""
    seen = set()
    for record in (one for folder in H200 for one in read_study(folder)[0]):
        cell, transport = record.cell, record.effective.get("transport")
        if cell.trains and cell.strategy["name"] == "nccl_allreduce" and transport:
            asked = asked_wire(cell.nccl, record.effective.get("link_class"), len(cell.hosts) or 1)
            assert (used_wire(transport, asked) == asked) == (
                "setting_ignored" not in record.validity.codes
            )
            seen.add(asked.transport)
    assert seen == {DIRECT, HOST_MEMORY, NETWORK}
    assert asked_wire({}, "SYS").transport == HOST_MEMORY
    assert asked_wire({"NCCL_P2P_LEVEL": "SYS"}, "SYS").transport == DIRECT


WORKLOAD = Workload("model", 100e6, 100)
OPTIONS = (("bucket_cap_mb", "25.0"), ("name", "nccl_allreduce"))


def truth(ranks, batch, gb_per_s, noise=0.0, own=0.5, gamma=0.1):
    """A step of a machine that the test invents, in ms, and its exchange alone."""
    base = 10.0 + 0.2 * batch
    question = Question(WORKLOAD, batch, OPTIONS, ExchangeWire(DIRECT), ranks)
    sizes = question.assumed_buckets
    times = [0.02 + size * 2 * (ranks - 1) / ranks / gb_per_s / 1e6 for size in sizes]
    shares = np.cumsum(sizes) / sum(sizes)
    found = replayed([base * (1 + 2 * share) / 3 for share in shares], times, base, own, gamma)
    return best(found.step_ms) * (1 + noise), best(found.step_ms) - base, sum(times)


def invented(sizes=(2, 4, 8), batches=(64, 128, 192, 256)):
    """A calibration of a machine with 10 GB/s, whose steps scatter by 0.1 %."""
    generator, cells = np.random.default_rng(3), []
    for batch in batches:
        alone = Question(
            WORKLOAD, batch, (("name", "none"),), ExchangeWire(DIRECT), 1, members=(0,)
        )
        one = about(10.0 + 0.2 * batch, 0.001, f"alone {batch}")
        cells.append(MeasuredCell(alone, (f"alone {batch}",), one, None, None, 0.0, 0.0, 0.001))
        own = near(0.5, 0.01, f"own {batch}")
        with_it = replace(alone, options=OPTIONS)
        cells.append(
            MeasuredCell(with_it, (f"own {batch}",), one + own, own, None, 0.0, 0.0, 0.001)
        )
        for ranks in sizes:
            step, cost, exchange = truth(ranks, batch, 10.0, 0.001 * generator.standard_normal())
            question = Question(WORKLOAD, batch, OPTIONS, ExchangeWire(DIRECT), ranks)
            name = f"{ranks} {batch}"
            values = about(step, 0.001, name), near(cost, 0.02, name), about(exchange, 0.01, name)
            cells.append(MeasuredCell(question, (name,), *values, 0.0, 0.0, 0.001))
    measured = (1e3, 1e6, 1e8)
    times = {n: tuple(20 + size * 2 * (n - 1) / n / 1e4 for size in measured) for n in sizes}
    curves = tuple(
        TimeCurve("all_reduce", ExchangeWire(DIRECT), n, 1, measured, times[n], str(n))
        for n in sizes
    )
    return Calibrated(tuple(cells), Known(KnownLinks(curves, nccl="2.28.9"), HostLink()))


def test_a_link_at_half_its_bandwidth_is_outside_the_interval_and_a_sound_one_inside():
    calibration = invented()
    known = scores(hold_out(calibration, "condition"))
    assert len(known) == 12
    asked = Question(
        WORKLOAD, 160, OPTIONS, ExchangeWire(DIRECT), 4
    )  # a batch that nobody measured
    said = forecast(calibration, asked, known)
    assert said.low is not None and said.low < truth(4, 160, 10.0)[0] < said.high
    assert not said.low < truth(4, 160, 5.0)[0] < said.high
    assert said.cost_ms == pytest.approx(truth(4, 160, 10.0)[1], rel=0.1)
    assert said.tail_ms + said.contention_ms + said.own_work_ms == pytest.approx(
        said.cost_ms, abs=1e-6
    )
    more = forecast(calibration, replace(asked, gpus=64), known)
    assert more.basis == "extrapolated" and more.growth == pytest.approx(1 + math.log(8))


def test_no_interval_goes_below_compute_alone():
    """An exchange of which hardly anything is known may take long; no step is shorter than one without it."""
    calibration, asked = invented(), Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 64)
    alone, hardly = 10.0 + 0.2 * 128, forecast(calibration, asked, [30.0] * 12)
    assert 0.8 * alone < hardly.low < alone and hardly.high > 2 * hardly.step_ms
    well = forecast(calibration, replace(asked, gpus=4), [1.0] * 12)
    assert well.step_ms - well.low == pytest.approx(well.high - well.step_ms), (
        "nothing is cut where it is known"
    )


def test_gpus_that_were_not_measured_widen_the_interval():
    calibration = invented()
    asked = Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4)
    narrow, wide = (
        forecast(calibration, asked),
        forecast(calibration, replace(asked, gpu_spread=0.02)),
    )
    assert wide.waiting_ms == pytest.approx(
        0.02 * 35.6 * 1.03, rel=0.02
    )  # E of the largest of 4: 1.03 σ, σ = 2 % of a step
    assert (
        wide.deviation_ms > 0.02 * 35.6 * 0.7 * 0.9 and narrow.deviation_ms < 0.2
    )  # its deviation: 0.70 σ
    measured = forecast(calibration, replace(asked, gpus=1, members=(0,), gpu_spread=0.02))
    assert measured.deviation_ms < 0.1  # GPU 0 ran alone


def capped(calibration, alone_mhz, together_mhz, slower=1.0):
    """The invented machine at its power cap, whose steps of several GPUs are `slower` for their clock."""
    cells = []
    for one in calibration.cells:
        several = one.ranks > 1
        cost = one.cost_ms if several else 0.0
        step = cost + (one.step_ms - cost) * slower if several else one.step_ms
        mhz = together_mhz if several else alone_mhz
        cells.append(replace(one, step_ms=step, sm_mhz=mhz, capped_share=0.9))
    return replace(calibration, cells=tuple(cells), memo={})


def test_clocks_at_the_power_cap_slow_what_follows_them():
    """1,980 MHz alone, 1,881 together; steps are 3.1 % longer together, so that e is 0.6."""
    plain, asked = invented(), Question(WORKLOAD, 160, OPTIONS, ExchangeWire(DIRECT), 4)
    slow = capped(plain, 1980.0, 1881.0, (1980 / 1881) ** 0.6)
    before, said = forecast(plain, asked), forecast(slow, asked)
    assert said.step_ms / before.step_ms == pytest.approx((1980 / 1881) ** 0.6, abs=4e-3)
    assert said.cost_ms == pytest.approx(before.cost_ms, rel=0.1)  # a difference at equal clocks
    alone = tuple(one for one in slow.cells if one.ranks == 1)
    unknown = forecast(replace(slow, cells=alone, memo={}), asked)
    assert unknown.step_ms == pytest.approx(
        forecast(replace(plain, cells=alone, memo={}), asked).step_ms, rel=1e-6
    )
    assert unknown.deviation_ms > 0.01 * unknown.step_ms and "no cell shows it" in " ".join(
        unknown.why
    )


def test_a_batch_size_from_the_others():
    held = hold_out(invented(), "batch")
    assert {one.cell.question.batch_size for one in held} == {64, 128, 192, 256}
    assert all(
        abs(one.forecast.step_ms / one.step_ms - 1) < 0.02 for one in held
    )  # a line through two other sizes


@pytest.mark.parametrize(("small", "large"), [(20.0, 18.0), (20.0, 90.0)])
def test_scatter_of_two_batch_sizes_takes_no_step_below_nothing(small, large):
    """A line through two noisy steps fell: a step of −44 ms, or of 0, by which the rate was divided."""
    alone = Question(WORKLOAD, 8, (("name", "none"),), ExchangeWire(DIRECT), 1, members=(0,))
    measured = [(alone, small, None), (replace(alone, batch_size=16), large, None)]
    measured.append(
        (
            replace(alone, batch_size=16, options=OPTIONS, gpus=2, members=(0, 1)),
            large + 4,
            -2 * large,
        )
    )
    cells = [
        MeasuredCell(
            asked,
            (str(at),),
            exactly(step),
            None if cost is None else exactly(cost),
            exactly(3.0),
            0.0,
            0.0,
        )
        for at, (asked, step, cost) in enumerate(measured)
    ]
    calibration = Calibrated(tuple(cells), invented().known)
    for batch, nearest, step in ((1, 8, small), (4, 8, small), (64, 16, large), (4096, 16, large)):
        said = forecast(calibration, replace(alone, batch_size=batch))
        assert (
            min(step, step * batch / nearest) <= said.step_ms <= max(step, step * batch / nearest)
        )
    several = forecast(calibration, replace(measured[2][0], batch_size=8))
    assert several.null_step_ms > 0 and several.null_cost_ms < 0


def test_a_wrong_bucket_size_is_outside_the_interval():
    calibration = invented()
    known = scores(hold_out(calibration, "condition"))
    small = tuple(
        ("bucket_cap_mb", "0.1") if name == "bucket_cap_mb" else (name, value)
        for name, value in OPTIONS
    )
    said = forecast(calibration, Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4), known)
    wrong = replace(Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4), options=small)
    assert not said.low < forecast(calibration, wrong).step_ms < said.high


def hooked(name, workload=WORKLOAD):
    """The question of 128 images on two GPUs with a hook."""
    options = tuple(sorted((*OPTIONS, ("comm_hook", name))))
    return Question(workload, 128, options, ExchangeWire(DIRECT), 2)


def test_powersgd_is_forecast_only_where_its_exchange_was_measured():
    """It sends matrices whose sizes no record holds: what two ranks took says nothing of four, nor of whole gradients."""
    calibration, asked = invented(), hooked("powersgd")
    with pytest.raises(
        ValueError, match=r"comm_hook=powersgd sends rank × .* add such a cell on 2 ranks over"
    ):
        forecast(calibration, asked)
    measured = MeasuredCell(
        asked, ("low rank",), exactly(39.6), exactly(4.0), exactly(0.4), 0.0, 0.0, 0.001
    )
    known = replace(calibration, cells=(*calibration.cells, measured), memo={})
    assert sum(map(best, exchange(known, asked).during)) == pytest.approx(0.4)
    assert forecast(known, asked).step_ms == pytest.approx(39.6, rel=0.005)
    for other in (replace(asked, gpus=4), replace(asked, wire=ExchangeWire(HOST_MEMORY))):
        with pytest.raises(
            ValueError, match=f"add such a cell on {other.ranks} ranks over {other.wire}"
        ):
            forecast(known, other)
    plain = Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 2)
    assert forecast(known, plain).step_ms == pytest.approx(
        forecast(calibration, plain).step_ms, rel=1e-6
    )
    assert (
        exchange_curve(measured) is None
        and exchange_curve(replace(measured, question=plain)) is not None
    )


def test_a_half_precision_hook_halves_no_gradients_in_2_bytes():
    in_2_bytes = replace(WORKLOAD, rest=(("precision", "bf16_weights"),))
    assert [hooked(name).sent_bytes for name in ("none", "fp16", "bf16")] == [100e6, 50e6, 50e6]
    assert (
        hooked("bf16", in_2_bytes).sent_bytes
        == sum(hooked("bf16", in_2_bytes).assumed_buckets)
        == 100e6
    )


def on_gpus(hook, workload=WORKLOAD):
    """The question of kvstore_device, which brings weights back, on two GPUs."""
    options = (
        ("bucket_cap_mb", "25.0"),
        ("comm_hook", hook),
        ("name", "kvstore_device"),
        ("reduce", "sharded"),
    )
    return Question(workload, 128, options, ExchangeWire(DIRECT), 2)


@pytest.mark.parametrize(
    ("hook", "alone_ms", "there", "back"), [("none", 1.6, 0.8, 0.8), ("bf16", 0.8, 0.4, 0.8)]
)
def test_weights_come_back_unhalved_and_once_all_gradients_are_there(hook, alone_ms, there, back):
    """Alone, gradients go both ways, halved by the hook; in a step weights of 4 bytes come back after the last gradient."""
    asked, calibration = on_gpus(hook), invented()
    cell = MeasuredCell(
        asked, ("a",), exactly(38.0), exactly(2.0), exactly(alone_ms), 0.0, 0.0, 0.001
    )
    links = replace(
        calibration.known.links, curves=(*calibration.known.links.curves, exchange_curve(cell))
    )
    known = replace(calibration, cells=(*calibration.cells, cell), known=Known(links), memo={})
    found = exchange(known, asked)
    assert best(sum(found.during)) == pytest.approx(there, rel=0.02)
    assert best(found.after) == pytest.approx(back, rel=0.02)
    assert forecast(known, asked).tail_ms == pytest.approx(back + best(found.during[-1]), rel=0.02)
    in_2_bytes = replace(WORKLOAD, rest=(("precision", "bf16_weights"),))
    assert (
        as_in_a_step(on_gpus("bf16", in_2_bytes)).back == as_in_a_step(on_gpus("none")).back == 1.0
    )


@pytest.mark.parametrize(
    ("optimize", "overlap"),
    [("eager", True), ("graph", True), ("compile", False), ("max_graph", False)],
)
def test_gradients_of_a_compiled_backward_leave_at_its_end_but_for_those_of_ddp(optimize, overlap):
    workload = replace(WORKLOAD, rest=(("optimize", optimize),))
    calibration = invented()
    cells = tuple(
        replace(one, question=replace(one.question, workload=workload)) for one in calibration.cells
    )
    asked = on_gpus("none", workload)
    cell = MeasuredCell(asked, ("a",), exactly(40.0), exactly(4.0), exactly(1.6), 0.0, 0.0, 0.001)
    links = replace(
        calibration.known.links, curves=(*calibration.known.links.curves, exchange_curve(cell))
    )
    known = replace(calibration, cells=(*cells, cell), known=Known(links), memo={})
    found, times = forecast(known, asked), exchange(known, asked)
    hidden = best(times.whole_ms) - found.tail_ms
    assert (hidden > 0.3) == overlap and (hidden == pytest.approx(0.0, abs=1e-9)) != overlap
    of_ddp = Question(workload, 128, OPTIONS, ExchangeWire(DIRECT), 2)
    assert forecast(known, of_ddp).tail_ms < 0.5 * best(exchange(known, of_ddp).whole_ms)


@pytest.mark.parametrize(
    ("name", "more", "back"),
    [
        ("cpu_staged", {"optimizer_on": "cpu"}, 2.0),
        ("cpu_staged", {"optimizer_on": "gpu"}, 1.0),
        ("kvstore_dist_sync", {}, 2.0),
        ("kvstore_dist_async_device", {}, 2.0),
        ("hierarchical", {}, 1.0),
        ("nccl_allreduce", {}, 1.0),
    ],
)
def test_strategies_say_whether_weights_or_gradients_come_back(name, more, back):
    options = tuple(sorted({"name": name, "comm_hook": "fp16", **more}.items()))
    assert as_in_a_step(Question(WORKLOAD, 128, options, ExchangeWire(DIRECT), 2)).back == back


def test_weights_come_back_by_the_second_of_two_collectives():
    with pytest.raises(
        ValueError, match="'all_reduce' with brings_weights: accepted are two collectives, such as"
    ):
        by_collective("all_reduce", brings_weights=True)


def test_a_bucket_that_was_timed_with_unhalved_weights_is_one_of_more_bytes():
    """bf16: 1 MB to the ranks and 2 MB back are timed in the cell as a bucket of 1 MB."""
    (record,) = (
        one
        for one in read_study(DATA / "h200_x4" / "strategies")[0]
        if one.cell.strategy == BF16_ON_GPUS
    )
    table = {
        "bucket_exchange": {
            "operation": "reduce_scatter + all_gather",
            "rows": [{"bytes": 1e6, "ms": 0.1}],
        }
    }
    (curve,) = (
        one
        for one in calibrate(Study.of([replace(record, tables=table)])).known.links.curves
        if not one.of_gradients
    )
    assert curve.sizes_bytes == (1.5e6,) and curve.times_us == (100.0,)


BF16_ON_GPUS = {
    "name": "kvstore_device",
    "bucket_cap_mb": 25.0,
    "reduce": "sharded",
    "comm_hook": "bf16",
}


def test_what_is_missing_is_named_where_a_strategy_ran_on_one_gpu_without_a_control():
    calibration = invented(sizes=(), batches=(64,))
    (with_it,) = (
        replace(one, cost_ms=None) for one in calibration.cells if one.question.strategy != "none"
    )
    with pytest.raises(
        ValueError, match=r"it ran on one GPU, but no GPU ran without it.*strategy=none"
    ):
        forecast(
            replace(calibration, cells=(with_it,), memo={}),
            replace(with_it.question, gpus=2, members=(0, 1)),
        )


def test_cpu_workers_are_not_called_gpus():
    on_cpu, calibration = (
        replace(WORKLOAD, rest=(("device", "cpu"),)),
        invented(sizes=(2, 4), batches=(64, 128)),
    )
    cells = tuple(
        replace(one, question=replace(one.question, workload=on_cpu)) for one in calibration.cells
    )
    known, asked = (
        replace(calibration, cells=cells, memo={}),
        Question(on_cpu, 128, OPTIONS, ExchangeWire(DIRECT), 8),
    )
    said = forecast(known, asked)
    assert "CPU workers that were not measured scatter as those that were" in said.why
    assert not any("GPU" in one for one in (*said.why, said.widest))
    with pytest.raises(
        ValueError,
        match=r"nothing says what it adds to a step; add a cell with strategy=.+ on one CPU worker",
    ):
        forecast(known, replace(asked, options=(("name", "kvstore_device"),)))


@pytest.mark.parametrize(("device", "shortest"), [("cuda", 99.0), ("cpu", 0.0)])
def test_no_step_is_shorter_than_its_launches_and_a_cpu_worker_has_none(device, shortest):
    """A forecast on CPU workers was as long as the lead-in of another batch: 7.6 ms, measured 5.4."""
    there, calibration = (
        replace(WORKLOAD, rest=(("device", device),)),
        invented(sizes=(2,), batches=(64, 128)),
    )
    cells = tuple(
        replace(one, question=replace(one.question, workload=there), launch_ms=99.0)
        for one in calibration.cells
    )
    asked = Question(there, 64, OPTIONS, ExchangeWire(DIRECT), 1, members=(0,))
    found = forecast(replace(calibration, cells=cells, memo={}), asked)
    assert found.step_ms == pytest.approx(max(shortest, 10.0 + 0.2 * 64 + 0.5), rel=1e-3)


def test_few_cells_claim_no_error():
    calibration = invented(sizes=(2, 4))  # eight can be held out
    held = hold_out(calibration, "condition")
    said = forecast(
        calibration, Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4), scores(held)
    )
    assert said.low is None and "not enough to state an error: 8 cells" in " ".join(said.why)
    assert all(one.inside is None for one in held) and summary(held).coverage is None


def test_the_conformal_factor_holds_nine_of_ten():
    assert (
        conformal([1.0] * 9 + [7.0]) == 7.0
        and conformal([float(one) for one in range(1, 100)]) == 90.0
    )


CALIBRATED = {
    "buckets": {"rows": [{"bytes": 6e7}, {"bytes": 4e7}]},
    "timeline": {
        "rows": [
            {
                "rank": 0,
                "exchange": False,
                "ready_ms": [20.0, 58.0],
                "backward_ms": 58.0,
                "update_ms": 60.0,
            },
            {
                "rank": 0,
                "exchange": True,
                "ready_ms": [20.0, 60.0],
                "backward_ms": 61.0,
                "update_ms": 63.0,
            },
        ]
    },
    "bucket_exchange": {
        "operation": "all_reduce",
        "rows": [{"bytes": 6e7, "ms": 6.0}, {"bytes": 4e7, "ms": 4.0}],
    },
    "interference": {
        "operation": "all_reduce",
        "rows": [{"rank": 0, "gamma": 0.3, "gamma_error": 0.01}],
    },
    "residuals": {
        "probabilities": [0.0, 0.5, 1.0],
        "rows": [
            {
                "rank": 0,
                "n": 100,
                "mean_ms": 60.0,
                "quantiles_ms": [59.0, 60.0, 61.0],
                "acf": [0.5, 0.4, 0.01],
            }
        ],
    },
}


def test_tables_of_a_calibration_are_read_and_count():
    assert tables.buckets(CALIBRATED) == (6e7, 4e7)
    assert tables.moments(CALIBRATED) == tables.StepMoments((20.0, 58.0), 58.0, 60.0)
    assert tables.exchange_curve(CALIBRATED) == ("all_reduce", (4e7, 6e7), (4000.0, 6000.0))
    assert tables.slowed(CALIBRATED) == tables.Slowed(0.3, 0.01)
    assert len(tables.residuals_ms(CALIBRATED)) == 100 and tables.together_for(
        CALIBRATED
    ) == pytest.approx(2.8)
    calibration = invented()
    cells = tuple(
        replace(one, tables=CALIBRATED) if one.ranks == 4 else one for one in calibration.cells
    )
    with_them = replace(calibration, cells=cells, memo={})
    asked = Question(WORKLOAD, 256, OPTIONS, ExchangeWire(DIRECT), 4)
    assert buckets(with_them, asked) == (6e7, 4e7)
    said, before = forecast(with_them, asked), forecast(calibration, asked)
    assert said.contention_ms > 2 * before.contention_ms  # γ of 0.3, not 0.1
    assert said.waiting_ms > 0.5 and before.waiting_ms == pytest.approx(0.23, abs=0.2)


@pytest.mark.parametrize("damaged", [{}, {"timeline": None}, {"timeline": {"rows": ["x", {"ready_ms": [None]}]}},
                                     {"buckets": {"rows": [{"bytes": None}]}}, {"bucket_exchange": {"rows": 3}},
                                     {"buckets": {"rows": [{"bytes": 10**400}]}}, {"buckets": {"rows": [{"bytes": -1}]}},
                                     {"timeline": {"rows": [{"ready_ms": [1], "backward_ms": 3, "update_ms": 2}]}},
                                     {"interference": {"rows": [{"gamma": 1e308, "gamma_error": 0.1}]}},
                                     {"residuals": {"probabilities": [0, 2], "rows": [{"quantiles_ms": [1, 2]}]}}])  # fmt: skip
def test_tables_that_are_not_there_are_none(damaged):
    assert tables.moments(damaged) is None and tables.buckets(damaged) is None
    assert tables.slowed(damaged) is None and tables.residuals_ms(damaged) is None


def test_every_condition_from_the_others(conditions):
    """The figures of RESULTS.md."""
    found = summary(conditions)
    assert (found.cells, found.not_forecast, found.cost_cells) == (52, 2, 50)
    assert (found.covered, found.with_interval) == (45, 50)
    assert (found.cost, found.null_cost) == pytest.approx(
        (0.105, 0.140), abs=1e-3
    )  # near twins are in the studies
    assert found.cost_floor == pytest.approx(0.044, abs=1e-3)
    assert (found.step, found.null_step) == pytest.approx((0.0039, 0.0033), abs=1e-4)
    assert [one.tau for one in found.rankings] == pytest.approx([0.86, 0.71, 0.33], abs=5e-3)
    assert [one.pairs for one in found.rankings] == [27, 37, 2]
    assert [one.tau_of_pairs for one in found.rankings] == pytest.approx(
        [0.93, 0.95, 0.0], abs=5e-3
    )


@pytest.fixture(scope="module")
def with_one_gpu():
    return calibrate(Study.of(record for folder in EVERY for record in read_study(folder)[0]))


WITH_ONE_GPU = {  # cells, inside, with an interval; errors of the cost, of the null's, of the step
    "condition": (50, 45, 50, 0.109, 0.140, 0.0040),
    "size": (15, 14, 15, 0.116, 0.164, 0.0030),
    "transport": (7, None, 0, 0.131, 0.729, 0.0071),
    "batch": (24, 22, 24, 0.195, 0.426, 0.0121),
    "model": (27, 25, 27, 0.084, 0.378, 0.0018),
}


@pytest.mark.parametrize("way", WITH_ONE_GPU)
def test_with_small_batches_and_other_ways_of_one_gpu_beside_them(way, with_one_gpu):
    """The figures of RESULTS.md. Taken all alike, one GPU's cells of batch 16 and 32 made the first error 42 %, and a cost of
    compiled code that a short window gave as 0.1 ± 6.6 ms made it 12.9 %."""
    found = summary(hold_out(with_one_gpu, way))
    assert (found.cost_cells, found.covered, found.with_interval) == WITH_ONE_GPU[way][:3]
    assert (found.cost, found.null_cost) == pytest.approx(WITH_ONE_GPU[way][3:5], abs=1e-3)
    assert found.step == pytest.approx(WITH_ONE_GPU[way][5], abs=1e-4)


def test_a_batch_that_waits_for_the_cpu_says_nothing_of_others():
    calibration = invented()
    cells = tuple(replace(one, cpu_bound=True) for one in calibration.cells)
    asked = Question(WORKLOAD, 512, OPTIONS, ExchangeWire(DIRECT), 4)
    forecast(calibration, asked)
    with pytest.raises(
        ValueError, match=r"batch_size=512: every batch size that was measured waits for the CPU"
    ):
        forecast(replace(calibration, cells=cells, memo={}), asked)


def costs(said, measured, deviation_ms):
    """A cell whose cost was forecast and measured, in ms."""
    options = (("name", f"{measured}"),)
    question = Question(WORKLOAD, 128, options, ExchangeWire(DIRECT), 4)
    cost = near(measured, deviation_ms, f"{measured}")
    cell = MeasuredCell(question, ("id",), exactly(30.0), cost, None, 0.0, 0.0)
    made = forecast(invented(), Question(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4))
    return HeldOut(cell, replace(made, cost_ms=said))


def test_pairs_that_no_measurement_can_order_count_for_no_order():
    """1.0 and 1.1 ± 0.1 ms may be either way round; 2.0 and 3.0 are told from all others."""
    held = [costs(1.1, 1.0, 0.1), costs(1.0, 1.1, 0.1), costs(2.5, 2.0, 0.1), costs(2.2, 3.0, 0.1)]
    (found,) = summary(held).rankings
    assert (found.cells, found.pairs) == (4, 5)
    assert found.tau == pytest.approx((4 - 2) / 6) and found.tau_of_pairs == pytest.approx(
        (4 - 1) / 5
    )
    assert held[0].floor == pytest.approx(0.8 * 0.1 / 1.0, rel=0.15)  # E|x| is 0.8 σ
    assert held[2].floor == pytest.approx(0.8 * 0.1 / 2.0, rel=0.15)


NO_FORECAST = {
    "": "its YAML has no code: {exchange: …}",
    "json.dumps": "json.dumps is no analysis.prediction.strategies.Exchange",
    "json.nowhere": "json.nowhere: cannot be imported (AttributeError",
    "exchanges_of_tests.broken": "its exchange raised ZeroDivisionError: division by zero",
    "exchanges_of_tests.unsure": "its exchange raised ZeroDivisionError: division by zero",
    "exchanges_of_tests.backwards": "by its exchange a bucket takes -1 ms",
    "exchanges_of_tests.typo": "cannot be imported (ValueError: 'allreduce' is no collective; accepted are all_reduce",
}


@pytest.mark.parametrize("dotted", NO_FORECAST)
def test_a_strategy_that_declares_nothing_usable_has_no_forecast_and_hides_no_other(
    dotted, monkeypatch, tmp_path
):
    of_tests = "from analysis.prediction.strategies import Exchange, by_collective\n"
    typo = 'typo = by_collective("allreduce")' if "typo" in dotted else ""
    broken = "broken = Exchange(lambda question, size, known: [1 / 0])"
    backwards = (
        'backwards = Exchange(lambda question, size, known: [Timed(exactly(-1.0), "measured")])'
    )
    unsure = (
        "unsure = Exchange(lambda question, size, known: [], brings_weights=lambda question: 1 / 0)"
    )
    of_tests += "from analysis.prediction.draws import exactly\nfrom analysis.prediction.links.model import Timed\n"
    (tmp_path / "exchanges_of_tests.py").write_text(
        f"{of_tests}{broken}\n{unsure}\n{backwards}\n{typo}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "exchanges_of_tests", raising=False)
    plain, asked = invented(), Question(WORKLOAD, 160, OPTIONS, ExchangeWire(DIRECT), 4)
    own = replace(asked, options=(("comm_hook", "fp16"), ("name", "own")), exchange=dotted)
    cell = MeasuredCell(own, ("own",), exactly(60.0), exactly(9.0), exactly(8.0), 0.0, 0.0)
    mixed = replace(plain, cells=(*plain.cells, cell))
    with pytest.raises(ValueError, match=re.escape(NO_FORECAST[dotted])):
        forecast(mixed, own)
    if not dotted.endswith((".broken", ".unsure", ".backwards")):  # these show when they are asked
        with pytest.raises(ValueError, match=re.escape(NO_FORECAST[dotted])):
            refuse_unknown_names(["own"], [asked, own])
    assert forecast(mixed, replace(asked, batch_size=128)).step_ms == pytest.approx(
        forecast(plain, replace(asked, batch_size=128)).step_ms, rel=1e-3
    )


def test_a_torn_file_of_another_strategy_costs_no_forecast(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "torn.yaml").write_text("a: [1\nb: }")
    groups.search_also([tmp_path])
    try:
        refuse_unknown_names(["nccl_allreduce"], [])
        with pytest.raises(
            ValueError, match=r"'torn': no forecast knows it; accepted are .*nccl_allreduce"
        ):
            refuse_unknown_names(["torn"], [])
        with pytest.raises(groups.Refused, match=r"torn.yaml, line 2: is no YAML \(expected"):
            groups.choice("strategy", "torn")
    finally:
        groups.search_also([])


LOGGED = [("AllGather", 8), ("AllReduce", 644), *(("AllReduce", size) for size in (
    8196000, 9724160, 17348864, 26255360, 26550272, 28366848, 30257056, 31502336, 102228128))]  # fmt: skip


def test_buckets_by_nccls_log_are_those_of_later_steps():
    """ResNet-50: the first step's plan begins with 8.2 MB, which is below the cap; that of later steps ends with the rest."""
    rows = [{"function": function, "bytes": size} for function, size in LOGGED]
    found = tables.logged_buckets(rows, 102228128.0, 25.0 * 2**20)
    assert found == (30257056, 28366848, 26255360, 17348864)
    assert tables.logged_buckets(rows, 102228128.0 + 4, 25.0 * 2**20) == ()
    assert (
        tables.logged_buckets([{"bytes": "x"}, 3], 1.0, 1.0)
        == tables.logged_buckets(None, 1.0, 1.0)
        == ()
    )


def test_a_strategy_that_fills_its_buckets_alike_has_those_of_the_log(h200):
    """The log is of nccl_allreduce; bf16 halves what is sent."""
    asked = next(one.question for one in h200.cells if one.question.strategy == "kvstore_device")
    assert buckets(h200, asked) == (30257056, 28366848, 26255360, 17348864)
    half = tuple((name, "bf16" if name == "comm_hook" else value) for name, value in asked.options)
    assert buckets(h200, replace(asked, options=half)) == (15128528, 14183424, 13127680, 8674432)
    small = tuple(
        (name, "4.0" if name == "bucket_cap_mb" else value) for name, value in asked.options
    )
    assert len(buckets(h200, replace(asked, options=small))) == 24


def test_contention_with_another_setting_is_that_of_the_same_transport(conditions):
    """γ over host memory with ALGO=Ring is that without the setting, not the published one."""
    (one,) = (one for one in conditions if "ALGO=Ring · P2P_LEVEL=LOC" in one.cell.label)
    assert "that over host memory with other settings" in " ".join(one.forecast.why)
    assert one.forecast.cost_ms == pytest.approx(one.cost_ms, rel=0.05)


def test_contention_over_a_network_follows_that_of_host_memory_by_their_traffic(h200):
    asked = next(
        one for one in hold_out(h200, "transport") if one.cell.question.strategy == "hierarchical"
    )
    assert (
        0 < asked.forecast.contention_ms < 1.0
        and "by the bytes that pass in a second" in " ".join(asked.forecast.why)
    )


def test_four_gpus_from_one_and_two(h200):
    """No record of more than two GPUs, and no link of more, is used. The figures of RESULTS.md."""
    held = hold_out(h200, "size")
    assert {one.cell.ranks for one in held} == {3, 4}
    found = summary(held)
    assert (found.cells, found.not_forecast, found.covered, found.with_interval) == (18, 3, 14, 15)
    assert (found.cost, found.null_cost, found.cost_floor) == pytest.approx(
        (0.114, 0.164, 0.053), abs=1e-3
    )
    assert (found.step, found.null_step) == pytest.approx((0.0030, 0.0032), abs=1e-4)
    assert all(one.forecast.basis == "extrapolated" for one in held if one.forecast)


def test_host_memory_and_a_network_from_nvlink(h200):
    """The steps over other wires, whose exchange alone is known. The figures of RESULTS.md."""
    held = hold_out(h200, "transport")
    memory = summary([one for one in held if one.cell.question.wire.transport == HOST_MEMORY])
    assert (
        memory.cells == 5
        and memory.cost == pytest.approx(0.118, abs=1e-3)
        and memory.null_cost > 0.6
    )
    found = summary(held)
    assert (found.cost, found.cost_floor) == pytest.approx(
        (0.170, 0.020), abs=1e-3
    ) and found.step < 0.006


def test_inception_and_others_from_another_model(h200):
    found = summary(hold_out(h200, "model"))
    assert (found.cells, found.not_forecast, found.covered, found.with_interval) == (52, 25, 25, 27)
    assert (found.cost, found.null_cost) == pytest.approx((0.115, 0.378), abs=1e-3)


def test_collectives_on_four_ranks_from_two(h200):
    errors = collective_errors(h200.known.links)
    assert (
        len(errors) == 56
        and {one.ranks for one in errors} == {4}
        and {one.from_ranks for one in errors} == {2}
    )
    assert (mean_error(errors, True), mean_error(errors, False)) == pytest.approx(
        (0.055, 0.129), abs=1e-3
    )


def test_a_forecast_to_a_thousand_gpus_is_quick():
    """With what it rests on: the records are read, links and held-out cells too."""
    before = time.process_time()
    folders = [
        DATA / "h200_x4" / name
        for name in ("links", "settings", "settings_again", "strategies", "waterfall")
    ]
    calibration = calibrate(
        Study.of(record for folder in folders for record in open_study(folder).records)
    )
    known = scores(hold_out(calibration, "condition"))
    subsets, network = read_subsets("16,64,256,1024", 8), read_network("8x50GB/s,5us")
    asked = questions(calibration, subsets, {}, ["nccl_allreduce"], None, network)
    said = [forecast(calibration, one, known) for one in asked]
    assert time.process_time() - before < 5
    steps = [one.step_ms for one in said]
    assert (
        steps == sorted(steps)
        and said[0].basis == "assumed_network"
        and said[3].low < steps[3] < said[3].high
    )


def test_servers_on_gpus_share_those_of_ranks_where_the_machine_has_no_other(capsys):
    """A forecast for all four GPUs had a server on a fifth one."""
    asked = ["--gpus", "0+1,0+1+2+3", "--strategy", "kvstore_dist_sync_device", "--json"]
    assert main(["predict", str(DATA / "h200_x4" / "strategies"), *asked]) == 0
    shown = json.loads(capsys.readouterr().out)["forecasts"]
    assert shown[0]["forecast"]["basis"] == "extrapolated"
    assert "no cell of it was measured with servers on GPUs of ranks" in shown[1]["refused"]


def test_subsets_and_settings_as_typed():
    assert read_subsets("0,1,2,3", None) == [Subset(4, members=(0, 1, 2, 3))]
    assert read_subsets("0+1,0+3", None) == [Subset(2, members=(0, 1)), Subset(2, members=(0, 3))]
    assert read_subsets("4,16", 8) == [Subset(4), Subset(8, 2)]
    assert read_nccl("P2P_LEVEL=LOC,algo=Ring") == {"NCCL_P2P_LEVEL": "LOC", "NCCL_ALGO": "Ring"}


WRONG = {
    "a study without cells": (["tests"], "no cell has a step time"),
    "no such folder": (["nowhere"], "no such folder"),
    "a GPU twice": (["STUDY", "--gpus", "0,0"], "stands twice"),
    "no number": (["STUDY", "--gpus", "all"], "accepted are GPUs of this machine"),
    "no multiple": (["STUDY", "--gpus", "12", "--per-node", "8"], "no multiple of --per-node 8"),
    "hosts without a network": (["STUDY", "--gpus", "16", "--per-node", "8"], "say --net"),
    "a network without hosts": (
        ["STUDY", "--net", "8x50GB/s,5us"],
        "accepted together with --gpus and --per-node",
    ),
    "a network that is none": (
        ["STUDY", "--gpus", "16", "--per-node", "8", "--net", "fast"],
        "accepted is <NICs",
    ),
    "a word of NCCL's": (["STUDY", "--nccl", "P2P_LEVEL=loc"], "LOC"),
    "a strategy": (["STUDY", "--strategy", "magic"], "accepted are nccl_allreduce"),
    "an unmeasured strategy": (["STUDY", "--strategy", "kvstore_dist_sync"], "kvstore_dist_sync"),
    "a batch": (["STUDY", "--batch", "0"], "accepted are images per GPU"),
    "a spread": (["STUDY", "--gpu-spread", "2x"], "such as 2%"),
    "no setting of NCCL's": (
        ["STUDY", "--nccl", "__class__=x"],
        "--nccl '__class__=x': nccl.__class__=x: unknown",
    ),
    "a setting twice": (["STUDY", "--nccl", "ALGO=Ring,algo=Tree"], "algo stands there twice"),
    "no GPUs": (["STUDY", "--gpus", ""], "--gpus '': accepted are GPUs of this machine"),
    "GPUs that are not there": (
        ["STUDY", "--gpus", "0,1,2,3"],
        "--gpus '0,1,2,3': the machine of the study has no GPU 2; accepted are 0, 1; a number of GPUs needs --per-node",
    ),
    "no batch": (["STUDY", "--batch", ""], "--batch '': accepted are images"),
    "no strategy": (["STUDY", "--strategy", ""], "--strategy '': no forecast knows it"),
    "both": (["STUDY", "--holdout", "size", "--gpus", "0,1"], "asks for others"),
    "nothing to hold out": (["STUDY", "--holdout", "model"], "same model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_sentence(name, capsys, tmp_path):
    arguments, sentence = WRONG[name]
    study = str(DATA / "h200_x2" / "bootcamp_resnet50")
    folder = {"STUDY": study, "tests": str(tmp_path), "nowhere": str(tmp_path / "nowhere")}
    assert main(["predict", *(folder.get(one, one) for one in arguments)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_the_command_says_what_it_rests_on(capsys):
    asked = ["--gpus", "4", "--per-node", "4", "--nccl", "P2P_LEVEL=LOC"]
    assert main(["predict", str(DATA / "h200_x2" / "bootcamp_resnet50"), *asked]) == 0
    said = capsys.readouterr().out
    assert (
        "host memory" in said and "extrapolated" in said and "not enough to state an error" in said
    )


@pytest.mark.parametrize(
    ("without", "device", "said"),
    [
        (
            ("topology",),
            "cuda",
            "the machine of the study has no GPU 9; accepted are 0, 1$",
        ),  # by the driver's list
        (
            ("topology", "gpu"),
            "cuda",
            "the machine of the study has no GPU 9; accepted are 0, 1$",
        ),  # by its cells
        (
            ("topology", "gpu"),
            "cpu",
            "the machine of the study has no CPU worker 9; accepted are 0, 1, 2, .*, 7$",
        ),
    ],
)
def test_gpus_that_are_not_there_are_refused_whatever_tells_of_them(without, device, said):
    study = Study.of(
        replace(
            one,
            cell=replace(one.cell, device=device),
            environment={
                name: value for name, value in one.environment.items() if name not in without
            },
        )
        for one in open_study(DATA / "h200_x2" / "bootcamp_resnet50").records
    )
    with pytest.raises(ValueError, match=said):
        refuse_absent("0,9", read_subsets("0,9", None), study, calibrate(study))


def test_gpus_of_another_machine_of_the_study_are_not_there():
    here, there = (
        open_study(DATA / name / "strategies").records for name in ("h200_x2", "h200_x4")
    )
    fewer = [replace(one, environment=one.environment | {"host": "other"}) for one in there[:4]]
    study = Study.of([*here, *fewer])
    with pytest.raises(
        ValueError,
        match=r"'2,3': .+, where most cells of the study ran, has no GPU 2; accepted are 0, 1$",
    ):
        refuse_absent("2,3", read_subsets("2,3", None), study, calibrate(study))
    refuse_absent("1,0", read_subsets("1,0", None), study, calibrate(study))


def test_the_command_in_json(capsys):
    folders = [str(DATA / "h200_x4" / name) for name in ("links", "settings", "waterfall")]
    assert main(["predict", *folders, "--gpus", "0+1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = found["forecasts"][0]["forecast"]
    assert said["records"] and said["basis"] and said["null_step_ms"] > 50 and said["widest"]
    assert main(["predict", *folders, "--holdout", "condition", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["summary"]["cells"] == len(held["cells"]) and held["summary"]["cost"] < 0.3


def test_one_study_is_read_as_the_reports_read_it():
    study = open_study(DATA / "h200_x4" / "strategies")
    assert len(calibrate(study).several) == sum(one.world_size > 1 for one in study.runs)
