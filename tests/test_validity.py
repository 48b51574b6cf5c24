"""Every check fires on a planted fault and on no clean record; baselines take only what may be.

Clean records are real ones: four H200s, tests/data/h200_x4.
"""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
from build import changed_cell, make_record

from analysis.findings.baselines import Baselines
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.study import Study
from analysis.validity import results
from analysis.validity.checks import CHECKS, judge, judged
from benchmarks import record as records
from benchmarks.record import CellFolder, Validity
from conf.schema import ValidityLimits

DATA = Path(__file__).parent / "data" / "h200_x4"
STUDIES = [path for path in sorted(DATA.iterdir()) if path.is_dir()]
REAL = [record for path in STUDIES for record in records.read_study(path)[0]]
STILL = dict.fromkeys(("drift", "drift_beyond", "change", "change_beyond"), 0.0)
STEADY = {
    "stationarity": STILL | {"change_at": 30.0},
    "stationarity_in_windows": STILL | {"change_at": 30.0},
    "windows_repeated": 0,
    "iterations_missing": 0,
    "unseen_share": 0.005,
    "slower_than_warmup": 0.009,
    "grid_ms": 0.0,
    "versions_differ": {},
    "pauses": {"count": 0.0, "lost_share": 0.0, "longest_ms": 55.0},
    "slowest_rank": {"rank": 1, "share": 0.0, "noise": 0.0},
    "unaccounted_share": 0.0,
    "cpu_samples": {"cores": 64, "others_share": {"timed": 0.001}},
    "gpu_windows": [{"grown_bytes": 0, "foreign_bytes": 0, "processes": 0, "busy_percent": 100.0}],
}
LIMITS = ValidityLimits()
WORK = [(part, fact) for part, nouns in results.WORK_OF_A_STEP.items() for fact in nouns]
# NCCL's log was there, and nothing is wrong.
SEEN = {"nccl": {"settings": {}, "transports": {"0->1": ["P2P/CUMEM"]}, "channels": {}}}


def with_facts(record):
    """A record of an older version with the facts that ranks find today, all of them right."""
    gradient_bytes = record.model["gradient_bytes"]
    facts = {
        "batches_differ": True,
        "batches_in_turn": 2,
        "arithmetic": {"autocast": "bfloat16", "layers": {"bfloat16": 54}, "tf32": False},
        "weights_still": 0,
        "trained_bytes": gradient_bytes,
        "exchanged_bytes": gradient_bytes,
        "exchange_error": 0.0,
        "exchange_tolerance": 2.4e-7,
        "gradient_worst": {"array": "fc.bias", "error": 3e-8, "tolerance": 2.4e-7},
    }
    facts["arithmetic"] |= {"images": record.cell.batch_size, "elements": 9, "evaluating": 0}
    facts["arithmetic"] |= {"calls": 4, "passes": 4 * 53}
    facts |= {"gradients_equal": True, "sent": {"collectives": 4, "bytes": 9, "order": "a"}}
    gradient = {name: fact for name, fact in record.checks.items() if "gradient_" in name}
    after = {"updates": 2, "steps": 2, **gradient, **copy.deepcopy(facts)}
    steps = int(record.metrics.get("step/iterations", 0))
    steps = record.cell.world_size * (steps + len(record.series.get(IMAGES_PER_SECOND, ())))
    counted = {"steps": steps, "images": steps * record.cell.batch_size, "updates": steps}
    counted |= {"collectives": 4 * steps, "passes": 53 * steps}
    few = {"steps": 10, "images": 9, "updates": 10, "collectives": 40}
    facts |= {"after": after, "counted": {"timed": counted, "warm-up": few}}
    metrics = record.metrics | {"comm/ideal_ratio": 0.9}
    checks = record.checks | STEADY | facts
    version = records.SCHEMA_VERSION
    return dataclasses.replace(record, checks=checks, metrics=metrics, schema_version=version)


def is_a_pair(record):
    cell = record.cell
    trained = cell.trains and record.state == "finished"
    return trained and cell.gpus == (0, 1) and "gpu_samples" in record.checks


PAIR = with_facts(next(filter(is_a_pair, REAL)))


def changed(change, record=PAIR):
    """A deep copy of a record after `change(copy)`."""
    made = copy.deepcopy(record)
    change(made)
    return made


def put(part, **values):
    """A change of some values of a part: put("checks.arithmetic", tf32=True)."""

    def change(record):
        name, *inner = part.split(".")
        content = getattr(record, name)
        for key in inner:
            content = content[key]
        content.update(values)

    return change


def drop(part, name):
    return lambda record: getattr(record, part).pop(name)


def metrics(**values):
    """A change of metrics, `/` written as `__`."""
    return put("metrics", **{name.replace("__", "/"): value for name, value in values.items()})


def steady(part, **values):
    return put("checks", **{part: STEADY[part] | values})


def samples(**values):
    return put("checks.gpu_samples", **values)


