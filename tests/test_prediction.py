"""Forecasts: their equations against cases worked by hand, invented machines, and the command."""

import functools
import heapq
import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from build import DATA, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.commands import predict_cells, terminal_tables
from analysis.commands.predict_cells import read_nccl, read_subsets, refuse_absent
from analysis.console import SafeConsole
from analysis.prediction.calibration_data import (
    CalibrationData,
    MeasuredCell,
    Moments,
    calibrate,
    gradient_curve,
    read_bucket_times,
    read_buckets,
    read_moments,
)
from analysis.prediction.candidates import ForecastRequest, candidates
from analysis.prediction.distributions import constant, mean, normal, scaled_normal
from analysis.prediction.forecast import (
    conformal,
    errors_of,
    forecast,
    held_out_cells,
    hold_out,
    scores_of,
)
from analysis.prediction.link_model import (
    DIRECT,
    HOST_MEMORY,
    NETWORK,
    ExchangeWire,
    LinkModel,
    TimeCurve,
    requested_wire,
    used_wire,
)
from analysis.prediction.query import CellQuery, Subset, Workload
from analysis.prediction.step_model import buckets_of, exchange_times, replay
from analysis.prediction.strategies import EXCHANGES, return_ratio
from analysis.study.study import Study, open_study
from benchmarks.record import read_study
from conf import groups

STUDIES = sorted({path.parent.parent for path in DATA.glob("h200_*/*/*/record.json")})
OF_SEVERAL_GPUS = [path for path in STUDIES if path.parent.name != "h200_x1"]
STRATEGIES = str(DATA / "h200_x4" / "strategies")


def calibrated(folders):
    return calibrate(Study.of(record for folder in folders for record in read_study(folder)[0]))


@pytest.fixture(scope="module")
def h200():
    return calibrated(OF_SEVERAL_GPUS)


# --- equations


def replayed(ready, exchange, end, gamma=0.0):
    values = [[constant(ms) for ms in several] for several in (ready, exchange)]
    return replay(*values, constant(end), constant(0.0), constant(gamma))


def simulated(ready, exchange, end, gamma):
    """Step through the events of one step: compute goes on at rate 1 − γ while an exchange runs."""
    now = done = 0.0
    waiting, marks, queue, running = [], sorted({*ready, end}), list(enumerate(ready)), None
    ended = {}
    while marks or waiting or running:
        rate = 1 - gamma if running else 1.0
        events = [(now + (marks[0] - done) / rate, "mark")] if marks else []
        if running:
            heapq.heappush(events, (running[0], "exchange"))
        at, what = min(events)
        done, now = done + (at - now) * rate, at
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
    played = replayed(ready, exchange, end, gamma)
    backward_end, last = simulated(ready, exchange, end, gamma)
    assert mean(played.step_ms) == pytest.approx(max(backward_end, last), rel=1e-9)
    assert mean(played.contention_ms) == pytest.approx(backward_end - end, abs=1e-9)
    assert mean(played.overlap_ms) * gamma == pytest.approx(backward_end - end, abs=1e-9)
    assert mean(played.tail_ms) == pytest.approx(max(0.0, last - backward_end), abs=1e-9)


def test_a_collective_between_measured_sizes_and_on_more_ranks():
    sizes, times_us = (1e3, 1e6, 1e8), (10.0, 14.0, 510.0)
    links = LinkModel((TimeCurve("all_reduce", ExchangeWire(DIRECT), 2, 1, sizes, times_us, "a"),))
    wire = ExchangeWire(DIRECT)
    assert mean(links.time("all_reduce", 1e6, 2, wire)) == pytest.approx(0.014)
    more_ms = mean(links.time("all_reduce", 1e8, 4, wire))
    assert more_ms == pytest.approx(0.510 * 1.5, rel=0.03)  # 2(n − 1) ÷ n: 1 to 1.5
    with pytest.raises(ValueError, match="host memory was measured"):
        links.time("all_reduce", 1e6, 2, ExchangeWire(HOST_MEMORY))
    with pytest.raises(ValueError, match="between hosts; add a run with nodes="):
        links.time("all_reduce", 1e6, 4, ExchangeWire(NETWORK), hosts=2)


