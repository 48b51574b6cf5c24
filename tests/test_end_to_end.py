"""The main path, whole: a command, real gloo ranks, records, and an MLflow store."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build import BUSY, ROOT, files_with_auto, without_entry

from analysis.__main__ import main as analysis
from analysis.study.asked import answer, is_answered, questions_of, replay
from benchmarks.record import read_lines, read_study

SMALL = [
    "model=fmnist_cnn", "batch_size=4", "benchmark.max_seconds=0.5", "benchmark.min_iterations=3",
    "benchmark.max_iterations=15", "benchmark.warmup_iterations=2",
    "benchmark.warmup_min_seconds=0", "benchmark.warmup_max_seconds=20",
    "benchmark.exchange_iterations=3", "benchmark.limit_iterations=2",
]  # fmt: skip
SECRET = "planted-hunter2"
UMASK = 0o027
# Their names begin like those of settings, which a record keeps.
LEFT_OUT = {"GLOO_COOKIE": SECRET, "NCCL_FAKE_SECRET": SECRET}
LEFT_OUT["OMP_PLAIN"] = f"https://me:{SECRET}@host"


def command(*arguments, **variables):
    """Run launch.py as a person would, without any GPU of this machine."""
    around = {"CUDA_VISIBLE_DEVICES": "", "PLANTED_API_KEY": SECRET, **LEFT_OUT, **variables}
    words = [sys.executable, "launch.py", *arguments]
    environment = os.environ | around
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, umask=UMASK
    )


def runs(store):
    """(parents, children) of a store's only experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    everyone = client.search_runs([experiment.experiment_id])
    children = [run for run in everyone if "mlflow.parentRunId" in run.data.tags]
    return [run for run in everyone if run not in children], children


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The main job, on CPU workers."""
    folder = tmp_path_factory.mktemp("swept")
    asked = [
        "-m", "gpus=0,3", "nccl.p2p_level=LOC", f"output_dir={folder}", "profiler=torch",
        f"tracking.uri=sqlite:///{folder}/m.db", "benchmark.exposed_rounds=1", "profiler.steps=3",
        "profiler.warmup_steps=2", *SMALL,
    ]  # fmt: skip
    return folder, asked, command(*asked)


def test_the_main_job_leaves_one_parent_and_one_child(swept):
    folder, _, done = swept
    assert done.returncode == 0, done.stdout + done.stderr
    (parent,), (child,) = runs(folder / "m.db")
    assert parent.info.status == child.info.status == "FINISHED"
    assert child.data.params.items() >= {
        "gpus": "0,3", "world_size": "2", "nccl.p2p_level": "LOC", "model": "fmnist_cnn",
        "strategy": "nccl_allreduce", "profiler": "torch",
    }.items()  # fmt: skip
    assert child.data.metrics.keys() >= {
        "throughput/images_per_second", "throughput/images_per_second_per_gpu", "step/ms_median",
        "step/ms_p95", "comm/exchange_ms", "comm/algbw_gb_per_s", "comm/busbw_gb_per_s",
        "strategy/cost_ms",
    }  # fmt: skip
    assert child.data.tags["validity"].split(",")[0] in ("valid", "suspect")
    assert "P2P_LEVEL=LOC" in parent.data.tags["mlflow.note.content"].replace("\\", "")
    assert f"records  {folder}/default" in done.stdout
    assert "python -m launch ui " in done.stdout and "--uri sqlite:///" in done.stdout


def test_the_record_is_the_truth_and_agrees_with_the_store(swept):
    folder, asked, _ = swept
    (record,), unreadable = read_study(folder / "default")
    assert not unreadable and record.state == "finished" and record.overrides == asked
    (child,) = runs(folder / "m.db")[1]
    rate = record.metrics["throughput/images_per_second"]
    assert child.data.metrics["throughput/images_per_second"] == rate
    assert without_entry([record]) == set()
    assert "transport" not in record.effective
    assert "not applicable" in record.validity.not_applicable["setting_ignored"]
    metrics = record.metrics
    assert rate == pytest.approx(metrics["throughput/images"] / metrics["throughput/seconds"])
    assert record.model["parameters"] == 1_199_882
    assert record.checks["replicas_equal"] and record.checks["gradient_error"] < 1e-3
    assert [(rank["rank"], rank["started"]) for rank in record.ranks] == [(0, "fork"), (1, "fork")]


def test_a_trace_tells_what_gloo_did_in_each_step_and_agrees_with_itself(swept, capsys):
    """torch.profiler on CPU workers: the record has the numbers of `python -m analysis trace`."""
    folder, _, done = swept
    (record,), _ = read_study(folder / "default")
    metrics, table = record.metrics, record.tables["trace"]
    names = ("comm", "exposed", "overlapped", "wait")
    comm, exposed, overlapped, wait = (metrics[f"trace/{name}_ms_per_step"] for name in names)
    assert exposed + overlapped == pytest.approx(comm) and 0 <= wait <= comm
    assert metrics["trace/gloo_avg_us"] > 0 and "trace/gpu_idle_share" not in metrics
    # The network's gradients fill one bucket of 25 MiB: one all-reduce in each of the three steps.
    for number, rank in enumerate(table["ranks"]):
        assert (rank["rank"], rank["backend"], rank["steps"]["count"]) == (number, "gloo", 3)
        assert [(calls["name"], calls["calls"]) for calls in rank["nccl"]] == [("AllReduce", 3)]
    assert [(one["name"], one["matched"]) for one in table["collectives"]] == [("AllReduce", 3)]
    (cell,) = (folder / "default").glob("fmnist_cnn-*")
    assert analysis(["trace", str(cell / "profile"), "--within-steps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == table
    assert re.search(r"\(trace [\d.]+\) ms exposed", done.stdout)


def test_a_profiled_cell_supplies_no_rate_from_its_trace_and_says_so(swept):
    folder, _, _ = swept
    (record,), _ = read_study(folder / "default")
    assert "whose rate is not used" in record.validity.codes["profiled"]
    # A finding: the verdict is its own.
    assert set(record.validity.codes) <= {"profiled", "foreign_cpu"} | BUSY
    images = 0
    for path in (folder / "default").glob("*/ranks/?.jsonl"):
        images += sum(line["images"] for line in read_lines(path) if line.get("purpose") == "timed")
    assert record.metrics["throughput/images"] == images
    for path in folder.glob("*/*/profile/ranks/*"):
        assert all(line["kind"] != "block" for line in read_lines(path))


def test_trace_and_timeline_are_artifacts_without_a_secret(swept):
    folder, _, _ = swept
    (child,) = runs(folder / "m.db")[1]
    assert child.data.metrics["trace/exposed_ms_per_step"] > 0
    assert "profiled" in child.data.tags["validity.codes"]
    kept = folder / "mlartifacts" / child.info.run_id / "artifacts" / "profile"
    names = {"rank0.json.gz", "rank1.json.gz", "timeline.svg"}
    assert {path.name for path in kept.iterdir()} == names
    for path in filter(Path.is_file, folder.rglob("*")):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        assert SECRET.encode() not in data, path
    (record,) = read_study(folder / "default")[0]
    assert record.environment["left_out"] == list(LEFT_OUT)
    page = (folder / "default" / "report" / "report.md").read_text().replace("\\", "")
    assert all(name in page for name in LEFT_OUT)
    words = (kept / "timeline.svg").read_text()
    shown = ("rank 0 · host", "rank 1 · host", "backward", "exposed")
    assert all(f">{word}<" in words for word in shown)
    assert ">exchange<" not in words  # it is within backward


def test_no_file_has_a_right_that_the_umask_takes(swept):
    folder, _, _ = swept
    assert [path for path in folder.rglob("*") if path.stat().st_mode & UMASK] == []
    for name in ("m.db", "default/journal.jsonl"):
        assert (folder / name).stat().st_mode & 0o777 == 0o666 & ~UMASK


def parts(record):
    """The seconds of each part of a cell; they add up to its wall time."""
    found = {row["part"]: row["seconds"] for row in record.tables["seconds"]["rows"]}
    assert sum(found.values()) == pytest.approx(record.ended_at - record.started_at, abs=0.1)
    return found


def test_every_second_of_a_cell_is_told(swept, capsys):
    folder, _, done = swept
    (record,), _ = read_study(folder / "default")
    found = parts(record)
    words = "spawn connect build warm-up check timed compare exchange references exposed timeline"
    assert found.keys() >= {*words.split(), "first step", "exit"}
    assert found.keys().isdisjoint({"settle", "start", "imports", "context"})
    metrics = record.metrics
    assert metrics["cell/seconds"] == record.ended_at - record.started_at
    assert 0 < metrics["cell/measuring_seconds"] < metrics["cell/seconds"]
    (child,) = runs(folder / "m.db")[1]
    ratio = metrics["cell/seconds"] / metrics["cell/measuring_seconds"]
    assert child.data.metrics["cell/overhead_ratio"] == pytest.approx(ratio)
    line = r"^time     .* \(\d+ s measuring, .* starting and checking\)$"
    assert re.search(line, done.stdout, re.MULTILINE)
    page = (folder / "default" / "report" / "index.html").read_text()
    assert "<h2>Time that the runs took</h2>" in page
    assert analysis(["seconds", str(folder / "default"), "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["parts"] == found


def test_verify_cuts_the_seconds_of_a_cell_again(swept, capsys, tmp_path):
    study = shutil.copytree(swept[0] / "default", tmp_path / "study")
    assert analysis(["verify", str(study)]) == 0
    (path,) = study.glob("*/record.json")
    content = json.loads(path.read_text())
    content["tables"]["seconds"]["rows"][0]["seconds"] += 1
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert analysis(["verify", str(study), "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["field"] == "tables seconds.rows.0.seconds"
    assert difference["recorded"] == pytest.approx(difference["recomputed"] + 1)


def test_the_same_command_measures_nothing_twice(swept):
    folder, asked, _ = swept
    before = (folder / "default" / "journal.jsonl").read_text().count('"begin"')
    again = command(*asked)
    assert again.returncode == 0 and "done before" in again.stdout
    assert (folder / "default" / "journal.jsonl").read_text().count('"begin"') == before
    assert len(runs(folder / "m.db")[1]) == 1


def test_ranks_can_start_anew_and_a_cell_is_measured_again_under_other_variables(tmp_path):
    asked = (
        "gpus=0", "benchmark=host_link", "benchmark.bytes=1048576", "benchmark.iterations=3",
        "engine.start=exec", "tracking=none", "report=false", f"output_dir={tmp_path}",
        "validity.foreign_cpu_limit=1",
    )  # fmt: skip
    for variables in ({}, {"NCCL_ALGO": "Ring"}):
        done = command(*asked, **variables)
        assert done.returncode == 0 and "  finished  " in done.stdout, done.stdout + done.stderr
        again = "note: measuring 1 run again: NCCL_ALGO unset, now Ring. Earlier results"
        assert (again in done.stdout) == bool(variables)
    (first, second), _ = read_study(tmp_path / "default")
    assert first.cell_key == second.cell_key and first.record_id != second.record_id
    for record in (first, second):
        assert (record.validity.verdict, record.ranks[0]["started"]) == ("valid", "exec")
        found = parts(record)
        assert [*found][:3] == ["spawn", "imports", "connect"] and found["imports"] > 0.1


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two strategies, one of them with a parameter server, race: the folder, the records, and what
    the command did.
    """
    folder = tmp_path_factory.mktemp("two")
    limits = ("noise_limit=10", "foreign_cpu_limit=1", "change_limit=10", "pause_limit=1")
    done = command(
        "-m", "gpus=0+1", "strategy=kvstore_dist_async,none", f"output_dir={folder}",
        "ask=differs", "budget=90s",
        *(f"validity.{limit}" for limit in (*limits, "slow_rank_limit=10")),
        # Other tests share the cores: a reference would be measured beside another load.
        "benchmark.limit_iterations=0", "benchmark.exposed_rounds=0",
        *(option for option in SMALL if "limit_iterations" not in option),
    )  # fmt: skip
    return folder, read_study(folder / "default")[0], done