def windows(**values):
    return put("checks", gpu_windows=[STEADY["gpu_windows"][0] | values])


def own_model(record):
    """A user's own model, one of whose layers computes in float32."""
    asked(record, model={"library": "python"})


def together(*changes):
    def change(record):
        for each in changes:
            each(record)

    return change


def cell(**fields):
    return lambda record: asked(record, **fields)


def asked(record, **fields):
    object.__setattr__(record, "cell", changed_cell(record.cell, **fields))


def fewer_collectives(record, count):
    record.checks["counted"]["timed"]["collectives"] -= count


def test_a_lead_in_after_steps_without_exchange_may_have_fewer_collectives():
    lead_ins = 2 * len(PAIR.series[IMAGES_PER_SECOND])
    record = changed(lambda r: fewer_collectives(r, 4 * lead_ins))
    assert "steps_changed" not in judge(record, LIMITS).codes


def test_each_micro_step_passes_through_the_model():
    record = changed(cell(accumulate=4))
    assert "passes" in judge(record, LIMITS).codes["steps_changed"]
    record.checks["counted"]["timed"]["passes"] *= 4
    assert "passes" not in judge(record, LIMITS).codes.get("steps_changed", "")


def test_a_cut_list_of_faults_says_that_it_is_cut():
    wrong = {f"0->{gpu} enabled, 16 bytes": 1 for gpu in range(1, 5)}
    found = judge(changed(put("checks", copies_compared=4, copies_wrong=wrong)), LIMITS).codes
    assert "0->3" in found["copy_wrong"] and "0->4" not in found["copy_wrong"]
    assert found["copy_wrong"].endswith("; …")


def test_where_nobody_looked_after_timed_steps_the_check_says_so():
    found = judge(changed(drop("checks", "after")), LIMITS).codes
    assert found["steps_changed"].endswith(": nobody looked after them")


def scaled(factor, *names):
    def change(record):
        for name in names:
            record.metrics[name] *= factor

    return change


def loader(cost_share, low):
    """A cell with a data loader of a cost that is known so well."""
    return together(
        cell(data={"name": "mine", "loader": "my_data:load", "options": {}}),
        metrics(data__cost_ms=5.0, data__cost_share=cost_share, data__wait_ms=6.0),
        put("within_run", **{"data/cost_ms": {"low": low, "high": 10.0 - low, "groups": 3}}),
    )


REPLAY = {"what": "gradient", "exchange": True, "array": "conv1", "error": 0.0, "tolerance": 1e-6}


def graphed(**facts):
    """A cell whose steps are replays of CUDA graphs, with these facts."""
    right = {"replay": REPLAY, "replays": [[90, 90], [90, 90]]}
    return together(cell(optimize="graph"), put("checks", **{**right, **facts}))


def compiled(**facts):
    return together(cell(optimize="compile"), put("checks", **facts))


def between_steps(share, ms):
    facts = {"between_steps_share": share, "between_steps_ms": ms}
    return together(cell(device="cpu"), put("checks", **facts))


PHASE = {
    "samples": 4, "throttle_reasons": [], "power_capped_share": [0.0, 0.0],
    "sm_mhz": [1980.0, 1880.0], "free_sm_mhz": [1980.0, 1980.0], "most_free_sm_mhz": [1980, 1980],
    "grown_bytes": 0, "foreign_bytes": 0,
}  # fmt: skip


def met(fault):
    """A change: the cell is on two hosts and its ranks met; `fault` changes the rows of who met."""

    def plant(record):
        asked(record, gpus=(0,), hosts=("a", "b"))
        rows = []
        for number, rank in enumerate(record.ranks):
            rank.update(node="ab"[number], pid=100 + number)
            rows.append([number, rank["node"], rank["pid"], rank["uuid"]])
        record.checks["peers"] = rows
        fault(rows)

    return plant


def forecast_of(low, high, level=0.9, made_before_s=1.0):
    """A step that was forecast before the cell began, with ends as shares of what was measured."""

    def change(record):
        step_ms = record.metrics["step/ms_median"]
        ends = {"low": low * step_ms, "high": high * step_ms, "level": level}
        said = {"step_ms": (low + high) / 2 * step_ms, "null_step_ms": step_ms}
        record.predicted.update(ends | said | {"made_at": record.started_at - made_before_s})

    return change


def miscounted(record):
    """One image is missing, in the rates too."""
    images = record.metrics["throughput/images"] - 1
    rate = images / record.metrics["throughput/seconds"]
    record.metrics.update({"throughput/images": images, IMAGES_PER_SECOND: rate})
    record.metrics[f"{IMAGES_PER_SECOND}_per_gpu"] = rate / 2


def one_more_iteration(record):
    record.metrics["step/iterations"] += 1


def other_ranks(record):
    record.ranks.reverse()
    for number, rank in enumerate(record.ranks):
        rank["rank"] = number


