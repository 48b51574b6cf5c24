"""What MLflow's tables show of a study at once: short names, figures of sweeps, machines, views; and README's searches."""

import base64
import dataclasses
import io
import json
import shutil
import sqlite3
import zlib
from pathlib import Path

import pytest
from rich.console import Console
from tracked import START, make_folder, make_record, make_sweep, write_samples

from benchmarks.record import CellFolder, read_study
from conf.cell import SECOND_RUN
from conf.schema import Tracking
from launch.study.study import StudyFolder
from launch.tracking import experiment_page, siblings
from launch.tracking.compare import compare
from launch.tracking.projection import project
from launch.tracking.projector import Projector
from launch.tracking.sync import sync
from launch.tracking.tracker import Tracker

DATA = Path(__file__).parent / "data"
CELL = "tags.`ringside.kind` = 'cell'"
SWEEP = "tags.`ringside.kind` = 'sweep'"


@pytest.fixture(scope="module")
def settings(tmp_path_factory, store_template):
    """A store with eight real cells of two sweeps: (client, experiment)."""
    folder = tmp_path_factory.mktemp("tables")
    shutil.copy(store_template, folder / "mlflow.db")
    study = Path(shutil.copytree(DATA / "h200_x4" / "settings", folder / "settings"))
    sync(study)
    tracker = Tracker.open(Tracking(), folder, "settings")
    return tracker._client, tracker._client.get_experiment(tracker._experiment)


def names(settings, search, **more):
    client, experiment = settings
    return [
        run.info.run_name for run in client.search_runs([experiment.experiment_id], search, **more)
    ]


def test_names_say_only_what_differs(settings):
    fastest_first = ["metrics.`throughput/images_per_second` DESC"]
    assert names(settings, CELL, order_by=fastest_first) == [
        "P2P_LEVEL=PIX · ALGO=Ring", "P2P_LEVEL=NVL · ALGO=Ring", "default", "ALGO=Ring", "P2P_LEVEL=PIX", "P2P_LEVEL=NVL",
        "P2P_LEVEL=LOC · ALGO=Ring", "P2P_LEVEL=LOC",
    ]  # fmt: skip
    assert names(settings, SWEEP) == ["7 cells · 2026-11-21 10:53", "1 cell · 2026-11-21 10:52"]


def test_names_of_repeats_seeds_and_a_single_cell():
    cell = make_record().cell
    several = [
        make_record(1),
        make_record(2, cell=dataclasses.replace(cell, repeat=1)),
        make_record(3, cell=dataclasses.replace(cell, repeat=-2), drift=True),
        make_record(4, cell=dataclasses.replace(cell, repeat=SECOND_RUN)),
    ]
    assert list(siblings.names(several).values()) == [
        "first run",
        "repeat 1",
        "drift",
        "second run",
    ]
    assert list(siblings.names(several[:1]).values()) == [several[0].name]
    seeds = [make_record(1), make_record(2, cell=dataclasses.replace(cell, seed=1, nccl={}))]
    assert list(siblings.names(seeds).values()) == ["P2P_LEVEL=LOC · seed=0", "seed=1"]
    roles = [(project(one).params["repeat"], project(one).tags["role"]) for one in several]
    assert roles == [("0", "first"), ("1", "repeat"), ("0", "drift"), ("0", "second run")]


def test_what_a_run_leaves_alone_is_default_and_never_unknown(settings):
    client, experiment = settings
    params = [run.data.params for run in client.search_runs([experiment.experiment_id], CELL)]
    assert {one["nccl.p2p_level"] for one in params} == {"default", "NVL", "PIX", "LOC"}
    assert {one["nccl.algo"] for one in params} == {"default", "Ring"} and len(
        {frozenset(one) for one in params}
    ) == 1
    strategies = read_study(DATA / "h200_x4" / "strategies")[0]
    added = siblings.left_alone(strategies)
    staged = [added[one.record_id] for one in strategies if one.cell.strategy["name"] == "none"]
    assert all(one["strategy.threads"] == "n/a" for one in staged) and staged


def test_a_parent_has_the_figures_of_its_best_cell_and_of_its_baseline():
    records = read_study(DATA / "h200_x4" / "scaling")[0]
    sweeps = {}
    for record in records:
        sweeps.setdefault(record.sweep_id, []).append(record)
    own = max(sweeps.values(), key=len)
    best = siblings.best(own)
    assert best.cell.gpus == (0, 1, 2, 3)
    found = siblings.parent_metrics(
        own, {best.record_id: {"scaling/efficiency": 0.99, "comm/exposed_ms": 0.5}}
    )
    rate = best.metrics["throughput/images_per_second"]
    assert found["best/images_per_second"] == rate and found["best/exposed_ms"] == 0.5
    assert found["baseline/images_per_second"] * 4 * found["best/efficiency"] == pytest.approx(rate)
    stopped = next(own for own in sweeps.values() if any(one.state == "interrupted" for one in own))
    counts = siblings.parent_metrics(stopped, {})
    assert {name: count for name, count in counts.items() if name.startswith("cells/")} == {
        "cells/valid": 1, "cells/suspect": 0, "cells/invalid": 0, "cells/failed": 0, "cells/interrupted": 1,
    }  # fmt: skip