def test_the_wire_of_every_measured_cell_is_known_before_it_runs():
    """NCCL's log agrees with the settings and link class, but for a setting that NCCL ignored."""
    transports = set()
    for record in (record for folder in OF_SEVERAL_GPUS for record in read_study(folder)[0]):
        cell, transport = record.cell, record.effective.get("transport")
        if cell.trains and cell.strategy["name"] == "nccl_allreduce" and transport:
            hosts = len(cell.hosts) or 1
            asked = requested_wire(cell.nccl, record.effective.get("link_class"), hosts)
            ignored = "setting_ignored" in record.validity.codes
            assert (used_wire(transport, asked) == asked) != ignored
            transports.add(asked.transport)
    assert transports == {DIRECT, HOST_MEMORY, NETWORK}
    assert requested_wire({}, "SYS").transport == HOST_MEMORY
    assert requested_wire({"NCCL_P2P_LEVEL": "SYS"}, "SYS").transport == DIRECT


def test_the_conformal_factor_holds_nine_of_ten():
    assert conformal([1.0] * 9 + [7.0]) == 7.0
    assert conformal([float(score) for score in range(1, 100)]) == 90.0


# --- an invented machine, whose truth is known

WORKLOAD = Workload("model", 100e6)
OPTIONS = (("bucket_cap_mb", "25.0"), ("name", "nccl_allreduce"))
ON_FOUR = CellQuery(WORKLOAD, 128, OPTIONS, ExchangeWire(DIRECT), 4)
ALONE = replace(ON_FOUR, options=(("name", "none"),), gpus=1, members=(0,))


def truth(ranks, batch, gb_per_s):
    """A step of a machine that the test invents, its cost and its exchange alone, in ms."""
    base = 10.0 + 0.2 * batch
    sizes = ON_FOUR.assumed_buckets
    times = [0.02 + size * 2 * (ranks - 1) / ranks / gb_per_s / 1e6 for size in sizes]
    shares = np.cumsum(sizes) / sum(sizes)
    played = replayed([base * (1 + 2 * share) / 3 for share in shares], times, base, gamma=0.1)
    step = mean(played.step_ms) + 0.5  # local cost
    return step, step - base, sum(times)


def invented(sizes=(2, 4, 8), batches=(64, 128, 192, 256), workload=WORKLOAD):
    """A calibration of a machine with 10 GB/s, whose steps scatter by 0.1 %."""
    generator = np.random.default_rng(3)
    cells = []
    for batch in batches:
        alone = replace(ALONE, batch_size=batch, workload=workload)
        bare = scaled_normal(10.0 + 0.2 * batch, 0.001, f"alone {batch}")
        local = normal(0.5, 0.01, f"own {batch}")
        with_it = replace(alone, options=OPTIONS)
        cells.append(MeasuredCell(alone, (f"alone {batch}",), bare, between_runs=0.001))
        cells.append(MeasuredCell(with_it, (f"own {batch}",), bare + local, local))
        for ranks in sizes:
            step, cost, exchange = truth(ranks, batch, 10.0)
            step *= 1 + 0.001 * generator.standard_normal()
            query = replace(ON_FOUR, batch_size=batch, gpus=ranks, workload=workload)
            name = f"{ranks} {batch}"
            values = scaled_normal(step, 0.001, name), normal(cost, 0.02, name)
            alone_ms = scaled_normal(exchange, 0.01, name)
            cells.append(MeasuredCell(query, (name,), *values, alone_ms, between_runs=0.001))
    curves = []
    for ranks in sizes:
        measured = (1e3, 1e6, 1e8)
        times = tuple(20 + size * 2 * (ranks - 1) / ranks / 1e4 for size in measured)
        wire = ExchangeWire(DIRECT)
        curves.append(TimeCurve("all_reduce", wire, ranks, 1, measured, times, str(ranks)))
    return CalibrationData(tuple(cells), LinkModel(tuple(curves)))


def with_cell(calibration, cell):
    """The same with one more cell, and what its exchange says of links."""
    curve = gradient_curve(cell)
    curves = calibration.links.curves
    if curve is not None:
        curves = (*curves, curve)
    return CalibrationData((*calibration.cells, cell), LinkModel(curves))