def other_host(record):
    met(lambda rows: rows[1].__setitem__(1, "a"))(record)
    record.ranks[1]["node"] = "a"  # as it met, and not as planned


def entry(value):
    return put("tables", p2p={"matrices": {"latency_gpu_enabled": [[1.0, value], [2.0, 3.0]]}})


def nccl_used(channels, *transports, **others):
    """What NCCL's log says of the connection of both ranks."""
    log = {"transports": {"0->1": list(transports)}, "channels": {"collective": channels}}
    return put("effective", nccl=log | {"settings": {}} | others)


def links(link_class):
    return lambda record: record.environment.update(links={"0-1": link_class})


BUSBW, ALGBW, MOVED = "comm/busbw_gb_per_s", "comm/algbw_gb_per_s", "comm/bytes_moved"
RATE = PAIR.metrics[IMAGES_PER_SECOND]
GIB = 1e9 / 2**30
NAN, INF = math.nan, math.inf
SYNCHRONISING = ("accumulated_nothing", "weights_not_average")  # of cells in test_synchronising
PLANTED = {
    "wrong_peers": [
        met(lambda rows: rows[1].__setitem__(1, "c")),  # of another host
        met(lambda rows: rows[1].__setitem__(2, 7)),  # another process
        met(lambda rows: rows[0].__setitem__(3, "GPU-other")),
        met(lambda rows: rows.append([2, "c", 9, None])),  # a stranger
        met(lambda rows: rows.pop()),
        met(lambda rows: rows[0].__setitem__(0, 1)),  # two of one number
        other_host,
    ],
    "missing_rank": [
        lambda r: r.ranks.pop(),
        lambda r: r.ranks[0].update(done=False),
        lambda r: r.ranks.clear(),
    ],
    "wrong_gpu": [
        lambda r: r.ranks[1].update(uuid="GPU-other"),
        other_ranks,
        lambda r: r.ranks[0].pop("uuid"),
    ],
    "replicas_differ": [put("checks", replicas_equal=False)],
    "gradient_not_mean": [
        *(put("checks", gradient_error=error) for error in (1.0, NAN, INF)),
        *(put("checks.gradient_worst", error=error) for error in (2.5e-7, NAN)),
        put("checks.after", gradient_error=1.0),
        put("checks.after.gradient_worst", error=1.0),
    ],
    "bytes_miscounted": [
        lambda r: r.checks.update(exchanged_bytes=r.checks["exchanged_bytes"] - 4),
        lambda r: r.model.update(gradient_bytes=2 * r.model["gradient_bytes"]),
        scaled(GIB, ALGBW),
        scaled(GIB, BUSBW),
        scaled(2, BUSBW, MOVED),
    ],
    "batches_not_distinct": [
        put("checks", batches_differ=False),
        put("checks", batches_in_turn=1),
        put("checks.after", batches_in_turn=1),
    ],
    "precision_not_used": [
        put("checks.arithmetic", autocast=None),
        put("checks.arithmetic", autocast="float16"),
        put("checks.arithmetic", layers={"bfloat16": 51, "float32": 3}),
        put("checks.arithmetic", tf32=True),
        put("checks.after.arithmetic", tf32=True),
    ],
    "steps_changed": [
        put("checks.counted.timed", passes=1),
        put("checks.counted.timed", updates=1),
        put("checks.counted.timed", collectives=1),
        lambda r: fewer_collectives(r, 1 + 4 * 2 * len(r.series[IMAGES_PER_SECOND])),
        put("checks.arithmetic", evaluating=1),
        put("checks.after", gradients_equal=False),
        put("checks.after", updates=1),
        drop("checks", "after"),
        *(put(f"checks.after.{part}", **{fact: 1}) for part, fact in WORK),
    ],
    "samples_cut": [put("checks", equal_longest=3)],
    "not_compiled": [compiled(graphs=0, timed_graphs=0)],
    "compiled_while_timed": [compiled(graphs=5, timed_graphs=1)],
    "graph_differs": [
        graphed(replay=REPLAY | {"error": 1.1e-6}),
        graphed(replay=REPLAY | {"error": NAN}),
        graphed(replay=REPLAY | {"what": "weights", "exchange": False, "error": 1.0}),
    ],
    "replays_miscounted": [
        graphed(replays=[[90, 91], [90, 90]]),
        graphed(replays=[[90, 90], [91, 91]]),
        graphed(replays=[[0, 0], [0, 0]]),
        graphed(replays=[[9, 9], [9, 8]]),
    ],
    "weights_still": [
        put("checks", weights_still=1, weights_still_share=1e-5, weights_still_first="fc.bias")
    ],
    "faster_than_reference": [metrics(comm__ideal_ratio=1.21)],
    "time_between_steps": [between_steps(0.021, 1.05), between_steps(-0.021, -1.05)],
    "exchange_wrong": [
        put("checks", exchange_error=1.1e-4, exchange_tolerance=1e-4),
        put("checks", exchange_error=NAN, exchange_tolerance=1e-4),
        put("checks", exchange_error=INF, exchange_tolerance=8e-3),
    ],
    "copy_wrong": [put("checks", copies_compared=4, copies_wrong={"0->1 enabled, 16 bytes": 3})],
    "entry_not_positive": [entry(value) for value in (0.0, -1.0, NAN, INF, None)],
    "wrong_elements": [put("checks", wrong_elements=1, wrong_bytes=[1024])],
    "solution_differs": [
        put("checks", solution_difference=difference, solution_tolerance=1e-6)
        for difference in (1.1e-6, NAN)
    ],
    "loss_not_finite": [put("checks", losses=losses) for losses in ([2.0, NAN], [-INF, 2.0])],
    "clocks_disagree": [put("checks", clock_disagreement=share) for share in (0.011, NAN)],
    "images_miscounted": [miscounted, one_more_iteration, put("checks.counted.timed", images=1)],
    "efficiency_above_one": [metrics(scaling__efficiency=1.03)],
    "slower_together": [metrics(scaling__efficiency=0.97)],
    "foreign_load": [
        samples(foreign_pids=[4711]),
        samples(before_memory_bytes=3 * 2**30),
        samples(before_busy_percent=50),
    ],
    "foreign_load_timed": [windows(processes=1), windows(foreign_bytes=2**29)],
    "throttled": [samples(throttle_reasons=["0x40"])],
    "foreign_cpu": [
        put("checks", cpu_samples={"cores": 32, "others_share": {"timed": 0.11, "exposed": 0.0}})
    ],
    "setting_not_asked": [put("effective", nccl={"settings": {"NCCL_P2P_LEVEL": "LOC"}})],
    "transport_below_wires": [
        nccl_used(24, "SHM/direct/direct"),
        nccl_used(24, "P2P/CUMEM", "NET/Socket/0"),
        nccl_used(12, "P2P/CUMEM"),
    ],
    "path_not_engaged": [
        put("tables", fast_paths={"rows": [{"rank": 0, "fused": True, "fused_updates": 0}]})
    ],
    "clocks_differ": [samples(phases={"timed": PHASE})],
    "noisy": [put("checks", half_width=0.06)],
    "cpu_bound": [metrics(gpu__idle_share=0.3)],
    "too_few_iterations": [put("checks", iterations=1)],
    "warmup_not_flat": [put("checks", warmup_flat=False)],
    "reference_exceeded": [metrics(comm__ideal_ratio=1.06), metrics(comm__ideal_ratio=1.2)],
    "not_stationary": [
        steady("stationarity", change=0.011, change_beyond=1.1),
        steady("stationarity", drift=-0.011, drift_beyond=1.1),
    ],
    "windows_not_stationary": [
        steady("stationarity_in_windows", change=0.011, change_beyond=1.1),
        steady("stationarity_in_windows", drift=-0.011, drift_beyond=1.1),
    ],
    "cost_negative": [
        together(
            put("metrics", **{"strategy/cost_ms": -0.4}),
            put("within_run", **{"strategy/cost_ms": {"low": -0.5, "high": -0.3}}),
        )
    ],
    "slower_than_warmup": [put("checks", slower_than_warmup=share) for share in (0.031, NAN)],
    "windows_too_short": [put("checks", unseen_share=share) for share in (0.016, NAN)],
    "samples_rounded": [put("checks", grid_ms=grid_ms) for grid_ms in (1.0, 0.01)],
    "windows_repeated": [put("checks", windows_repeated=1)],
    "iterations_miscounted": [put("checks", iterations_missing=1)],
    "versions_differ": [put("checks", versions_differ={"nccl": ["2.28.9", "2.27.3"]})],
    "pauses": [steady("pauses", count=1.0, lost_share=0.0026)],
    "slow_rank": [steady("slowest_rank", share=0.031, noise=0.015)],
    "unexplained": [forecast_of(low=0.9, high=0.99), forecast_of(low=1.01, high=1.02)],
    "input_bound": [loader(cost_share=0.021, low=0.001), loader(cost_share=0.5, low=3.0)],
    "samples_do_not_fill_window": [
        put("checks", unaccounted_share=share) for share in (1.1e-3, NAN)
    ],
    "rate_inconsistent": [
        scaled(1.00001, IMAGES_PER_SECOND),
        scaled(2, f"{IMAGES_PER_SECOND}_per_gpu"),
    ],
}
SEVERITY = {
    check.code: "valid" if check.severity == "finding" else check.severity for check in CHECKS
}
# What is just below a limit.
CLEAN = [
    nccl_used(13, "P2P/CUMEM"),
    together(cell(nccl={"NCCL_P2P_LEVEL": "LOC"}), nccl_used(4, "SHM/direct/direct")),
    together(cell(nccl={"NCCL_MAX_NCHANNELS": "12"}), nccl_used(12, "P2P/CUMEM")),
    together(links("SYS"), nccl_used(2, "SHM/direct/direct")),
    together(links("NV4"), nccl_used(8, "P2P/IPC")),
    met(lambda rows: None),
    met(lambda rows: rows.reverse()),
    loader(cost_share=0.019, low=4.0),  # a loader that keeps up
    loader(cost_share=0.3, low=-1.0),  # noise
    forecast_of(low=0.99, high=1.01),
    metrics(comm__ideal_ratio=1.05),
    put("checks.arithmetic", layers={"bfloat16": 52, "float32": 2}),  # a model's own choice
    together(own_model, put("checks.arithmetic", layers={"bfloat16": 7, "float32": 1})),
    put("checks", grid_ms=0.001),
    put("checks", unseen_share=-0.1),
    put("checks", slower_than_warmup=-0.1),
    put("checks", slower_than_warmup=0.08, half_width=0.041),
    together(compiled(graphs=1, timed_graphs=0), put("checks", unseen_share=0.2)),
    together(
        put("metrics", **{"strategy/cost_ms": -0.4}),
        put("within_run", **{"strategy/cost_ms": {"low": -0.7, "high": -0.1}}),
    ),
    put("checks.arithmetic", layers={}),  # compiled: no layer is seen alone
    put("checks.gradient_worst", error=2.4e-7),
    between_steps(0.019, 5.0),
    between_steps(0.05, 0.09),
    compiled(graphs=1, graph_breaks=3, timed_graphs=0),
    graphed(replay=REPLAY | {"error": 1e-6}),
    together(
        lambda r: asked(r, strategy=r.cell.strategy | {"comm_hook": "fp16"}),
        scaled(0.5, BUSBW, MOVED),
    ),
    # an efficiency that noise explains
    together(
        metrics(scaling__efficiency=1.03),
        put("within_run", **{IMAGES_PER_SECOND: {"low": 0.98 * RATE, "high": 1.02 * RATE}}),
    ),
]
UNCHECKED = {
    "wrong_gpu": put("environment", planned_uuids=[]),
    "gradient_not_mean": put("checks", gradient_spread=0.0),
    "bytes_miscounted": drop("checks", "trained_bytes"),
    "batches_not_distinct": drop("checks", "batches_differ"),
    "precision_not_used": drop("checks", "arithmetic"),
    "not_compiled": compiled(timed_graphs=0),
    "weights_still": drop("checks", "weights_still"),
    "graph_differs": together(graphed(), drop("checks", "replay")),
    "replays_miscounted": together(graphed(), drop("checks", "replays")),
    "faster_than_reference": drop("metrics", "comm/ideal_ratio"),
    "loss_not_finite": put("checks", losses=[]),
    "clocks_disagree": drop("checks", "clock_disagreement"),
    "foreign_load_timed": windows(foreign_bytes=None, busy_percent=None),
    "throttled": samples(reasons_known=False, throttle_reasons=[]),
    "foreign_cpu": put("checks.cpu_samples", others_share={}),
    "clocks_differ": drop("metrics", "gpu/sm_mhz"),
    "noisy": put("checks", half_width=NAN),
    "cpu_bound": drop("metrics", "gpu/idle_share"),
    "too_few_iterations": drop("checks", "iterations"),
    "warmup_not_flat": drop("checks", "warmup_flat"),
    "not_stationary": put("checks", stationarity={}),
    "pauses": drop("checks", "pauses"),
    "windows_not_stationary": drop("checks", "stationarity_in_windows"),
    "slower_than_warmup": drop("checks", "slower_than_warmup"),
    "windows_too_short": drop("checks", "unseen_share"),
    "samples_rounded": drop("checks", "grid_ms"),
    "windows_repeated": drop("checks", "windows_repeated"),
    "iterations_miscounted": drop("checks", "iterations_missing"),
    "versions_differ": drop("checks", "versions_differ"),
    "slow_rank": steady("slowest_rank", share=0.05, noise=NAN),
    "input_bound": together(loader(0.5, 3.0), drop("within_run", "data/cost_ms")),
    "samples_do_not_fill_window": drop("checks", "unaccounted_share"),
    "rate_inconsistent": drop("metrics", "throughput/seconds"),
}


