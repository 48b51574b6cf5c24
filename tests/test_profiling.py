"""The profiled pass: what is asked, how nsys is found, what it may see, what it leaves when it fails, and a real one.

Fakes of nsys are shell scripts that get the command Ringside gives to nsys. Most end the pass without starting ranks (they
write the lines that ranks would), so a fault costs no import of torch.
"""

import dataclasses
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from build import make_cell
from traces import GEMM, REDUCE, make_export, two_ranks

from analysis.findings.communication import disagreement
from analysis.trace.source import read_trace
from analysis.trace.steps import within_steps
from analysis.trace.summary import summarize, trace_metrics
from benchmarks.agent import processes
from benchmarks.record import CellFolder, read
from conf.cell import Cell
from conf.groups import options
from conf.options import Refused
from conf.schema import Engine
from launch.engines.environment import environment, scrubbed
from launch.engines.local import LocalEngine
from launch.machine.devices import Machine
from launch.profile import profiled_pass
from launch.profile.nsys import Nsys, find
from launch.run_cell import CellRunner
from launch.study.provenance import RunEnvironment

ROOT = Path(__file__).parent.parent
TOKEN = "b" * 32
SECRET = "planted-hunter2"
# Names and values that must not reach a report, and what must.
PLANTED = {
    "PLANTED_API_KEY": SECRET,
    "NCCL_SECRET_WORD": SECRET,
    "TORCH_URL": f"https://me:{SECRET}@x",
    "PLAIN": SECRET,
}
KEPT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
OPTIONS = {"steps": 3, "warmup_steps": 2}

# What a fake has of the command: $report, the folder of the pass, and the function that plays ranks that are done.
HEAD = """#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version 2025.3.2.1-0"; exit 0; fi
if [ "$1" = export ]; then for word; do case $word in --output=*) made=${word#--output=};; *) report=$word;; esac; done
else for word; do folder=$count; count=$last; last=$word; case $word in --output=*) report=${word#--output=};; esac; done; fi
ranks() { for rank in 0 1; do
  echo '{"kind": "start", "time": 1, "pid": 999999999}' > $folder/ranks/$rank.jsonl
  echo '{"kind": "done", "time": 1}' >> $folder/ranks/$rank.jsonl; done; }
"""


def fake(folder, *lines):
    """A fake nsys of these lines of shell."""
    path = folder / "bin" / "nsys"
    path.parent.mkdir()
    path.write_text("\n".join([HEAD, *lines, ""]))
    path.chmod(0o755)
    return path


def one_pass(tmp_path, nsys, device="cpu", profiler="nsys", **engine):
    """The profiled pass of a cell in an empty folder: what it adds to the record."""
    cell = dataclasses.replace(make_cell(), profiler=profiler, profiler_options=OPTIONS)
    machine = Machine("cpu", (), (0, 1), 2)
    config = SimpleNamespace(engine=Engine(stop_grace_s=0.5, **engine), sample_gpus=False)
    notes = []
    surrounding = {**os.environ, **PLANTED, **KEPT}
    local = LocalEngine(machine, surrounding, "auto", config.engine.stop_grace_s)
    runner = CellRunner(
        config, RunEnvironment(machine, {}), None, None, local, nsys, lambda: False, notes.append
    )
    variable = environment(cell, machine, CellFolder(tmp_path), TOKEN, surrounding)
    found = runner._profiled(
        dataclasses.replace(cell, device=device), CellFolder(tmp_path), variable, lambda watch: None
    )
    local.close()
    assert processes.of(TOKEN) == []
    assert notes == (
        [f"{cell.name}: {found.finding.sentence}"] if found.finding.severity == "unchecked" else []
    )
    return found


# --- what is asked ------------------------------------------------------------------------------------------------


def test_a_cell_without_a_profiler_keeps_its_key_and_one_with_it_has_another():
    record = read(next((ROOT / "tests" / "data" / "h200_x4").rglob("record*.json")))
    assert record.cell.profiler == "none" and not record.cell.profiler_options
    cell = record.cell
    assert cell.key == record.cell_key
    traced = dataclasses.replace(cell, profiler="nsys", profiler_options=OPTIONS)
    assert len({cell.key, traced.key, dataclasses.replace(traced, profiler="torch").key}) == 3
    assert Cell.from_dict(traced.to_dict()) == traced


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nsys_path": 3}, "profiler.nsys_path=3: accepted is a text"),
        (
            {"steps": 0},
            "profiler.steps=0: accepted is a whole number of at least 1 and at most 1000",
        ),
        ({"steps": None}, "profiler.steps=null: accepted is a whole number"),
        (
            {"stepps": 3},
            "profiler.stepps=3: nsys has the options name, steps, warmup_steps, nsys_path",
        ),
        ({"name": "dlprof"}, "profiler.name=dlprof: accepted are auto, none, nsys, torch"),
    ],
)
def test_a_wrong_option_is_one_sentence(given, says):
    with pytest.raises(Refused, match=f"^{says}"):
        options("profiler", {"name": "nsys", "nsys_path": None, **OPTIONS, **given})


