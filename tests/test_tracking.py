"""Records in MLflow: names of the contract, children of parents, twice as once, the saved view."""

import base64
import dataclasses
import io
import json
import math
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from build import (
    DATA,
    ROOT,
    changed_cell,
    database_rows,
    make_sweep,
    tracked_folder,
    tracked_record,
    tracked_runs,
)
from rich.console import Console

from benchmarks.record import CellFolder, Failure, Validity, read_study
from conf.schema import Tracking
from launch.study.study_folder import ProcessIdentity, StudyFolder
from launch.tracking import mlflow_run
from launch.tracking.mlflow_run import project
from launch.tracking.tracker import MlflowWriter, Tracker, sync

CELL = "tags.`ringside.kind` = 'cell'"


@pytest.fixture
def tracker(output_dir):
    return Tracker(Tracking(), output_dir, "scaling")


def log(tracker, output_dir, record):
    return tracker.log(
        [record], lambda _: CellFolder(tracked_folder(output_dir / "scaling", record))
    )[0]


def test_a_sweep_is_a_parent_with_its_cells(tracker, output_dir):
    """What each run has is in the golden net (mlflow.txt)."""
    good = tracked_record(1)
    drift = changed_cell(good.cell, repeat=-3, global_batch_size=512, nccl={})
    oom, noisy = Failure("oom", 1, "rank 1 ran out of memory"), Validity("invalid", {"noisy": "n"})
    records = [
        good,
        tracked_record(2, drift=True, cell=drift),
        tracked_record(3, name="bad", state="failed", failure=oom, metrics={}),
        tracked_record(4, name="stopped", state="interrupted", validity=noisy),
    ]
    tracker.start_sweep(make_sweep(4))
    (parent,) = tracked_runs(tracker).values()
    assert parent.info.status == "RUNNING" and parent.info.run_name.startswith("4 runs · 2026-")
    assert all(log(tracker, output_dir, record) for record in records)
    tracker.write_study(records, {good.record_id: {"scaling/efficiency": 0.9}})
    tracker.finish_sweep(make_sweep(4), records, "failed", {})

    stored = {}
    for run in tracker._client.search_runs(["1"]):
        stored[run.data.tags.get("ringside.record_id")] = run
    child, repeat, bad, cut_short = (stored[record.record_id] for record in records)
    assert len(stored) == 5 and repeat.info.run_name == f"{good.name} · drift"
    assert child.data.metrics == {**good.metrics, "step/ms": 50.0, "scaling/efficiency": 0.9}
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    times = round(good.started_at * 1000), round(good.ended_at * 1000)
    assert (child.info.status, child.info.start_time, child.info.end_time) == ("FINISHED", *times)
    history = tracker._client.get_metric_history(child.info.run_id, "step/ms")
    assert [(point.step, point.value) for point in history] == [(0, 51.0), (1, 50.0), (2, 50.0)]
    artifacts = output_dir / "mlartifacts" / child.info.run_id / "artifacts"
    files = {str(path.relative_to(artifacts)) for path in artifacts.rglob("*") if path.is_file()}
    assert files == {"record.json", "topology.txt", "ranks/0.jsonl", "logs/0.log", "nccl/0.log"}
    params = repeat.data.params
    assert (params["global_batch_size"], params["nccl.p2p_level"]) == ("512", "default")
    assert (params["repeat"], repeat.data.tags["role"]) == ("0", "drift")
    assert (bad.info.status, cut_short.info.status) == ("FAILED", "KILLED")
    assert bad.data.tags["failure.cause"] == "oom"
    assert "ran out of memory" in bad.data.tags["mlflow.note.content"]
    parent = tracker._client.get_run(parent.info.run_id)
    assert parent.info.status == "FAILED" and "| 5,000 |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.tags["cells"] == "2 finished, 1 failed, 1 interrupted"
    assert parent.data.metrics["cells/valid"] == 2
    assert parent.data.metrics["best/images_per_second"] == 5000
    assert parent.data.params["nccl.p2p_level"] == "LOC | default"
    assert (parent.data.tags["host"], parent.data.tags["best.cell"]) == ("node7", good.name)