@pytest.mark.parametrize(
    ("noise", "baselines", "share", "found"),
    [
        (0.0013, 1, 1.0056, True),  # a baseline that is 1.1 % too slow, at an efficiency of 99.5 %
        (0.0013, 1, 1.0054, False),
        (0.0013, 3, 1.0051, True),
        (0.0001, 3, 1.0049, False),  # no noise is so small
        (0.073, 1, 1.2, False),  # two of three such cells scatter by more than 7 %
        (0.073, 1, 1.4, True),
        (None, 1, 1.03, True),
        (None, 1, 1.01, False),
    ],
)
def test_an_efficiency_above_one_is_judged_by_the_scatter_between_runs(
    noise, baselines, share, found
):
    def change(record):
        record.metrics["scaling/efficiency"] = share
        record.checks["baselines"] = {gpu: ["a"] * baselines for gpu in ("0", "1")}
        record.checks.pop("baseline_noise", None)
        record.checks.update({} if noise is None else {"baseline_noise": noise})

    assert ("efficiency_above_one" in judge(changed(change), LIMITS).codes) == found


def test_every_check_has_a_planted_fault():
    assert {*PLANTED, *SYNCHRONISING} == {check.code for check in CHECKS}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_has_its_code_and_no_other(code):
    for plant in PLANTED[code]:
        found = judge(changed(plant, dataclasses.replace(PAIR, effective=SEEN)), LIMITS)
        assert set(found.codes) == {code}, found.codes
        assert found.verdict == SEVERITY[code]
        assert "{" not in found.codes[code] and not found.codes[code].endswith(": ")
        assert code not in found.unchecked


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_what_is_just_below_a_limit_is_no_fault(number):
    found = judge(changed(CLEAN[number], dataclasses.replace(PAIR, effective=SEEN)), LIMITS)
    assert (found.verdict, found.codes) == ("valid", {})