def test_a_link_at_half_its_bandwidth_is_outside_the_interval_and_a_sound_one_inside():
    calibration = invented()
    scores = scores_of(hold_out(calibration, "condition"))
    assert len(scores) == 12
    query = replace(ON_FOUR, batch_size=160)  # a batch that nobody measured
    made = forecast(calibration, query, scores)
    assert made.low is not None and made.low < truth(4, 160, 10.0)[0] < made.high
    assert not made.low < truth(4, 160, 5.0)[0] < made.high
    assert made.cost_ms == pytest.approx(truth(4, 160, 10.0)[1], rel=0.1)
    parts = made.tail_ms + made.contention_ms + made.own_work_ms
    assert parts == pytest.approx(made.cost_ms, abs=1e-6)
    more = forecast(calibration, replace(query, gpus=64), scores)
    assert more.basis == "extrapolated" and more.growth == pytest.approx(1 + math.log(8))
    assert forecast(calibration, ON_FOUR, scores).basis == "interpolated"


def test_no_interval_goes_below_compute_alone():
    """An exchange of which hardly anything is known may take long; no step lacks its compute."""
    calibration, alone = invented(), 10.0 + 0.2 * 128
    hardly = forecast(calibration, replace(ON_FOUR, gpus=64), [30.0] * 12)
    assert 0.6 * alone < hardly.low < alone and hardly.high > 2 * hardly.step_ms
    well = forecast(calibration, ON_FOUR, [1.0] * 12)
    assert well.step_ms - well.low == pytest.approx(well.high - well.step_ms), "nothing is cut"


def test_at_more_gpus_no_interval_reaches_far_above_compute_and_what_is_left_out_is_named():
    """Of 1,024 GPUs the lower end was 108 % of what one GPU gives."""
    calibration = invented()
    scores = scores_of(hold_out(calibration, "condition"))
    for ranks in (8, 64, 1024):
        made = forecast(calibration, replace(ON_FOUR, gpus=ranks), scores)
        assert made.low >= made.compute_ms - 1.645 * made.compute_deviation_ms
        assert made.compute_ms / made.low < 1.01
        left_out = "data loading, stragglers and networks shared"
        assert (left_out in " ".join(made.why)) == (ranks > 8)


@pytest.mark.parametrize(("known", "named"), [(True, False), (False, True)])
def test_a_scatter_that_nobody_measured_is_named(known, named):
    calibration = invented()
    cells = tuple(replace(cell, scatter_known=known) for cell in calibration.cells)
    made = forecast(replace(calibration, cells=cells), ON_FOUR)
    assert ("not measured; 0.3 % of a step is assumed" in " ".join(made.why)) == named


def test_a_batch_size_from_the_others():
    held = hold_out(invented(), "batch")
    assert {result.cell.query.batch_size for result in held} == {64, 128, 192, 256}
    for result in held:  # on a line through two other sizes
        assert result.forecast.step_ms == pytest.approx(result.step_ms, rel=0.02)


SMALL_BATCHES = [
    (model, optimize, batch)
    for model in ("resnet50", "inception_v3")
    for optimize in ("eager", "graph", "compile", "compile_graph")
    for batch in (16, 32, 64)
]
# The launch queue was full at 128 and 256, so that launches waited for the GPU: 45 and 51 ms.
QUEUE_FULL = {("inception_v3", "eager")}


def test_small_batches_are_forecast_from_large_ones():
    """A step takes no less than the CPU needs to enqueue it, the median of what was seen of it."""
    errors = {}
    for result in hold_out(calibrated([DATA / "h200_x1" / "graphs"]), "small"):
        workload, made = result.cell.query.workload, result.forecast
        key = workload.model, workload.requested("optimize"), result.cell.query.batch_size
        errors[key] = made.step_ms / result.step_ms - 1
        is_waiting = "that the CPU needs to launch it" in " ".join(made.why)
        assert is_waiting == (key[1] in ("eager", "compile")), key
        assert made.deviation_ms > 0.15 * made.step_ms or not is_waiting
        assert result.inside or key[:2] not in QUEUE_FULL, "the interval is as wide as that"
    assert set(errors) == set(SMALL_BATCHES)
    missed = {key for key, error in errors.items() if abs(error) > 0.155}
    assert missed == {key for key in SMALL_BATCHES if key[:2] in QUEUE_FULL}