def test_a_nsys_that_is_not_there_is_refused(launch, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("NSYS", raising=False)
    code, _, err = launch("profiler=nsys", "dry_run=true")
    says = "launch.py: profiler=nsys: nsys is not on PATH; accepted are a path to it in profiler.nsys_path or NSYS"
    assert code == 2 and err.startswith(says) and err.count("\n") == 1
    with pytest.raises(Refused, match=r"^profiler.nsys_path=/nowhere/nsys: is no program"):
        find("/nowhere/nsys", {})


def test_auto_is_nsys_where_there_is_one_and_else_torch(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("NSYS", raising=False)
    code, out, _ = launch("-m", "profiler=auto,none", "profiler.steps=4", "dry_run=true")
    assert code == 0 and out.count("profiler=torch") == 1 and "2 cells" in out
    monkeypatch.setenv("NSYS", str(fake(tmp_path)))
    code, out, _ = launch("profiler=auto", "dry_run=true")
    assert code == 0 and "profiler=nsys" in out


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo 'NVIDIA Nsight Systems version 2021.5.1.77'",
            "version 2021.5.1.77; accepted is 2022.4 or newer",
        ),
        ("echo hello", "does not say a version"),
        ("exit 3", "does not say a version"),
    ],
)
def test_a_nsys_that_cannot_be_used_is_refused(tmp_path, script, says):
    path = tmp_path / "nsys"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(Refused, match=f"NSYS={path}: .*{says}"):
        find(None, {"NSYS": str(path), "PATH": os.environ["PATH"]})


def test_the_command_of_nsys():
    nsys = Nsys(Path("/x/nsys"), "2025.3")
    command = nsys.command(Path("/r/trace"), on_gpu=True, graphs=True, capture_range=True)
    assert command[:3] == ["/x/nsys", "profile", "--output=/r/trace"]
    assert {
        "--sample=none",
        "--cpuctxsw=none",
        "--trace=cuda,nvtx",
        "--cuda-graph-trace=node",
    } <= set(command)
    assert command[-2:] == ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    bare = nsys.command(Path("/r/trace"), on_gpu=False, graphs=False, capture_range=False)
    assert "--trace=nvtx" in bare and not any("graph" in word or "capture" in word for word in bare)


def test_an_environment_for_nsys_has_what_ranks_need_and_no_secret():
    found = scrubbed(
        {**PLANTED, **KEPT, "PATH": "/bin:/opt/x@1", "RINGSIDE_TOKEN": TOKEN, "AWS_PROFILE": "x"}
    )
    assert found == {**KEPT, "PATH": "/bin:/opt/x@1", "RINGSIDE_TOKEN": TOKEN}


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "says", "kept"),
    [
        (
            ["echo 'out of memory'; exit 3"],
            "ended with status 3 before any rank failed: out of memory",
            (),
        ),
        (["ranks"], "nsys 2025.3 ended and left no report", ()),
        (
            ["ranks; echo x > $report.qdstrm"],
            "QdstrmImporter is missing; what it recorded is kept",
            ("trace.qdstrm",),
        ),
        (
            [
                'if [ "$1" = export ]; then echo "not a report" >&2; exit 1; fi',
                "ranks; echo x > $report.nsys-rep",
            ],
            "failed with status 1: not a report; the report is kept",
            ("trace.nsys-rep",),
        ),
        (
            [
                'if [ "$1" = export ]; then echo "SQLite format 3" > $made; exit; fi',
                "ranks; echo x > $report.nsys-rep",
            ],
            "not an SQLite file, so not an export of nsys",
            ("trace.nsys-rep",),
        ),
    ],
    ids=["dies", "no report", "no importer", "no export", "foreign export"],
)
def test_a_pass_that_fails_is_a_sentence_and_its_report_is_kept(tmp_path, lines, says, kept):
    found = one_pass(tmp_path, Nsys(fake(tmp_path, *lines), "2025.3"))
    assert found.finding.code == "profiled" and found.finding.severity == "unchecked"
    assert (
        found.finding.sentence.startswith("the profiled pass gave no trace: ")
        and says in found.finding.sentence
    )
    assert (found.metrics, found.tables, found.effective) == ({}, {}, {})
    assert {path.name for path in (tmp_path / "profile").glob("trace*")} == set(kept)


