"""`benchmark=script`: steps of a foreign script, its rate, and what is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build import ROOT, composed_cell, run_of, without_entry

from analysis.__main__ import main as analysis
from analysis.findings.examine import findings_of
from analysis.nccl.log import parse_nccl_log
from analysis.report.sections.benchmarks_section import choice_of, script
from analysis.report.sections.losses_section import traces
from analysis.study.study import Study, open_study
from analysis.validity.effective import choices_of
from analysis.validity.results import wrong_gpu
from benchmarks.derived import IncompleteLines
from benchmarks.record import read_study
from benchmarks.script.derive import derive, is_enough, warm_up_end
from benchmarks.script.tracer import NsysRecorder
from conf.command_line import normalise

HEAD = """
import os, signal, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(batch, 8)).sum().backward()
    time.sleep(0.005)
    optimizer.step()
"""
SCRIPTS = {
    "steps.py": HEAD + "while True: step(4)\n",
    "early.py": HEAD + "step(4)\n",
    "few.py": HEAD + "for _ in range(300): step(4)\n",
    "other_gpus.py": "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '7'\n" + HEAD + "while True: step(4)\n",
    "fails.py": "raise RuntimeError('planted')\n",
    "daemon.py": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n",
    "deaf.sh": "#!/bin/bash\ntrap '' TERM\nwhile true; do echo rate 12.5; sleep 0.05; done\n",
    "quiet.sh": "#!/bin/sh\necho nothing\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644 if name.endswith(".py") else 0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cell_of(*asked, gpus=(0, 1)):
    return composed_cell("benchmark=script", *normalise(asked), gpus=gpus, device="cpu")


def steps_of(ms, samples=8):
    ends_s = [sum(ms[: step + 1]) / 1e3 for step in range(len(ms))]
    line = {"kind": "steps", "time": 1.0, "first": 0, "ms": ms, "samples": [samples] * len(ms)}
    return [line | {"passes": [1] * len(ms), "ends_s": ends_s}]


def test_the_rate_is_that_of_the_slowest_rank_after_the_warm_up(hydra, folder):
    cell = cell_of("benchmark.run=steps.py", "benchmark.max_seconds=1")
    fast, slow = [100.0] * 20 + [10.0] * 400, [100.0] * 20 + [20.0] * 400
    derived = derive({0: steps_of(fast), 1: steps_of(slow)}, cell)
    assert derived.metrics["throughput/images_per_second"] == pytest.approx(2 * 8 / 0.020)
    assert derived.metrics["warmup/iterations"] >= 20 and derived.checks["warmup_flat"]
    assert warm_up_end(fast[:15], cell.benchmark) == (7, False)
    assert is_enough(fast, cell.benchmark) and not is_enough(fast[:30], cell.benchmark)
    with pytest.raises(IncompleteLines, match="on all ranks"):
        derive({0: steps_of(fast), 1: steps_of(slow[:5])}, cell)
    with pytest.raises(IncompleteLines, match=r"benchmark\.samples"):
        derive({0: steps_of(fast, 0), 1: steps_of(slow, 0)}, cell)
    stated = cell_of("benchmark.run=steps.py", "benchmark.samples=16")
    rate = derive({0: steps_of(fast, 0), 1: steps_of(slow, 0)}, stated)
    assert rate.metrics["throughput/images_per_second"] == pytest.approx(2 * 16 / 0.020)


def test_a_script_without_steps_has_the_rate_that_it_prints(hydra, folder):
    cell = cell_of("benchmark.run=./deaf.sh", r"benchmark.rate=rate (\d+)")
    printed = [{"kind": "printed", "time": time, "value": value} for time, value in
               ((0.0, 1.0), (3.0, 100.0), (4.0, 100.0), (6.0, 40.0))]  # fmt: skip
    derived = derive({0: printed, 1: []}, cell)
    assert derived.metrics["throughput/images_per_second"] == pytest.approx((100 + 2 * 40) / 3)


def test_text_and_list_are_one_command_and_an_edited_script_is_another(hydra, folder):
    asked = f"benchmark.run={sys.executable} steps.py --lr=0.1 'a b'"
    text = cell_of(asked)
    assert text.key == cell_of(f"benchmark.run=[{sys.executable},steps.py,--lr=0.1,a b]").key
    assert text.benchmark["folder"] == str(folder) and "auto" not in text.benchmark.values()
    (folder / "steps.py").write_text("pass\n")
    assert cell_of(asked).key != text.key


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    runs = ",".join(f'"./{name}"' if name.endswith(".sh") else f'"{name}"' for name in SCRIPTS)
    # steps.py makes more steps than are warmed up before a trace, few.py fewer.
    traced = ("profiler=torch", "profiler.warmup_steps=400")
    done = launched(folder, f"benchmark.run={runs}", r"benchmark.rate='rate (\d+.\d)'", *traced)
    records, unreadable = read_study(folder / "out" / "default")
    assert not unreadable, done.stdout + done.stderr
    return folder / "out" / "default", {one.cell.benchmark["run"]: one for one in records}, done


def launched(folder, *words):
    """Measure scripts, each with some traced steps; return what the command did."""
    words = [
        "-m", "gpus=0,1", "device=cpu", "benchmark=script", "profiler.steps=4", *words, "report=false",
        "benchmark.warmup_min_seconds=0.2", "benchmark.warmup_max_seconds=0.5", "noise_pairs=0",
        "benchmark.max_seconds=0.3", "tracking.enabled=false", f"output_dir={folder}/out",
    ]  # fmt: skip
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_script_has_a_record_that_can_be_computed_again(swept, capsys):
    study, records, done = swept
    record = records["steps.py"]
    assert record.state == "finished", done.stdout
    metrics = record.metrics
    # Two forward passes of four samples in each step of two ranks.
    assert metrics["throughput/images"] == 16 * metrics["step/iterations"]
    assert 0 < metrics["throughput/images_per_second"] < 16 / 0.005
    assert without_entry([record]) == set() and "slow_rank" in record.validity.unchecked
    assert record.cell.name.startswith("steps.py · gpus 0,1 · run=steps.py")
    for exchange in record.tables["exchanges"]["rows"]:  # none where it ends before they are read
        assert (exchange["kind"], exchange["bytes"]) == ("all_reduce", 4 * (8 * 8 + 8))
    assert [rank["device"] for rank in record.ranks] == ["cpu", "cpu"]
    assert record.ranks[0]["script"] == "steps.py" and len(record.cell.benchmark["sha256"]) == 64
    assert analysis(["verify", str(study)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ("early.py", "ended after 0 timed steps"),
        ("other_gpus.py", "sets CUDA_VISIBLE_DEVICES=7 itself"),
        ("fails.py", "raised RuntimeError"),
        ("daemon.py", "behind; expected one that stays"),
        ("./quiet.sh", "no line that the script printed has it"),
    ],
)
def test_a_script_that_gives_no_number_fails_in_a_sentence(swept, run, sentence):
    record = swept[1][run]
    assert record.state == "failed" and sentence in record.failure.message


def test_a_script_without_torch_is_not_said_to_be_on_another_gpu(hydra, folder):
    """It prints its rate; nobody knows which GPU it used."""
    cell = cell_of("benchmark.run=./deaf.sh", "benchmark.rate=rate")
    record = run_of(cell, 0, 1.0, environment={"planned_uuids": ["GPU-a", "GPU-b"]})
    silent = [{"rank": 0, "device": "cuda"}, {"rank": 1, "device": "cuda"}]
    outcome = wrong_gpu.judge(dataclasses.replace(record, ranks=silent), None)
    assert outcome == ("unchecked", "the script of rank 0, 1 used no GPU through torch")
    other = dataclasses.replace(record, ranks=[{"rank": 0, "uuid": "GPU-b"}])
    assert "GPU-b instead of GPU-a" in wrong_gpu.judge(other, None)


def test_a_script_that_catches_sigterm_is_killed_and_nothing_is_left(swept):
    study, records, done = swept
    assert records["./deaf.sh"].metrics["throughput/images_per_second"] == pytest.approx(12.5)
    assert "caught SIGTERM on rank 0" in done.stdout
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(study.parent.parent) in str((path / "cwd").readlink()):
                left.append((path / "cmdline").read_text())
        except OSError:
            continue
    assert json.dumps(left) == "[]"


def test_steps_of_a_script_are_traced_in_a_run_of_their_own(swept):
    """Where it ends before, the measured rate stays and a sentence says why there is no trace."""
    folder, records, done = swept
    traced, few = records["steps.py"], records["few.py"]
    ranks = traced.tables["trace"]["ranks"]
    assert [rank["steps"]["count"] for rank in ranks] == [4, 4], done.stdout + done.stderr
    # DDP exchanges after each of the two backward passes of a step.
    assert traced.metrics["trace/comm_ms_per_step"] > 0
    assert [row["matched"] for row in traced.tables["trace"]["collectives"]] == [8]
    study = open_study(folder)
    (section,) = filter(None, [traces(study, findings_of(study))])
    assert section.lines[0].startswith("Communication takes ") and section.figures
    assert few.metrics["throughput/images_per_second"] > 0 and "trace" not in few.tables
    said = few.effective["findings"][0]["sentence"]
    assert "ended before 400 steps and 4 traced ones" in said, said


@pytest.mark.parametrize(
    ("log", "rows"),
    {
        "nccl_h200_x8_default.log": {("all_reduce", 17348864): "Ring LL128", ("broadcast", 16): "Ring LL"},
        "nccl_dialects/2.30.7.log": {
            ("all_gather", 443904334): "Tree LL128", ("reduce_scatter", 443904334): "",
        },
    }.items(),
)  # fmt: skip
def test_a_collective_of_a_step_has_the_algorithm_that_nccl_logged(hydra, folder, log, rows):
    choices = choices_of(parse_nccl_log((ROOT / "tests" / "data" / log).read_text()))
    exchanges = [{"kind": kind, "bytes": size, "calls": 1.0} for kind, size in rows]
    cell = composed_cell("benchmark=script", "benchmark.run=steps.py")
    record = run_of(cell, 0, 1.0, tables={"exchanges": {"rows": exchanges}})
    logged = dataclasses.replace(record, effective={"choices": choices})
    (table,) = script(Study.of([logged]), None).tables
    assert [row[-1] for row in table.rows] == list(rows.values())
    shares = {"kind": "reduce_scatter", "bytes": 2 * 955}  # of two ranks
    choice = {"function": "ReduceScatter", "bytes": 955, "algorithm": "NVLS", "protocol": "Simple"}
    other = choice | {"algorithm": "Ring"}
    logged = dataclasses.replace(record, effective={"choices": [choice, other]})
    assert choice_of(shares, logged) == "NVLS Simple + Ring Simple"
    (table,) = script(Study.of([record]), None).tables
    assert "algorithm, protocol" not in [column.heading for column in table.columns]


def test_one_rank_opens_the_range_of_nsys_also_where_ranks_share_a_gpu(monkeypatch):
    opened = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: opened.append(os.environ["RANK"]))
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        NsysRecorder().start(is_on_gpu=True)
    assert opened == ["0"]


@pytest.mark.needs("nsys")
def test_nsys_sees_the_traced_steps_of_every_rank_of_a_script(folder, monkeypatch):
    """Also those just before the script is ended; it has its variables, but no secret."""
    monkeypatch.setenv("DATA_HERE", "1")
    monkeypatch.setenv("PLANTED_API_KEY", "hunter2")
    note = "import os\nopen('names', 'a').write(' '.join(os.environ) + '\\n')\n"
    (folder / "steps.py").write_text(note + SCRIPTS["steps.py"])
    done = launched(folder, "benchmark.run=steps.py", "profiler=nsys")
    study = open_study(folder / "out" / "default")
    (record,) = study.records
    assert record.tables.get("trace"), done.stdout + done.stderr
    ranks = record.tables["trace"]["ranks"]
    assert [(rank["rank"], rank["steps"]["count"]) for rank in ranks] == [(0, 4), (1, 4)]
    longest_ms = max(max(rank["steps"]["times_ms"]) for rank in ranks)
    assert longest_ms < 1e3 * record.metrics["throughput/seconds"]  # no range is left open
    assert record.effective["trace"]["profiler"] == "nsys"
    passes = [names.split() for names in (folder / "names").read_text().splitlines()]
    assert all("DATA_HERE" in names for names in passes)
    assert ["PLANTED_API_KEY" in names for names in passes] == [True, True, False, False]
    assert analysis(["verify", str(study.folder)]) == 0