@pytest.mark.parametrize("name", ["swept", "two"])
def test_the_lines_of_the_ranks_give_every_number_again(name, request, capsys):
    folder = request.getfixturevalue(name)[0]
    assert analysis(["verify", str(folder / "default"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["differences"], found["not_recomputed"]) == ([], [])
    assert found["recomputed"] == found["records"] >= (1 if name == "swept" else 2)
    assert files_with_auto(folder / "default") == []


def test_two_strategies_are_children_of_their_own(two):
    folder, records, _ = two
    (_,), children = runs(folder / "mlflow.db")
    by_strategy = {run.data.params["strategy"]: run.data for run in children}
    assert by_strategy.keys() == {"kvstore_dist_async", "none"} and len(children) == len(records)
    assert {run.data.params["gpus"] for run in children} == {"0,1"}
    assert "comm/exchange_ms" not in by_strategy["none"].metrics
    assert "staleness/mean" in by_strategy["kvstore_dist_async"].metrics
    assert not {code for record in records for code in record.validity.codes} - BUSY


def test_a_cell_with_a_server_tells_its_staleness_and_its_servers(two):
    of_strategy = {record.cell.strategy["name"]: record for record in two[1]}
    record, other = of_strategy["kvstore_dist_async"], of_strategy["none"]
    assert not record.validity.codes.keys() - BUSY
    assert record.cell.strategy["threads"] == "share" and record.checks["summing_threads"] >= 1
    metrics = record.metrics
    assert 0 < metrics["staleness/mean"] <= metrics["staleness/max"] < metrics["staleness/updates"]
    # Two buckets: dense_1 fills one alone. Steps: the timed ones, and others before.
    assert metrics["staleness/updates"] >= 2 * metrics["step/iterations"]
    assert [rank["rank"] for rank in record.ranks] == [0, 1]
    (server,) = record.environment["servers"]
    assert (server["rank"], server["done"], server["device"]) == (2, True, "cpu")
    assert {"comm/exchange_ms", "comm/busbw_gb_per_s"} <= metrics.keys()
    assert "servers" not in other.environment


def test_a_real_sweep_says_the_answer_on_the_terminal_in_the_report_and_in_mlflow(two):
    folder, records, done = two
    study = folder / "default"
    (asked,) = questions_of(study).values()
    race = replay(asked, records)
    # Which it is depends on the machine.
    assert done.returncode == (0 if is_answered(race) else 3), done.stdout + done.stderr
    assert sum(map(len, race.records)) == len(records) >= 2
    first = answer(asked, race)[0]
    report = (study / "report" / "report.md").read_text().replace("\\", "")
    assert first in done.stdout and first in report
    (parent,), _ = runs(folder / "mlflow.db")
    assert parent.data.tags["ask.answer"] == first
    assert parent.data.metrics["ask/runs"] == len(records)


def readme_commands():
    """Every `python launch.py …` of README.md and RESULTS.md, without its remark."""
    found = set()
    for name in ("README.md", "benchmarks/RESULTS.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for line in re.findall(r"python (launch\.py[^`\n]*)", text):
            found.add(re.split(r"  +|`|;| && ", line)[0].strip())
    commands = sorted(found - {"launch.py examples"})  # no request
    needs = [pytest.mark.needs("nsys")]
    return [pytest.param(one, marks=needs * ("profiler=nsys" in one)) for one in commands]


STUDIES_ON_GPUS = ROOT / ".ci" / "gpu" / "study.sh"
NAMES = re.findall(r"^study_(\w+)\(\)", STUDIES_ON_GPUS.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_studies_on_gpus_is_a_right_request_there(name, launch, tmp_path):
    """None is tried on GPUs before it costs their time: a topology stands for eight of them."""
    shown = os.environ | {"SHOW": "1"}
    study = [STUDIES_ON_GPUS, name, tmp_path]
    done = subprocess.run(study, env=shown, capture_output=True, text=True, check=True)
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert commands and not done.stderr
    for words in commands:
        # Multicast stays as the surroundings set it.
        assert not any("nvls" in word.lower() for word in words)
        files = [word for word in words if word.endswith((".py", ".sh"))]
        assert all((ROOT / name.rpartition("=")[2]).exists() for name in files), words
        if "launch.py" in words:
            topology = [f"topology={ROOT}/tests/data/topo_h200_x8.txt", "dry_run=true"]
            options = [word.replace("=tests/", f"={ROOT}/tests/") for word in words]
            code, out, err = launch(*options[words.index("launch.py") + 1 :], *topology)
            assert (code, err) == (0, ""), words
            assert "planned for the machine of topology=" in out


@pytest.mark.parametrize("text", readme_commands())
def test_every_command_of_the_readme_is_a_right_request(text, launch, tmp_path, monkeypatch):
    stands_for = {
        "+experiment=NAME": "+experiment=first",
        "=NAME": "=cpu_staged",
        "=…": "=all_gather",
    }
    stands_for["=train.py"] = f"={ROOT}/launch.py"
    stands_for["=tests/"] = f"={ROOT}/tests/"
    stands_for["=FILE"] = f"={ROOT}/tests/data/topo_h200_x8.txt"
    for word, value in stands_for.items():
        text = text.replace(word, value)
    arguments = shlex.split(text)[1:]
    if "--help" not in arguments:
        arguments += ["dry_run=true", f"output_dir={tmp_path}"]
        # Links and CUDA graphs are not to be had of CPU workers, nor a compiler of a bare machine.
        if any(word in text for word in ("gpus=classes", "peer", "graph", "optimize=")):
            arguments.append(f"topology={ROOT}/tests/data/topo_dgx1_v100.txt")
        if "precision=" in text:
            arguments = [word for word in arguments if not word.startswith("precision=")]
    if "engine=env" in text:
        for name, value in {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "node0"}.items():
            monkeypatch.setenv(name, value)
    code, _, err = launch(*arguments)
    assert (code, err) == (0, "")