def test_a_forecast_of_more_cells_takes_no_longer():
    """It looked at every pair: 28 s with 10,000 records."""
    taken = []
    for cells in (40, 160):
        calibration = invented(batches=range(8, 8 * cells + 8, 8))
        for gpus in (3, 5):  # the first one makes the index
            query = replace(ON_FOUR, gpus=gpus, batch_size=160)
            lines = steps(forecast, calibration, query)
        taken.append(lines)
    assert taken[1] < 1.1 * taken[0]


def test_an_interval_needs_only_so_many_held_out_cells():
    calibration = invented(batches=range(8, 8 * 25, 8))
    (held,) = held_out_cells(calibration, [ON_FOUR, replace(ON_FOUR, gpus=64)]).values()
    assert len(held) == 36, "half of 72, in the one way that queries of a measured batch need"


def test_launches_of_a_full_queue_count_as_those_of_a_smaller_batch():
    """Inception-v3 at batch 256 launches in 47 % of its step on every host: it waits for the GPU."""
    calibration, small = invented(), replace(ON_FOUR, batch_size=16)
    launches = {64: (40.0,), 128: (44.0,), 192: (50.0,), 256: (36.0,)}
    cells = []
    for cell in calibration.cells:
        of_one = cell.query.ranks == 1 and cell.cost_ms is not None
        cells.append(replace(cell, launch_ms=launches[cell.query.batch_size] if of_one else ()))
    made = forecast(replace(calibration, cells=tuple(cells)), small)
    assert (
        made.compute_ms == 40.0
        and "at least the 40 ms ± 24 % that the CPU needs to launch it (2 measurements)"
        in made.why[0]
    )


def test_a_launch_bounds_a_batch_that_nobody_measured_and_no_other():
    calibration, small = invented(), replace(ON_FOUR, batch_size=16)
    cells = tuple(replace(cell, launch_ms=(30.0, 31.0, 90.0)) for cell in calibration.cells)
    bound = replace(calibration, cells=cells)
    assert forecast(calibration, small).compute_ms == pytest.approx(13.2, rel=0.02)
    made = forecast(bound, small)
    assert (
        made.compute_ms == 31.0
        and "at least the 31 ms ± 62 % that the CPU needs to launch it" in " ".join(made.why)
    )
    for query in (ON_FOUR, replace(ON_FOUR, batch_size=512)):
        plain, longer = forecast(calibration, query), forecast(bound, query)
        assert longer.step_ms == plain.step_ms, "the device takes longer"


@pytest.mark.parametrize(("small", "large"), [(20.0, 18.0), (20.0, 90.0)])
def test_scatter_of_two_batch_sizes_takes_no_step_below_nothing(small, large):
    """A line through two noisy steps fell: a step of −44 ms, or of 0, by which it was divided."""
    alone = replace(ALONE, batch_size=8)
    of_16 = replace(alone, batch_size=16)
    together = replace(of_16, options=OPTIONS, gpus=2, members=(0, 1))
    cells = (
        MeasuredCell(alone, ("8",), constant(small)),
        MeasuredCell(of_16, ("16",), constant(large)),
        MeasuredCell(together, ("2",), constant(large + 4), constant(-2 * large), constant(3.0)),
    )
    calibration = CalibrationData(cells, invented().links)
    for batch, nearest, step in ((1, 8, small), (4, 8, small), (64, 16, large), (4096, 16, large)):
        made = forecast(calibration, replace(alone, batch_size=batch))
        in_proportion = step * batch / nearest
        assert min(step, in_proportion) <= made.step_ms <= max(step, in_proportion)
    several = forecast(calibration, replace(together, batch_size=8))
    assert several.null_step_ms > 0 and several.null_cost_ms < 0


def test_a_batch_that_waits_for_the_cpu_says_nothing_of_others():
    calibration, query = invented(), replace(ON_FOUR, batch_size=512)
    forecast(calibration, query)
    cells = tuple(replace(cell, cpu_bound=True) for cell in calibration.cells)
    with pytest.raises(ValueError, match=r"batch_size=512: with every measured batch size"):
        forecast(replace(calibration, cells=cells), query)