def test_a_nsys_that_ignores_signals_is_ended_with_all_it_started(tmp_path):
    nsys = fake(
        tmp_path, "trap '' TERM INT; ranks", "setsid sleep 600 &", "while :; do sleep 0.1; done"
    )
    found = one_pass(tmp_path, Nsys(nsys, "2025.3"), start_timeout_s=1.0)
    assert "what started them did not end within 1 s" in found.finding.sentence


def test_a_first_try_without_kernels_is_followed_by_one_without_a_capture_range(tmp_path):
    """And the environment that nsys gets has what forbids multicast and no secret."""
    make_export(tmp_path / "empty", [], calls=[(10, 1, 1)])
    steps = [(pid, start, end, "step") for pid in (10, 11) for start, end in ((0, 13), (13, 20))]
    two_ranks(tmp_path / "full", ranges=[*steps, (10, 0, 0, "rank 0"), (11, 0, 0, "rank 1")])
    nsys = fake(
        tmp_path,
        f'if [ "$1" = export ]; then cp $(cat $report) $made; exit; fi; env > {tmp_path}/env.txt; ranks',
        f'case "$*" in *--capture-range*) echo {tmp_path}/empty;; *) echo {tmp_path}/full;; esac > $report.qdstrm; exit 1',
    )
    importer = (
        tmp_path / "host" / "QdstrmImporter"
    )  # nsys does not find its importer, complains, and has it all the same
    importer.parent.mkdir()
    importer.write_text("#!/bin/sh\nmv $2 ${2%.qdstrm}.nsys-rep\n")
    importer.chmod(0o755)
    found = one_pass(tmp_path, Nsys(nsys, "2025.3"), device="cuda")
    assert found.finding.severity == "finding", found.finding
    assert "which supplied no rate" in found.finding.sentence
    traced = found.effective["trace"]
    assert traced["capture_range"] is False and "no GPU kernel" in traced["with_capture_range"]
    # Two steps: communication 8 and 4 ms, of which 4 and 2 beside compute; rank 0 waited 4 ms.
    assert found.metrics == pytest.approx({
        "trace/comm_ms_per_step": 3, "trace/exposed_ms_per_step": 2, "trace/overlapped_ms_per_step": 1,
        "trace/exposed_in_gaps_ms_per_step": 0, "trace/wait_ms_per_step": 1, "trace/nccl_avg_us": 6000, "trace/gpu_idle_share": 0,
    })  # fmt: skip
    assert (
        found.tables["trace"]
        == summarize(within_steps(read_trace(str(tmp_path / "profile")))).to_json()
    )
    assert (tmp_path / "profile" / "timeline.svg").read_text().startswith("<svg")
    assert {path.name for path in (tmp_path / "profile").glob("trace*")} == {
        "trace.nsys-rep",
        "trace.sqlite.gz",
    }
    assert (CellFolder(tmp_path).profile_in_vain.path / "trace.nsys-rep").exists()
    seen = (tmp_path / "env.txt").read_text()
    assert SECRET not in seen and all(f"{name}={value}" in seen for name, value in KEPT.items())


def test_two_tries_in_vain_are_both_said(tmp_path):
    make_export(tmp_path / "empty", [], calls=[(10, 1, 1)])
    export = f'if [ "$1" = export ]; then cp {tmp_path}/empty $made; exit; fi; ranks; echo x > $report.nsys-rep'
    found = one_pass(tmp_path, Nsys(fake(tmp_path, export), "2025.3"), device="cuda")
    assert found.finding.severity == "unchecked"
    assert "is too old for the machine's CUDA driver" in found.finding.sentence
    assert "; without a capture range: " in found.finding.sentence


def test_ranges_without_any_kernel_are_no_trace_of_a_gpu(tmp_path):
    with closing(
        sqlite3.connect(make_export(tmp_path / "a.sqlite", [], ranges=[(10, 0, 1, "step")]))
    ) as made:
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            made.execute(f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}")
        made.commit()
    trace, cell = read_trace(str(tmp_path / "a.sqlite")), make_cell()
    assert profiled_pass._checked(cell, trace) is trace
    with pytest.raises(ValueError, match=r"no GPU kernel was recorded on rank 0.*it is not 0 ms"):
        profiled_pass._checked(dataclasses.replace(cell, device="cuda"), trace)