def test_logging_twice_changes_nothing(tracker, output_dir):
    record = tracked_record(1)
    folder = CellFolder(tracked_folder(output_dir / "scaling", record))
    for number in range(2):
        again = Tracker(Tracking(), output_dir, "scaling")
        again.start_sweep(make_sweep())
        assert again.log([record], lambda _: folder) == (1 - number, [])
        again.write_study([record], {record.record_id: {"scaling/efficiency": 0.5}})
        again.finish_sweep(make_sweep(), [record], "finished", {})
        if number == 0:
            before = database_rows(output_dir / "mlflow.db")
    assert database_rows(output_dir / "mlflow.db") == before


@pytest.mark.parametrize("at", ["log_artifact", "log_batch", "set_terminated"])
def test_a_half_written_run_is_completed(tracker, output_dir, monkeypatch, at):
    record = tracked_record(1)
    folder = tracked_folder(output_dir / "scaling", record)
    tracker.start_sweep(make_sweep())

    def die(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tracker._client, at, die)
        tracker.log([record], lambda _: CellFolder(folder))
    run = tracked_runs(tracker)[record.name]
    assert run.info.status == ("FINISHED" if at == "log_batch" else "RUNNING")
    # The next start closes it as KILLED.
    tracker._client.set_tag(run.info.run_id, "ringside.boot_id", "an earlier boot")
    assert Tracker(Tracking(), output_dir, "scaling").log([record], lambda _: CellFolder(folder))[0]
    stored = tracked_runs(tracker)
    assert len(stored) == 2 and stored[record.name].info.status == "FINISHED"
    assert stored[record.name].data.metrics["throughput/images_per_second"] == 5000.0
    assert stored[record.name].data.params["gpus"] == "0,3"


LAUNCHER = """
import sys
from pathlib import Path
from conf.schema import Tracking
from launch.study.study_folder import Sweep
from launch.tracking.tracker import Tracker
tracker = Tracker(Tracking(), Path(sys.argv[1]), "scaling")
tracker.start_sweep(Sweep.begin("scaling", [], 1))
print("ready", flush=True)
sys.stdin.read()
"""


def launcher(folder):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, folder], cwd=ROOT, text=True, **pipes)