def test_a_slow_gpu_is_forecast_as_slow():
    calibration = invented(sizes=(2,))
    for gpu, step in ((0, 35.6), (1, 35.6), (2, 40.0)):
        alone = replace(ALONE, members=(gpu,))
        calibration = with_cell(calibration, MeasuredCell(alone, (f"{gpu}",), constant(step)))
    quick, slow = (
        forecast(calibration, replace(ON_FOUR, gpus=2, members=members)).compute_ms
        for members in ((0, 1), (0, 2))
    )
    assert quick == pytest.approx(35.6, rel=0.01) and slow == pytest.approx(40.0)


def test_few_cells_claim_no_error():
    calibration = invented(sizes=(2, 4))  # eight can be held out
    held = hold_out(calibration, "condition")
    made = forecast(calibration, ON_FOUR, scores_of(held))
    assert made.low is None and "and there are 8" in " ".join(made.why)
    assert all(result.inside is None for result in held) and errors_of(held)["covered"] is None


def hooked(hook, name="nccl_allreduce", workload=WORKLOAD):
    """The query of 128 images on two GPUs with a hook."""
    options = {"bucket_cap_mb": "25.0", "comm_hook": hook, "name": name}
    return CellQuery(workload, 128, tuple(sorted(options.items())), ExchangeWire(DIRECT), 2)


def test_powersgd_has_no_forecast_and_says_nothing_of_links():
    """It sends matrices whose sizes no record holds."""
    with pytest.raises(ValueError, match="comm_hook=powersgd sends matrices of a low rank"):
        forecast(invented(), hooked("powersgd"))
    study = open_study(DATA / "h200_x4" / "strategies")
    records = []
    for record in study.records:
        cell = replace(record.cell, strategy={**record.cell.strategy, "comm_hook": "powersgd"})
        record_id = record.record_id[::-1]
        records.append(replace(record, record_id=record_id, cell=cell, cell_key=cell.key))
    both = calibrate(Study.of([*study.records, *records]))
    assert len(both.cells) == len(calibrate(study).cells)


def test_a_half_precision_hook_halves_no_gradients_in_2_bytes():
    in_2_bytes = replace(WORKLOAD, rest=(("precision", "bf16_weights"),))
    assert [hooked(hook).sent_bytes for hook in ("none", "fp16", "bf16")] == [100e6, 50e6, 50e6]
    assert hooked("bf16", workload=in_2_bytes).sent_bytes == 100e6
    assert sum(hooked("bf16", workload=in_2_bytes).assumed_buckets) == 100e6


@pytest.mark.parametrize(
    ("cap", "mib"),
    [("25.0", [25] * 3 + [25.4]), ("[1, 4.5, 50]", [1, 4.5, 50, 44.9]), ("[1, 400, 2]", [1, 99.4])],
)
def test_each_bucket_is_as_full_as_its_own_size(cap, mib):
    query = hooked("none", workload=replace(WORKLOAD, gradient_bytes=100.4 * 2**20))
    query = replace(query, options=(("bucket_cap_mb", cap), ("name", "nccl_allreduce")))
    assert [size / 2**20 for size in query.assumed_buckets] == pytest.approx(mib)


@pytest.mark.parametrize(
    ("hook", "alone_ms", "there", "back"), [("none", 1.6, 0.8, 0.8), ("bf16", 0.8, 0.4, 0.8)]
)
def test_weights_come_back_unhalved_and_once_all_gradients_are_there(hook, alone_ms, there, back):
    """Alone, gradients go both ways; in a step weights of 4 bytes come back after the last one."""
    query = hooked(hook, "kvstore_device")
    steps = constant(38.0), constant(2.0), constant(alone_ms)
    calibration = with_cell(invented(), MeasuredCell(query, ("a",), *steps, between_runs=0.001))
    during, after = exchange_times(calibration, query)
    assert mean(sum(during)) == pytest.approx(there, rel=0.02)
    assert mean(after) == pytest.approx(back, rel=0.02)
    tail_ms = forecast(calibration, query).tail_ms
    assert tail_ms == pytest.approx(back + mean(during[-1]), rel=0.02)