@pytest.mark.parametrize(
    ("servers", "cores", "share", "outcome"),
    [
        (1, 2, 0.29, "unchecked"),
        (1, 2, 0.31, "codes"),
        (1, 3, 0.29, "codes"),
        (0, 1, 0.29, "codes"),
    ],
)
def test_a_cpu_worker_that_shares_its_core_with_a_server_may_be_slower(
    servers, cores, share, outcome
):
    strategy = {"name": "kvstore_dist_sync", "servers": servers}
    change = together(
        cell(device="cpu", strategy=strategy),
        put("checks.cpu_samples", cores=cores),
        steady("slowest_rank", share=share),
    )
    assert "slow_rank" in getattr(judge(changed(change), LIMITS), outcome)


def test_gpus_without_peer_access_by_the_log_are_a_finding():
    """NCCL 2.20 and later name the pair; a driver that offers no P2P over PCIe is not a fault."""
    says = "P2P is disabled between connected GPUs 1 and 0"
    planted = nccl_used(2, "SHM/direct/direct", no_peer_access=[says])
    found = judge(changed(together(links("PIX"), planted)), LIMITS)
    assert found.verdict == "valid"
    sentence = found.codes["transport_below_wires"]
    assert "SHM/direct/direct on 0->1, which PIX joins" in sentence and says in sentence