def test_cells_that_do_not_train_together_are_no_best_cells():
    records = read_study(DATA / "h200_x4" / "waterfall")[0]
    assert any(record.cell.strategy["name"] == "none" for record in records)
    assert siblings.best(records).cell.strategy["name"] == "nccl_allreduce"
    links = [
        one
        for one in read_study(DATA / "h200_x4" / "links")[0]
        if one.cell.benchmark["name"] == "host_link"
    ]
    rates = [one.metrics["host_link/all_both_gb_per_s"] for one in links if one.cell.world_size > 1]
    assert siblings.parent_metrics(links, {})["best/all_both_gb_per_s"] == max(rates)


# The searches that README names: {search: names of what it finds}.
SEARCHES = {
    "metrics.`throughput/images_per_second` > 9362 and tags.validity LIKE 'valid%'": [
        "P2P_LEVEL=NVL · ALGO=Ring", "P2P_LEVEL=PIX · ALGO=Ring",
    ],
    "params.`nccl.p2p_level` = 'LOC' and tags.transport LIKE 'SHM%'": ["P2P_LEVEL=LOC", "P2P_LEVEL=LOC · ALGO=Ring"],
    "tags.gpu = 'NVIDIA H200' and tags.driver LIKE '580.%' and metrics.`cells/failed` = 0": [
        "1 cell · 2026-11-21 10:52", "7 cells · 2026-11-21 10:53",
    ],
}  # fmt: skip


@pytest.mark.parametrize("search", SEARCHES)
def test_searches(settings, search):
    assert sorted(names(settings, search)) == SEARCHES[search]


def state_of(view):
    saved = json.loads(view)
    packed = base64.b64decode(saved["state"].removeprefix("deflate;"))
    return saved, json.loads(zlib.decompress(packed))


def test_the_experiment_has_views_with_the_figures_and_a_description_with_the_units(settings):
    tags = settings[1].tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    saved, state = state_of(tags["mlflow.sharedViewState.ringside-cells"])
    assert saved["name"] == "Ringside: cells, fastest first"
    assert {name: saved[name] for name in state} == state, (
        "pages before 3.16 read it beside the packed one"
    )
    assert names(settings, state["searchFilter"], order_by=[f"{state['orderByKey']} DESC"])[
        0
    ].endswith("ALGO=Ring")
    assert state["selectedColumns"] == [
        "metrics.`throughput/images_per_second`", "metrics.`comm/exchange_ms`", "metrics.`comm/busbw_gb_per_s`",
        "tags.`validity`", "params.`nccl.p2p_level`", "params.`nccl.algo`", "tags.`transport`",
    ]  # fmt: skip
    charts = [(card["type"], card.get("metricKey")) for card in state["compareRunCharts"]]
    assert charts[0] == ("BAR", "throughput/images_per_second")
    assert ("LINE", "throughput/images_per_second/window") in charts and charts[-1][0] == "PARALLEL"
    sweeps = state_of(tags["mlflow.sharedViewState.ringside-sweeps"])[1]
    assert names(settings, sweeps["searchFilter"]) == names(settings, SWEEP)
    assert (
        "| throughput/images_per_second | images per second | images/s | more is better |"
        in tags["mlflow.note.content"]
    )


@pytest.mark.parametrize(
    "study",
    sorted(path for path in DATA.glob("h200_x*/*") if path.is_dir()),
    ids=lambda one: one.name,
)
def test_views_and_descriptions_of_every_committed_study_fit_a_tag(study):
    tags = experiment_page.tags(read_study(study)[0], {})
    assert len(tags) == 3 and all(len(text) <= experiment_page.TAG_LENGTH for text in tags.values())
    assert all(
        "searchFilter" in json.loads(text)
        for name, text in tags.items()
        if name.startswith(experiment_page.VIEW)
    )


def test_a_description_of_the_user_s_own_stays():
    before = {"mlflow.note.content": "my words"}
    assert "mlflow.note.content" not in experiment_page.tags([make_record()], before)
    assert experiment_page.tags([], before) == {}