@pytest.mark.parametrize(
    ("optimize", "overlap"),
    [("eager", True), ("graph", True), ("compile", False), ("max_graph", False)],
)
def test_gradients_of_a_compiled_backward_leave_at_its_end_but_for_those_of_ddp(optimize, overlap):
    workload = replace(WORKLOAD, rest=(("optimize", optimize),))
    query = hooked("none", "kvstore_device", workload)
    steps = constant(40.0), constant(4.0), constant(1.6)
    cell = MeasuredCell(query, ("a",), *steps, between_runs=0.001)
    calibration = with_cell(invented(workload=workload), cell)
    during, after = exchange_times(calibration, query)
    hidden_ms = mean(sum(during, after)) - forecast(calibration, query).tail_ms
    assert (hidden_ms > 0.3) == overlap
    if not overlap:
        assert hidden_ms == pytest.approx(0.0, abs=1e-9)
    of_ddp = replace(ON_FOUR, workload=workload, gpus=2)
    during, _ = exchange_times(calibration, of_ddp)
    assert forecast(calibration, of_ddp).tail_ms < 0.5 * mean(sum(during))


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({"name": "cpu_staged", "optimizer_on": "cpu"}, 2.0),
        ({"name": "cpu_staged", "optimizer_on": "gpu"}, 1.0),
        ({"name": "kvstore_dist_sync"}, 2.0),
        ({"name": "kvstore_dist_async_device"}, 2.0),
        ({"name": "hierarchical"}, 1.0),
        ({"name": "nccl_allreduce"}, 1.0),
    ],
)
def test_strategies_bring_weights_or_gradients_back(options, ratio):
    options = tuple(sorted({"comm_hook": "fp16", **options}.items()))
    assert return_ratio(replace(ON_FOUR, options=options)) == ratio


def test_cpu_workers_are_not_called_gpus():
    on_cpu = replace(WORKLOAD, rest=(("device", "cpu"),))
    calibration = invented(sizes=(2, 4), batches=(64, 128), workload=on_cpu)
    query = replace(ON_FOUR, workload=on_cpu, gpus=8)
    assert not any("GPU" in words for words in forecast(calibration, query).why)
    with pytest.raises(ValueError, match=r"strategy=.+ add a run of .+ on one CPU work"):
        forecast(calibration, replace(query, options=(("name", "kvstore_device"),)))


# --- a strategy of the user's own


def test_every_strategy_of_ringside_has_a_row():
    refused = {"fsdp", "hsdp", "zero2"}  # what a gather hides is not modelled
    assert {*EXCHANGES, *refused} == set(groups.choices("strategy"))


def test_an_own_strategy_is_forecast_by_what_its_yaml_says_that_it_sends():
    """`ring` is an all-reduce after backward; anything else has no forecast and hides no other."""
    plain = invented()
    own = replace(ON_FOUR, options=(("comm_hook", "fp16"), ("name", "own")), sends="ring")
    cell = MeasuredCell(own, ("own",), constant(60.0), constant(9.0), constant(8.0))
    mixed = with_cell(plain, cell)
    during, _ = exchange_times(mixed, own)
    assert forecast(mixed, own).tail_ms == pytest.approx(mean(sum(during)))
    alone = forecast(plain, ON_FOUR).step_ms
    assert forecast(mixed, ON_FOUR).step_ms == pytest.approx(alone, rel=1e-3)
    for sends in ("", "two_rings"):
        with pytest.raises(ValueError, match="it is not known how own sends gradients: its YAML"):
            forecast(mixed, replace(own, sends=sends))


# --- what a calibration measured (benchmarks/training/calibration)

QUIET = {"exchange": False, "ready_ms": [20.0, 58.0], "backward_ms": 58.0, "update_ms": 60.0}
BUSY = {"exchange": True, "ready_ms": [20.0, 60.0], "backward_ms": 61.0, "update_ms": 63.0}
EXCHANGED = [{"bytes": 6e7, "ms": 6.0}, {"bytes": 4e7, "ms": 4.0}]
TABLES = {
    "buckets": {"rows": [{"bytes": 6e7}, {"bytes": 4e7}]},
    "timeline": {"rows": [QUIET, BUSY]},
    "bucket_exchange": {"operation": "all_reduce", "rows": EXCHANGED},
}