def test_an_agent_behind_a_profiler_ends_with_the_launcher():
    with subprocess.Popen(["sleep", "600"]) as launcher:
        watch = (
            f"from benchmarks.rank.worker import die_with_launcher as watch; watch({launcher.pid})"
        )
        program = f"{watch}; import time; time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as agent:
            time.sleep(0.5)
            assert agent.poll() is None
            launcher.kill()
            launcher.wait()
            assert agent.wait(timeout=20) == -signal.SIGKILL


# --- what a trace says --------------------------------------------------------------------------------------------


def test_what_belongs_to_no_step_counts_nowhere(tmp_path):
    kernels = [
        (10, 0, 17, 0, 50, REDUCE, 1),  # before the first step
        (10, 0, 7, 60, 64, GEMM, 2),
        (10, 0, 17, 62, 66, REDUCE, 3),
    ]
    calls = [(10, 0, 1), (10, 52, 2), (10, 53, 3)]
    path = make_export(tmp_path / "a.sqlite", kernels, ranges=[(10, 51, 58, "step")], calls=calls)
    metrics = trace_metrics(summarize(within_steps(read_trace(str(path)))))
    assert metrics == pytest.approx({
        "trace/comm_ms_per_step": 4, "trace/exposed_ms_per_step": 2, "trace/overlapped_ms_per_step": 2,
        "trace/exposed_in_gaps_ms_per_step": 0, "trace/nccl_avg_us": 4000, "trace/gpu_idle_share": 0,
    })  # fmt: skip
    assert disagreement(metrics) == {}
    assert disagreement(metrics | {"comm/exposed_ms": 2.5}) == {
        "trace/exposed_disagreement_ms": -0.5
    }


def test_without_communication_or_steps_nothing_is_zero(tmp_path):
    path = make_export(
        tmp_path / "a.sqlite", [(10, 0, 7, 0, 4, GEMM, 1), (10, 0, 7, 5, 10, GEMM, 2)]
    )
    assert trace_metrics(summarize(read_trace(str(path)))) == {
        "trace/gpu_idle_share": pytest.approx(0.1)
    }


def test_a_process_without_a_mark_beside_marked_ones_is_no_rank(tmp_path):
    """A parameter server on a GPU."""
    kernels = [(10, 0, 7, 0, 4, GEMM, 1), (9, 1, 7, 0, 4, GEMM, 1)]
    path = make_export(tmp_path / "a.sqlite", kernels, ranges=[(10, 0, 0, "rank 0")])
    assert [(rank.rank, rank.pid) for rank in read_trace(str(path)).ranks] == [(0, 10)]


# --- a real one ---------------------------------------------------------------------------------------------------


@pytest.mark.needs("nsys")
def test_a_real_nsys_traces_the_ranges_of_two_gloo_ranks(tmp_path):
    nsys = find(None, os.environ)
    found = one_pass(tmp_path, nsys)
    assert found.finding.severity == "finding", found.finding
    ranks = found.tables["trace"]["ranks"]
    assert [(rank["rank"], rank["steps"]["count"]) for rank in ranks] == [(0, 3), (1, 3)]
    assert any("only step times" in note for note in found.tables["trace"]["notes"])
    assert (
        found.metrics == {}
    )  # gloo's calls leave no range: nothing is known of them, and nothing is 0
    inside = tmp_path / "profile"
    trace = read_trace(str(inside / "trace.sqlite.gz"))
    for rank in trace.ranks:
        names = [trace.names[number] for number in rank.ranges["name"].tolist()]
        assert {name: names.count(name) for name in set(names) - {f"rank {rank.rank}"}} == {
            name: 3
            for name in (
                "step",
                "forward",
                "backward",
                "optimizer",
            )  # DDP's exchange is within backward
        }
    assert all(
        SECRET.encode() not in path.read_bytes() for path in inside.rglob("*") if path.is_file()
    )
    assert SECRET.encode() not in gzip.decompress((inside / "trace.sqlite.gz").read_bytes())
    export = subprocess.run(
        [nsys.path, "export", "--type=sqlite", f"--output={tmp_path}/all", inside / "trace.nsys-rep"],
        capture_output=True, check=False,
    )  # fmt: skip
    everything = (tmp_path / "all").read_bytes()
    assert (
        export.returncode == 0
        and TOKEN.encode() in everything
        and SECRET.encode() not in everything
    )
    assert not any(path.stat().st_mode & 0o022 for path in (inside / "ranks").iterdir())
    assert json.loads((inside / "cell.json").read_text())["benchmark"]["name"] == "profiled_pass"