INSTEAD = f"rank 1 ran on GPU-other instead of {PAIR.environment['planned_uuids'][1]}"
SENTENCES = [("wrong_gpu", 0, INSTEAD), ("missing_rank", 1, "rank 0 wrote")]


@pytest.mark.parametrize(
    ("code", "number", "words"), [*SENTENCES, ("loss_not_finite", 0, "on rank 1")]
)
def test_the_sentence_names_what_was_found(code, number, words):
    assert words in judge(changed(PLANTED[code][number]), LIMITS).codes[code]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, " optimize=graph "),
        ({"optimize": "compile"}, " optimize=compile_graph "),
        ({"optimize": "compile_graph"}, ""),
        ({"optimize": "max"}, " optimize=max_graph "),
        ({"precision": "fp16"}, ""),
        ({"strategy": {"name": "cpu_staged"}}, ""),
        ({"strategy": {"name": "mine"}}, ""),
    ],
)
def test_a_cell_that_waits_for_the_cpu_is_told_of_graphs_where_it_could_have_them(fields, named):
    change = together(cell(**fields), metrics(gpu__idle_share=0.3))
    said = judge(changed(change), LIMITS).codes["cpu_bound"]
    assert named in said and ("optimize=" in said) == bool(named)


def seven_times(**declared):
    """A strategy of the user's own whose bytes are counted seven times."""
    own = cell(strategy={"name": "mine"}, declared={"strategy": declared})
    return together(own, scaled(7, MOVED, BUSBW))


def test_bytes_of_a_strategy_that_declares_none_are_unchecked_and_others_are_held_to_theirs():
    undeclared = judge(changed(seven_times()), LIMITS)
    assert "bytes_miscounted" not in undeclared.codes
    assert "mine does not declare what it `sends`" in undeclared.unchecked["bytes_miscounted"]
    cases = [{"value": "once", "where": {"staging": "full"}}, {"value": "ring"}]
    for sends in ("ring", cases):
        declared = judge(changed(seven_times(sends=sends)), LIMITS)
        assert declared.verdict == "invalid"
        assert "comm/bytes_moved is" in declared.codes["bytes_miscounted"]