def test_launchers_that_meet_on_a_fresh_store_succeed_and_only_runs_of_dead_ones_are_closed(
    tmp_path,
):
    def states():
        tracker.close_stale()
        return sorted(run.info.status for run in tracker._client.search_runs(["1"]))

    processes = [launcher(tmp_path / "out") for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    tracker = Tracker(Tracking(), tmp_path / "out", "scaling")
    assert states() == ["RUNNING", "RUNNING"]
    processes[0].kill()
    assert processes[0].communicate() == ("", "")
    assert states() == ["KILLED", "RUNNING"]
    assert processes[1].communicate(timeout=100) == ("", "") and processes[1].returncode == 0
    file = tmp_path / "out" / "mlflow.db"
    mode = (file.parent / ".mlflow.db.lock").stat().st_mode
    assert file.stat().st_mode == mode, "what the umask leaves"
    assert len(database_rows(file)["runs"]) == 2
    assert {path.name for path in file.parent.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def test_a_process_is_known_by_more_than_its_pid():
    own = ProcessIdentity.own()
    assert not own.gone
    assert dataclasses.replace(own, started=own.started - 100).gone
    assert dataclasses.replace(own, boot_id="another").gone
    assert not dataclasses.replace(own, host="elsewhere", pid=1 << 22).gone


def test_numbers_that_are_not_finite_are_named_not_logged(tracker, output_dir):
    metrics = {"a": math.nan, "b": math.inf, "c": 1.0}
    record = tracked_record(1, metrics=metrics, series={"d": [[0, "nan"], [1, 2.0]]})
    log(tracker, output_dir, record)
    run = tracked_runs(tracker)[record.name]
    assert run.data.metrics == {"c": 1.0, "d": 2.0}
    assert run.data.tags["ringside.nonfinite"] == "a,b,d"


def test_metrics_come_in_the_order_of_the_contract_and_a_series_hides_none():
    metrics = {"step/first_ms": 1.0, "comm/busbw_gb_per_s": 12.0, "throughput/images": 9.0}
    series = {"step/first_ms": [[0, 1.0], [1, 2.0]]}
    names = [row[0] for row in project(tracked_record(1, metrics=metrics, series=series)).metrics]
    windows = ["step/first_ms/window"] * 2
    assert names == ["throughput/images", "comm/busbw_gb_per_s", "step/first_ms", *windows]


HOSTILE = "a\nb|c`d`<script>alert(1)</script>\x1b[31m" + "x" * 10_000


def test_hostile_strings_are_kept_harmless(tracker, output_dir):
    strategy = {"name": HOSTILE, "../../etc=passwd%": HOSTILE}
    cell = changed_cell(tracked_record().cell, strategy=strategy, nccl={"NCCL_\n'": HOSTILE})
    record = tracked_record(
        1,
        name=HOSTILE,
        cell=cell,
        state="failed",
        failure=Failure(HOSTILE, None, HOSTILE),
        validity=Validity("invalid", {HOSTILE: HOSTILE}),
        metrics={"a[0]=%|": 1.0, "/../x": 2.0},
        series={},
        effective={"transport": [HOSTILE], "link_class": {"0-1": "NV18"}},
        study=HOSTILE,
    )
    folder = tracked_folder(output_dir / "scaling", record)
    (folder / "link.log").symlink_to("/etc/passwd")
    (folder / "nccl" / "0.log").unlink()
    (folder / "nccl").rmdir()
    (folder / "nccl").symlink_to(folder / "logs")
    (folder / "large.log").write_bytes(b"x" * ((16 << 20) + 1))
    sweep = dataclasses.replace(make_sweep(), study=HOSTILE, overrides=[HOSTILE])
    tracker.start_sweep(sweep)
    tracker.log([record], lambda _: CellFolder(folder))
    tracker.finish_sweep(sweep, [record] * 50, "failed", {})
    stored = tracker._client.search_runs([tracker._experiment])
    assert len(stored) == 2
    assert all(run.info.run_name.isprintable() and len(run.info.run_name) <= 250 for run in stored)
    assert not any("<script" in run.data.tags["mlflow.note.content"] for run in stored)
    child, parent = sorted(stored, key=lambda run: "mlflow.parentRunId" not in run.data.tags)
    assert sorted(child.data.metrics.values()) == [1.0, 2.0]
    assert child.data.tags["ringside.left_out"] == "large.log"
    artifacts = {item.path for item in tracker._client.list_artifacts(child.info.run_id)}
    assert artifacts == {"record.json", "topology.txt", "ranks", "logs"}
    note = parent.data.tags["mlflow.note.content"]
    assert note.endswith("summary.md\n") and len(note) <= 8000
    whole = tracker._client.download_artifacts(parent.info.run_id, "summary.md")
    assert len(Path(whole).read_text().splitlines()) == 52


def test_the_summary_is_one_row_for_each_record():
    metrics = {
        "throughput/images_per_second": 4652.4, "throughput/images_per_second_per_gpu": 2326.2,
        "scaling/efficiency": 0.981, "comm/busbw_gb_per_s": 12.345, "comm/exchange_ms": 2.5,
        "comm/ideal_ratio": 0.912, "strategy/cost_ms": 0.1234,
    }  # fmt: skip
    ends = {"low": 4640.0, "high": 4671.0, "runs": 12.0}
    next_run = {f"throughput/ci_{name}": value for name, value in ends.items()}
    hang = Failure("hang", 1, "rank 1 was `silent`")
    bad = tracked_record(2, name="a|b<c", state="failed", failure=hang, metrics={})
    good = tracked_record(1, metrics=metrics)
    text = mlflow_run.summary_markdown([good, bad], {good.record_id: next_run})
    *lines, empty, margin, other, reference = text.splitlines()
    assert (empty, other) == ("", "")
    assert reference.startswith("reference: the same bytes")
    assert (
        margin
        == "± for the next run (95 %), each from 12 repeated runs (not all are of this sweep)"
    )
    assert len(lines) == 4 and all(line.replace("\\|", "").count("|") == 13 for line in lines)
    assert lines[2] == (
        "| resnet50 · nccl\\_allreduce · gpus 0,3 · P2P\\_LEVEL=LOC | 4,652 | 0.33\xa0% | 2,326 "
        "| 98.1\xa0% | 2.50 | 91.2\xa0% | 12.3 | 0.123 | SHM | NV18 | valid |"
    )
    assert lines[3].startswith("| a\\|b&lt;c | – | – |")
    assert lines[3].endswith("| failed: hang of rank 1, rank 1 was \\`silent\\` |")


def test_the_summary_has_once_what_all_names_share():
    ends = ("gpus 0,3", "gpus 0,3 · ALGO=Ring", "gpus 0")
    records = []
    for number, end in enumerate(ends):
        records.append(tracked_record(number, name=f"resnet50 · ddp · {end}"))
    lines = mlflow_run.summary_markdown(records, {}).splitlines()
    assert lines[:2] == ["Every run: resnet50 · ddp", ""]
    assert [line.split(" | ")[0] for line in lines[4:]] == [f"| {end}" for end in ends]
    assert mlflow_run.summary_markdown([], {}) == "No run has ended.\n"
    copies = changed_cell(records[0].cell, benchmark={"name": "p2p"})
    record = tracked_record(1, cell=copies, metrics={"p2p/write_gb_per_s": 377.25})
    text = mlflow_run.summary_markdown([record], {})
    assert text.startswith("| cell | result |") and "| write 377 GB/s, one run |" in text


def test_cells_that_do_not_train_together_are_no_best_cells():
    records = read_study(DATA / "h200_x4" / "waterfall")[0]
    assert any(record.cell.strategy["name"] == "none" for record in records)
    assert mlflow_run.best_record(records).cell.strategy["name"] == "nccl_allreduce"
    links = []
    for record in read_study(DATA / "h200_x4" / "links")[0]:
        if record.cell.benchmark["name"] == "host_link":
            links.append(record)
    rates = [one.metrics["host_link/all_both_gb_per_s"] for one in links if one.cell.world_size > 1]
    assert mlflow_run.parent_metrics(links, {})["best/all_both_gb_per_s"] == max(rates)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, store_template):
    """A store with eight real cells of two sweeps: (client, experiment)."""
    folder = tmp_path_factory.mktemp("tables")
    shutil.copy(store_template, folder / "mlflow.db")
    study = Path(shutil.copytree(DATA / "h200_x4" / "settings", folder / "settings"))
    sync(study)
    tracker = Tracker(Tracking(), folder, "settings")
    return tracker._client, tracker._client.get_experiment(tracker._experiment)


def names(settings, search, **more):
    client, experiment = settings
    return [
        run.info.run_name for run in client.search_runs([experiment.experiment_id], search, **more)
    ]


def test_what_a_run_leaves_alone_is_default_and_never_unknown(settings):
    client, experiment = settings
    params = [run.data.params for run in client.search_runs([experiment.experiment_id], CELL)]
    assert {one["nccl.p2p_level"] for one in params} == {"default", "NVL", "PIX", "LOC"}
    assert {one["nccl.algo"] for one in params} == {"default", "Ring"}
    assert len({frozenset(one) for one in params}) == 1
    strategies = read_study(DATA / "h200_x4" / "strategies")[0]
    defaults = mlflow_run.default_params(strategies)
    alone = [defaults[one.record_id] for one in strategies if one.cell.strategy["name"] == "none"]
    assert alone and all(one["strategy.threads"] == "n/a" for one in alone)


# The searches that README names, and how many runs they find.
@pytest.mark.parametrize(
    ("search", "count"),
    [
        ("metrics.`throughput/images_per_second` > 9362 and tags.validity LIKE 'valid%'", 2),
        ("params.`nccl.p2p_level` = 'LOC' and tags.transport LIKE 'SHM%'", 2),
        ("tags.gpu = 'NVIDIA H200' and tags.driver LIKE '580.%' and metrics.`cells/failed` = 0", 2),
    ],
)
def test_searches(settings, search, count):
    assert len(names(settings, search)) == count


def test_the_experiment_has_a_view_with_the_figures(settings):
    tags = settings[1].tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    view = json.loads(tags["mlflow.sharedViewState.ringside-cells"])
    assert view["name"] == "Ringside: runs, fastest first"
    state = json.loads(zlib.decompress(base64.b64decode(view["state"].removeprefix("deflate;"))))
    fastest = names(settings, state["searchFilter"], order_by=[f"{state['orderByKey']} DESC"])[0]
    assert fastest.endswith("ALGO=Ring · P2P_LEVEL=PIX")
    assert [name.split("`")[1] for name in state["selectedColumns"]] == [
        *("validity", "throughput/images_per_second", "comm/exchange_ms", "comm/busbw_gb_per_s"),
        *("nccl.p2p_level", "nccl.algo", "transport"),
    ]
    charts = [(card["type"], card.get("metricKey")) for card in state["compareRunCharts"]]
    assert charts[0] == ("BAR", "throughput/images_per_second")
    assert charts[-1][0] == "PARALLEL"


def test_the_view_of_every_committed_study_fits_a_tag():
    for study in filter(Path.is_dir, DATA.glob("h200_x*/*")):
        tags = mlflow_run.experiment_tags(read_study(study)[0])
        assert len(tags) == 2 and all(len(text) <= 5000 for text in tags.values()), study


def content(folder):
    """What a store says of the study `scaling`, without ids and times of processes."""
    tracker = Tracker(Tracking(), folder, "scaling")
    process = ("ringside.pid", "ringside.boot", "mlflow.parentRunId", "ringside.host")
    stored = {}
    for run in tracker._client.search_runs([tracker._experiment]):
        tags = {name: text for name, text in run.data.tags.items() if not name.startswith(process)}
        key = tags["ringside.kind"], tags.get("ringside.record_id")
        stored[key] = run.info.run_name, run.info.status, run.data.params, run.data.metrics, tags
    return stored, dict(tracker._client.get_experiment(tracker._experiment).tags)


def test_a_sweep_writes_what_sync_writes(output_dir, tmp_path):
    cell = tracked_record().cell
    records = []
    for number, changes, facts in (
        (1, {}, {}),
        (2, {"nccl": {}}, {"state": "failed", "metrics": {}}),
        (3, {"repeat": -3}, {"drift": True}),
    ):
        own = changed_cell(cell, **changes)
        records.append(tracked_record(number, cell=own, cell_key=own.key, **facts))
    study, copy = output_dir / "scaling", tmp_path / "copy" / "scaling"
    for record in records:
        tracked_folder(study, record)
    shutil.copytree(study, copy)
    shutil.copy(output_dir / "mlflow.db", copy.parent)
    first = records[0]
    facts = {"started_at": first.started_at, "overrides": first.overrides}
    sweep = dataclasses.replace(make_sweep(3), **facts)
    console = Console(file=io.StringIO())
    writer = MlflowWriter(Tracking(), StudyFolder(str(output_dir), "scaling"), sweep, console)
    writer._study.folder_of = lambda record: CellFolder(study / f"cell-{record.record_id[-6:]}")
    writer.open()
    for record in records:
        writer.log(record)
    writer.close(records, [], records, stopping=lambda: False, report=None)
    assert not writer._failed and "python -m launch ui " in writer.where()[0]
    sync(copy)
    assert content(copy.parent) == content(output_dir)


def test_a_run_that_a_user_deleted_stays_deleted(tracker, output_dir):
    record = tracked_record(1)
    log(tracker, output_dir, record)
    tracker._client.delete_run(tracked_runs(tracker)[record.name].info.run_id)
    assert not tracker.log([record], lambda _: CellFolder(output_dir / "scaling" / "cell-000001"))[
        0
    ]
    assert record.name not in tracked_runs(tracker)