def test_tables_of_a_calibration_are_read_and_count():
    moments = Moments((20.0, 58.0), 58.0, 60.0)
    assert read_buckets(TABLES) == (6e7, 4e7) and read_moments(TABLES) == moments
    assert read_bucket_times(TABLES) == {4e7: 4000.0, 6e7: 6000.0}
    calibration = invented()
    cells = []
    for cell in calibration.cells:
        if cell.query.ranks == 4:
            cell = replace(cell, buckets=(6e7, 4e7), moments=moments)
        cells.append(cell)
    with_them = replace(calibration, cells=tuple(cells))
    query = replace(ON_FOUR, batch_size=256)
    assert buckets_of(with_them, query) == (6e7, 4e7)
    half = replace(query, options=(*OPTIONS, ("comm_hook", "bf16")))
    assert buckets_of(with_them, half) == (3e7, 2e7)
    made, before = forecast(with_them, query), forecast(calibration, query)
    assert made.tail_ms > 1.2 * before.tail_ms  # the last bucket is larger and comes late


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"timeline": None, "buckets": 3},
        {"timeline": {"rows": ["x", {"exchange": False, "ready_ms": [None]}]}},
        {"buckets": {"rows": [{"bytes": None}]}, "bucket_exchange": {"rows": 3}},
        {"buckets": {"rows": [{"bytes": 10**400}]}},
        {"timeline": {"rows": [QUIET | {"ready_ms": [1], "backward_ms": 3, "update_ms": 2}]}},
    ],
)
def test_tables_that_are_not_there_are_none(damaged):
    assert read_moments(damaged) is None and read_buckets(damaged) == ()
    assert read_bucket_times(damaged) == {}


def test_a_bucket_that_was_timed_with_unhalved_weights_is_one_of_more_bytes():
    """bf16: 1 MB to the ranks and 2 MB back are timed in the cell as a bucket of 1 MB."""
    options = {"name": "kvstore_device", "bucket_cap_mb": 25.0, "reduce": "sharded"}
    options["comm_hook"] = "bf16"
    records = read_study(DATA / "h200_x4" / "strategies")[0]
    (record,) = (record for record in records if record.cell.strategy == options)
    rows = [{"bytes": 1e6, "ms": 0.1}]
    table = {"operation": "reduce_scatter + all_gather", "rows": rows}
    study = Study.of([replace(record, tables={"bucket_exchange": table})])
    (curve,) = (curve for curve in calibrate(study).links.curves if not curve.of_gradients)
    assert curve.sizes_bytes == (1.5e6,) and curve.times_us == (100.0,)


def test_collectives_in_registered_memory_say_nothing_of_plain_ones():
    trained = read_study(DATA / "h200_x4" / "strategies")[0]
    curves = []
    for memory in ({}, {"memory": "registered"}):
        records = list(trained)
        for record in read_study(DATA / "h200_x4" / "links")[0]:
            cell = replace(record.cell, benchmark=record.cell.benchmark | memory)
            records.append(replace(record, cell=cell))
        curves.append(len(calibrate(Study.of(records)).links.curves))
    assert curves[1] == len(calibrate(Study.of(trained)).links.curves) < curves[0]


# --- committed studies; the golden net (holdout.txt) has the figures of the README


def test_contention_over_a_network_follows_that_of_host_memory_by_their_traffic(h200):
    held = hold_out(h200, "transport")
    (result,) = (result for result in held if result.cell.query.strategy == "hierarchical")
    assert 0 < result.forecast.contention_ms < 1.0
    assert "in proportion to the bytes per second" in " ".join(result.forecast.why)


def test_a_forecast_to_a_thousand_gpus_is_quick():
    """With what it rests on: the records are read, links and held-out cells too."""
    before = time.process_time()
    names = ("links", "settings", "settings_again", "strategies", "waterfall")
    calibration = calibrated([DATA / "h200_x4" / name for name in names])
    scores = scores_of(hold_out(calibration, "condition"))
    subsets = read_subsets("16,64,256,1024", 1024)
    request = ForecastRequest(subsets=subsets, strategies=["nccl_allreduce"])
    (several,) = candidates(calibration, request).values()
    made = [forecast(calibration, candidate.query, scores) for candidate in several]
    assert time.process_time() - before < 5
    steps = [prediction.step_ms for prediction in made]
    assert steps == sorted(steps) and made[3].low < steps[3] < made[3].high