@pytest.mark.parametrize("code", UNCHECKED)
def test_a_check_that_cannot_run_is_unchecked_with_a_reason_and_never_passed(code):
    found = judge(changed(UNCHECKED[code], dataclasses.replace(PAIR, effective=SEEN)), LIMITS)
    assert set(found.unchecked) == {code}
    assert found.unchecked[code].strip()
    assert (found.verdict, found.codes) == ("valid", {})
    found = judge(changed(drop("checks", "gpu_samples")), LIMITS)
    assert {"foreign_load", "throttled"} <= set(found.unchecked)


@pytest.mark.parametrize(("error", "is_sum"), [(1.0, True), (0.7, False), (3.0, False)])
def test_the_error_of_a_sum_over_two_ranks_is_named(error, is_sum):
    found = judge(changed(put("checks", gradient_error=error)), LIMITS)
    sentence = "(the error of a sum that is not divided by 2, the number of ranks)"
    assert (sentence in found.codes["gradient_not_mean"]) == is_sum


def test_the_exchange_alone_is_held_to_its_tolerance_and_has_no_steps_to_check():
    def exchanged(record):
        trained = record.checks["trained_bytes"]
        record.checks.clear()
        asked(record, benchmark={"name": "exchange"})
        record.checks.update(exchange_error=9e-3, exchange_tolerance=1e-2, trained_bytes=trained)

    found = judge(changed(exchanged), LIMITS)
    of_any_cell = {"foreign_load", "throttled", "foreign_cpu", "versions_differ"}
    assert not found.codes and set(found.unchecked) == of_any_cell
    steps = {found.not_applicable[code] for code in ("replicas_differ", "gradient_not_mean")}
    assert steps == {"this benchmark trains nothing"}
    lossy = judge(changed(lambda r: r.checks.clear(), changed(exchanged)), LIMITS)
    assert lossy.not_applicable["exchange_wrong"] == "its compression loses precision"


@pytest.mark.parametrize(
    ("change", "unseen"),
    [
        (cell(), True),
        (cell(strategy={"name": "kvstore_dist_sync"}), False),  # its exchange is not NCCL's
        (cell(strategy={"name": "cpu_staged", "transport": "gloo"}), False),
        (cell(device="cpu"), False),
        (drop("metrics", "comm/exchange_ms"), False),
    ],
)
def test_a_lost_log_of_nccl_leaves_unchecked_what_it_would_show(change, unseen):
    found = judge(changed(change, dataclasses.replace(PAIR, effective={})), LIMITS).unchecked
    of_the_log = {"setting_not_asked", "transport_below_wires"}
    assert (found.keys() & of_the_log) == (of_the_log if unseen else set())
    torn = {"nccl": {"settings": {}, "transports": {}, "channels": {}}}
    found = judge(changed(change, dataclasses.replace(PAIR, effective=torn)), LIMITS).unchecked
    assert ("transport_below_wires" in found) == unseen, "a log without connections"


def test_the_verdict_of_an_older_record_is_that_of_its_time():
    """Also where a check of today would find a fault in its samples."""
    for version, expected in ((6, {}), (7, {"windows_repeated"})):
        plant = put("checks", windows_repeated=1)
        record = dataclasses.replace(changed(plant), schema_version=version, effective=SEEN)
        assert judge(record, LIMITS).codes.keys() == set(expected)


def test_a_meaning_names_the_default_of_its_limit():
    (noisy,) = (check for check in CHECKS if check.code == "noisy")
    assert noisy.meaning.endswith("wider than ±5 % (`validity.noise_limit`)")


def test_the_worst_severity_is_the_verdict_whatever_the_order():
    suspect = changed(PLANTED["noisy"][0])
    assert judge(suspect, LIMITS).verdict == "suspect"
    both = changed(PLANTED["loss_not_finite"][0], suspect)
    assert judge(both, LIMITS).verdict == "invalid"
    assert set(judge(both, LIMITS).codes) >= {"noisy", "loss_not_finite"}


PLACES = {"unchecked": "unchecked", "not applicable": "not_applicable"}


@pytest.mark.parametrize(
    "severity", ["invalid", "suspect", "finding", "unchecked", "not applicable"]
)
def test_findings_about_settings_join_the_verdict(severity):
    sentence = "NCCL_ALGO=Ring was ignored"
    finding = {"code": "setting_ignored", "severity": severity, "setting": "x"}
    both = [finding | {"sentence": words} for words in (sentence, "and again")]
    record = dataclasses.replace(PAIR, effective={"findings": both})
    found = judge(record, LIMITS)
    assert found.verdict == (severity if severity in ("invalid", "suspect") else "valid")
    where = getattr(found, PLACES.get(severity, "codes"))
    assert where["setting_ignored"] == f"{sentence}; and again"
    # A finding never takes back what a check said.
    assert judge(changed(PLANTED["replicas_differ"][0], record), LIMITS).verdict == "invalid"


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_an_unfinished_cell_is_invalid_and_every_check_is_unchecked(state):
    record = judged(dataclasses.replace(PAIR, state=state), LIMITS)
    assert record.validity.verdict == "invalid" and not record.usable
    assert set(record.validity.unchecked) == {*PLANTED, *SYNCHRONISING}
    assert all(state in why for why in record.validity.unchecked.values())