def test_samples_of_gpus_and_cpu_are_system_metrics(output_dir):
    record = make_record(1)
    folder = make_folder(output_dir / "scaling", record)
    write_samples(folder, 120)
    tracker = Tracker.open(Tracking(), output_dir, "scaling")
    tracker.log(record, CellFolder(folder))
    (run,) = tracker._client.search_runs([tracker._experiment], CELL)
    assert sorted(name for name in run.data.metrics if name.startswith("system/")) == sorted(
        [f"system/gpu_{gpu}_{what}" for gpu in (0, 3)
         for what in ("clock_mhz", "memory_usage_megabytes", "power_usage_watts", "utilization_percentage")]
        + ["system/cpu_of_this_cell_percentage", "system/cpu_utilization_percentage"]
    )  # fmt: skip
    power = tracker._client.get_metric_history(run.info.run_id, "system/gpu_3_power_usage_watts")
    assert len(power) == 80 and {point.value for point in power} == {601.5}
    assert [(one.step, one.timestamp) for one in power[:2]] == [
        (0, START * 1000),
        (3, START * 1000 + 1500),
    ]
    assert run.data.metrics["system/cpu_utilization_percentage"] == 50.0
    assert run.data.metrics["system/gpu_0_memory_usage_megabytes"] == 3000.0


def content(folder):
    """What a store says of the study `scaling`, without ids and times: {(kind, id): name, status, params, metrics, tags}."""
    tracker = Tracker.open(Tracking(), folder, "scaling")
    found = {}
    for run in tracker._client.search_runs([tracker._experiment]):
        process = (
            "ringside.pid",
            "ringside.boot",
            "mlflow.parentRunId",
            "mlflow.note",
            "ringside.host",
        )
        tags = {name: text for name, text in run.data.tags.items() if not name.startswith(process)}
        key = tags["ringside.kind"], tags.get("ringside.record_id")
        found[key] = run.info.run_name, run.info.status, run.data.params, run.data.metrics, tags
    return found, {**tracker._client.get_experiment(tracker._experiment).tags}


@pytest.fixture
def studied(output_dir):
    """Three records of a sweep, one of them failed and one a drift run, with samples: (study's folder, records)."""
    cell = make_record().cell
    made = [
        make_record(1),
        make_record(2, cell=dataclasses.replace(cell, nccl={}), state="failed", metrics={}),
        make_record(3, cell=dataclasses.replace(cell, repeat=-3), drift=True),
    ]
    made = [dataclasses.replace(one, cell_key=one.cell.key) for one in made]
    for one in made:
        write_samples(make_folder(output_dir / "scaling", one), 3)
    return output_dir / "scaling", made


def test_a_sweep_writes_what_sync_writes(studied, tmp_path):
    study, made = studied
    copy = tmp_path / "copy" / "scaling"
    shutil.copytree(study, copy)
    shutil.copy(study.parent / "mlflow.db", copy.parent)
    sweep = dataclasses.replace(
        make_sweep(3), started_at=made[0].started_at, overrides=made[0].overrides
    )
    projector = Projector(
        Tracking(), StudyFolder(str(study.parent), "scaling"), sweep, Console(file=io.StringIO())
    )
    projector._study.folder_of = lambda record: CellFolder(study / f"cell-{record.record_id[-6:]}")
    projector.open()
    for record in made:
        projector.log(record)
    projector.close(made, [], made, stopping=lambda: False, report=None)
    assert not projector._failed and "viewStateShareKey=ringside-cells" in projector.where()[1]
    sync(copy)
    assert content(copy.parent) == content(study.parent)


def test_a_store_of_an_earlier_version_is_brought_up_to_date(studied):
    study, _ = studied
    sync(study)
    expected = content(study.parent)
    with sqlite3.connect(study.parent / "mlflow.db") as store:
        store.execute("UPDATE tags SET value = 'true' WHERE key = 'ringside.projected'")
        store.execute("UPDATE params SET value = '-3' WHERE key = 'repeat' AND run_uuid IN "
                      "(SELECT run_uuid FROM tags WHERE key = 'role' AND value = 'drift')")  # fmt: skip
        store.execute(
            "DELETE FROM tags WHERE key IN ('gpu', 'driver', 'torch', 'role', 'best.cell')"
        )
        store.execute("DELETE FROM tags WHERE key = 'ringside.projected' AND run_uuid IN "
                      "(SELECT run_uuid FROM tags WHERE key = 'ringside.kind' AND value = 'sweep')")  # fmt: skip
        for table in ("latest_metrics", "metrics"):
            store.execute(
                f"DELETE FROM {table} WHERE key LIKE 'best/%' OR key LIKE 'cells/%' OR key LIKE 'system/%'"
            )
        store.execute("DELETE FROM params WHERE value = 'default'")
        store.execute("UPDATE runs SET name = 'long' WHERE name NOT LIKE '3 cells%'")
        store.execute("DELETE FROM experiment_tags")
    assert len(compare(study, Tracking()).missing) == 3
    assert sync(study).projected == 3
    found = content(study.parent)
    drift = "cell", f"{3:032x}"
    assert found[0][drift][2].pop("repeat") == "-3", "MLflow changes no parameter"
    assert expected[0][drift][2].pop("repeat") == "0"
    assert found == expected and compare(study, Tracking()).right
    assert sync(study).projected == 0