# --- the command


def test_subsets_and_settings_as_typed():
    assert read_subsets("0,1,2,3", None) == [Subset(4, members=(0, 1, 2, 3))]
    assert read_subsets("0+1,0+3", None) == [Subset(2, members=(0, 1)), Subset(2, members=(0, 3))]
    assert read_subsets("4,16", 8) == [Subset(4), Subset(8, 2)]
    assert read_nccl("P2P_LEVEL=LOC,algo=Ring") == {"NCCL_P2P_LEVEL": "LOC", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("without", "device", "sentence"),
    [
        (("topology",), "cuda", "of the study has no GPU 9; expected 0, 1$"),
        (("topology", "gpu"), "cuda", "of the study has no GPU 9; expected 0, 1$"),
        (("topology", "gpu"), "cpu", "has no CPU worker 9; expected 0, 1, 2, .*, 7$"),
    ],
)
def test_gpus_that_are_not_there_are_refused_whatever_tells_of_them(without, device, sentence):
    """By the driver's list, or by the cells alone."""
    records = []
    for record in open_study(DATA / "h200_x2" / "bootcamp_resnet50").records:
        facts = {name: fact for name, fact in record.environment.items() if name not in without}
        records.append(replace(record, cell=replace(record.cell, device=device), environment=facts))
    study = Study.of(records)
    with pytest.raises(ValueError, match=sentence):
        refuse_absent("0,9", read_subsets("0,9", None), study, calibrate(study))


def test_gpus_of_another_machine_of_the_study_are_not_there():
    here, there = (
        open_study(DATA / name / "strategies").records for name in ("h200_x2", "h200_x4")
    )
    fewer = []
    for record in there[:4]:
        fewer.append(replace(record, environment=record.environment | {"host": "other"}))
    study = Study.of([*here, *fewer])
    calibration = calibrate(study)
    with pytest.raises(
        ValueError, match=r"forecasts are for the machine of .*, which has no GPU 2; .* 1$"
    ):
        refuse_absent("2,3", read_subsets("2,3", None), study, calibration)
    refuse_absent("1,0", read_subsets("1,0", None), study, calibration)


OF_HOSTS = ["--gpus", "4,64", "--per-node", "8", "--net", "8x50GB/s,5us"]


@pytest.mark.parametrize("arguments", [["--details"], ["--holdout", "size"]])
def test_no_number_and_no_heading_is_cut_at_any_width(monkeypatch, capsys, arguments):
    """At 80 columns every rate was cut: `74,…`."""
    tables, show = [], terminal_tables.print_table
    monkeypatch.setattr(predict_cells, "print_table", tables.append)
    assert main(["predict", *map(str, OF_SEVERAL_GPUS), *arguments]) == 0
    capsys.readouterr()
    for width in (60, 80, 100, 140):
        monkeypatch.setattr(terminal_tables, "console", functools.partial(SafeConsole, width=width))
        show(tables[0])
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width and "…" not in shown
        for column, values in zip(
            tables[0].columns, zip(*tables[0].rows, strict=True), strict=True
        ):
            assert column.heading in shown
            for text in itertools.chain(*map(column.texts, values)):
                assert column.is_text or text in shown


def test_no_efficiency_is_above_100_percent(capsys):
    """Of the same strategy on one GPU: 101 to 103 % were left."""
    command = ["predict", *map(str, OF_SEVERAL_GPUS), *OF_HOSTS, "--json"]
    assert main(command) == 0
    bounded = 0
    for answer in json.loads(capsys.readouterr().out)["forecasts"]:
        made = answer.get("forecast")
        if made and made["low"] is not None:
            alone_ms = made["efficiency"] * made["step_ms"]
            assert made["low"] >= alone_ms * (1 - 1e-12) or made["efficiency"] > 1
            bounded += made["low"] == pytest.approx(alone_ms)
    assert bounded > 3