def test_limits_come_from_the_configuration():
    noisy = changed(PLANTED["noisy"][0])
    assert judge(noisy, dataclasses.replace(LIMITS, noise_limit=0.1)).verdict == "valid"
    assert judge(PAIR, dataclasses.replace(LIMITS, clock_limit=0.0)).verdict == "invalid"


def test_the_judgement_survives_the_file(tmp_path):
    record = judged(changed(PLANTED["gradient_not_mean"][1]), LIMITS)
    back = records.read(records.write(CellFolder(tmp_path), record))
    assert back.validity == record.validity == judge(back, LIMITS)


# Scaling.


def cell_of(gpus, rate, number=0, verdict="valid", state="finished", **fields):
    """A record of a cell that differs from PAIR's in what is given."""
    own = changed_cell(PAIR.cell, gpus=gpus, **fields)
    return make_record(
        record_id=f"{number:032x}",
        cell_key=own.key,
        cell=own,
        state=state,
        started_at=1.0 + number,
        ended_at=2.0,
        validity=Validity(verdict),
        environment={},
        metrics={} if rate is None else {IMAGES_PER_SECOND: rate},
    )


def baselines(record, others):
    """{GPU: images per second alone} of a record's subset."""
    study = Study.of([record, *others])
    found = Baselines(study).of_members(study.single(record)).items()
    return {gpu: pytest.approx(math.exp(runs.log_rate.value)) for gpu, runs in found}


ALONE = [cell_of([0], 100.0), cell_of([1], 80.0), cell_of([2], 10.0)]
FIRST = [cell_of([0], 100.0)]
THREE = [cell_of([0], rate, repeat, repeat=repeat) for repeat, rate in enumerate((90, 100, 500))]
STRONG = [cell_of([0], 100.0, batch_size=512, global_batch_size=512)]
LOC = {"NCCL_P2P_LEVEL": "LOC"}
EFFICIENCIES = {
    "against the slowest member": (cell_of([0, 1], 144.0), ALONE, 144 / (2 * 80)),
    "in whatever order": (cell_of([1, 0], 144.0), ALONE, 144 / (2 * 80)),
    "of the members that are known": (cell_of([0, 3], 144.0), ALONE, 144 / (2 * 100)),
    "against the median run": (cell_of([0, 1], 150.0), THREE, 0.75),
    "one GPU": (FIRST[0], [], None),
    "no baseline": (cell_of([0, 1], 100.0), [], None),
    "no rate": (cell_of([0, 1], None), FIRST, None),
    "as many images per step": (
        cell_of([0, 1], 150.0, batch_size=256, global_batch_size=512),
        STRONG,
        0.75,
    ),
    "more images per step": (
        cell_of([0, 1], 150.0, batch_size=512, global_batch_size=1024),
        STRONG,
        None,
    ),
    "weak and strong are never mixed": (cell_of([0, 1], 150.0, batch_size=512), STRONG, None),
}


@pytest.mark.parametrize("name", EFFICIENCIES)
def test_efficiency_is_against_cells_of_one_gpu(name):
    record, others, expected = EFFICIENCIES[name]
    found = Baselines(Study.of([record, *others])).efficiency(record)
    assert found == (expected and pytest.approx(expected, rel=1e-12))


def test_the_last_attempt_of_this_machines_own_gpu_is_the_baseline():
    def on(record, host, *uuids, at=1.0, key="0" * 16):
        around = {"host": host, "planned_uuids": list(uuids)}
        return dataclasses.replace(record, environment=around, started_at=at, cell_key=key)

    pair = on(cell_of([0, 1], 144.0), "a", "GPU-0", "GPU-1")
    first, last = on(cell_of([0], 90.0), "a", "GPU-0"), on(cell_of([0], 80.0), "a", "GPU-0", at=5.0)
    assert baselines(pair, [last, first]) == {0: 80.0}
    assert baselines(pair, [on(cell_of([0], 90.0), "b", "GPU-0")]) == {}, "another machine"
    assert baselines(pair, [on(cell_of([0], 90.0), "a", "GPU-7")]) == {}, "another GPU 0"


def test_only_usable_cells_are_baselines():
    pair = cell_of([0, 1], 1.0)
    for unusable in (
        cell_of([0], 50.0, verdict="invalid"),
        cell_of([0], 50.0, state="failed"),
        cell_of([0], 50.0, state="interrupted"),
        cell_of([0], None),
        cell_of([0, 1], 50.0),
    ):
        assert baselines(pair, [unusable]) == {}
        assert baselines(pair, [unusable, cell_of([0], 100.0, number=1)]) == {0: 100.0}
    assert baselines(pair, [cell_of([0], 70.0, verdict="suspect")]) == {0: 70.0}
