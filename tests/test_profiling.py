"""The profiled pass: what is asked, how nsys is found, what it may see and leaves; a real one.

Fakes of nsys are shell scripts that get the command Ringside gives to nsys. Most end the pass
without ranks (they write the lines that ranks would), so a fault costs no import of torch.
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
from build import ROOT, composed_cell, make_cell, make_record
from traces import GEMM, REDUCE, make_export, two_ranks

from analysis.findings.communication import disagreement
from analysis.trace.source import read_trace
from analysis.trace.steps import within_steps
from analysis.trace.trace_summary import summarize, trace_metrics
from benchmarks.agent import processes
from benchmarks.record import CellFolder, read
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Engine
from launch.engines.engine import CellPass
from launch.engines.environment import scrubbed
from launch.engines.local import LocalEngine
from launch.machine.devices import Device, Machine
from launch.nsys import Nsys, find
from launch.profiled_pass import checked
from launch.run_cell import CellRunner
from launch.study.run_environment import RunEnvironment

TOKEN = "b" * 32
SECRET = "planted-hunter2"
# Names and values that must not reach a report, and what must.
PLANTED = dict.fromkeys(("PLANTED_API_KEY", "NCCL_SECRET_WORD", "PLAIN"), SECRET)
PLANTED["TORCH_URL"] = f"https://me:{SECRET}@x"
KEPT = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
KEPT["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
OPTIONS = {"steps": 3, "warmup_steps": 2}
NAMES = (
    "comm_ms_per_step", "exposed_ms_per_step", "overlapped_ms_per_step",
    "exposed_in_gaps_ms_per_step", "nccl_avg_us", "gpu_idle_share", "wait_ms_per_step",
)  # fmt: skip

# What a fake has of the command: $report, the folder of the pass, and ranks that are done.
HEAD = """#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version 2025.3.2.1-0"; exit 0; fi
for word; do
  folder=$count; count=$last; last=$word
  case $word in --output=*) made=${word#--output=};; *) input=$word;; esac; done
if [ "$1" = export ]; then report=$input; else report=$made; fi
ranks() { for rank in 0 1; do
  echo '{"kind": "start", "time": 1, "pid": 999999999}' > $folder/ranks/$rank.jsonl
  echo '{"kind": "done", "time": 1}' >> $folder/ranks/$rank.jsonl; done; }
"""


def fake(folder, *lines):
    path = folder / "bin" / "nsys"
    path.parent.mkdir()
    path.write_text("\n".join([HEAD, *lines, ""]))
    path.chmod(0o755)
    return path


def one_pass(tmp_path, nsys, device="cpu", cell=None, **engine):
    """The profiled pass of a cell in an empty folder: its finding, and the record with the pass."""
    cell = dataclasses.replace(cell or make_cell(), profiler="nsys", profiler_options=OPTIONS)
    machine = Machine("cpu", (Device(0, "GPU-0"), Device(1, "GPU-1")), (0, 1), 2)
    config = SimpleNamespace(
        engine=Engine(stop_grace_s=0.5, **engine), sample_gpus=False, tuning_pass="auto"
    )
    surrounding, notes = {**os.environ, **PLANTED, **KEPT}, []
    local = LocalEngine(machine, surrounding, config.engine)
    here = RunEnvironment(machine, {})
    study = SimpleNamespace(folder_of=lambda record: folder)
    runner = CellRunner(config, here, study, None, local, nsys, lambda: False, notes.append, None)
    folder = CellFolder(tmp_path)
    on_device = dataclasses.replace(cell, device=device)
    record = make_record(cell=on_device, metrics={}, tables={}, effective={})
    timed = CellPass(record.cell, folder, TOKEN, {})
    traced = runner._profiled(record, timed, lambda watch: None, [])
    local.close()
    assert processes.of(TOKEN) == []
    (finding,) = traced.effective["findings"]
    is_unchecked = finding["severity"] == "unchecked"
    assert notes == [f"{cell.name}: {finding['sentence']}"] * is_unchecked
    if is_unchecked:
        assert (traced.metrics, traced.tables) == ({}, {}) and "trace" not in traced.effective
    return finding, traced


# --- what is asked --------------------------------------------------------------------------------


def test_a_cell_without_a_profiler_keeps_its_key_and_one_with_it_has_another():
    record = read(next((ROOT / "tests" / "data" / "h200_x4").rglob("record*.json")))
    assert record.cell.profiler == "none" and not record.cell.profiler_options
    cell = record.cell
    assert cell.key == record.cell_key
    traced = dataclasses.replace(cell, profiler="nsys", profiler_options=OPTIONS)
    assert len({cell.key, traced.key, dataclasses.replace(traced, profiler="torch").key}) == 3
    assert Cell.from_dict(traced.to_dict()) == traced


def test_a_nsys_that_is_not_there_is_refused_and_auto_is_torch_then(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("NSYS", raising=False)
    code, _, err = launch("profiler=nsys", "dry_run=true")
    says = "launch.py: profiler=nsys: nsys is not on PATH; expected a path to it in "
    assert code == 2 and err.startswith(f"{says}profiler.nsys_path or NSYS")
    assert err.count("\n") == 1
    with pytest.raises(Refused, match=r"^profiler.nsys_path=/nowhere/nsys: is not a program"):
        find("/nowhere/nsys", {})
    code, out, _ = launch("-m", "profiler=auto,none", "profiler.steps=4", "dry_run=true")
    assert code == 0 and out.count("profiler=torch") == 1 and "2 runs" in out
    script = f"benchmark.run=[{ROOT}/tests/data/own_code/src/ddp.py]"
    typed = "profiler=auto", "profiler.nsys_path=/nowhere/nsys", "benchmark=script", script
    code, _, err = launch(*typed, "dry_run=true")
    assert code == 0, f"for a script nsys is not looked for: {err}"
    monkeypatch.setenv("NSYS", str(fake(tmp_path)))
    code, out, _ = launch("profiler=auto", "dry_run=true")
    assert code == 0 and "profiler=nsys" in out


def test_a_nsys_that_cannot_be_used_is_refused(tmp_path):
    path = tmp_path / "nsys"
    for script, says in (
        ("echo 'Nsight Systems version 2021.5.1.77'", "version 2021.5.1.77; expected 2022.4 or"),
        ("echo hello", "does not say a version"),
        ("exit 3", "does not say a version"),
    ):
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        with pytest.raises(Refused, match=f"NSYS={path}: .*{says}"):
            find(None, {"NSYS": str(path), "PATH": os.environ["PATH"]})


def test_the_command_of_nsys():
    nsys = Nsys(Path("/x/nsys"), "2025.3")
    command = nsys.command(Path("/r/trace"), on_gpu=True, graphs=True)
    assert command[:3] == ["/x/nsys", "profile", "--output=/r/trace"]
    assert {"--sample=none", "--cpuctxsw=none", "--trace=cuda,nvtx"} <= set(command)
    assert "--cuda-graph-trace=node" in command
    assert command[-2:] == ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    bare = nsys.command(Path("/r/trace"), on_gpu=False, graphs=False)
    assert "--trace=nvtx" in bare and not any("graph" in word or "capture" in word for word in bare)


def test_an_environment_for_nsys_has_what_ranks_need_and_no_secret():
    needed = {**KEPT, "PATH": "/bin:/opt/x@1", "RINGSIDE_TOKEN": TOKEN}
    assert scrubbed({**PLANTED, **needed, "AWS_PROFILE": "x"}) == needed


# --- faults ---------------------------------------------------------------------------------------

EXPORTS = 'if [ "$1" = export ]; then'
HAS_REPORT = "ranks; echo x > $report.nsys-rep"
REPORT = ("trace.nsys-rep",)
FAULTS = {
    "dies": (["echo 'out of memory'; exit 3"], "before any rank failed: out of memory", ()),
    "no report": (["ranks"], "nsys 2025.3 ended and left no report", ()),
    "no importer": (
        ["ranks; echo x > $report.qdstrm"],
        "QdstrmImporter is missing; what it recorded is kept", ("trace.qdstrm",),
    ),
    "no export": (
        [f'{EXPORTS} echo "not a report" >&2; exit 1; fi', HAS_REPORT],
        "failed with status 1: not a report; the report is kept", REPORT,
    ),
    "foreign export": (
        [f'{EXPORTS} echo "SQLite format 3" > $made; exit; fi', HAS_REPORT],
        "not an SQLite file, so not an export of nsys", REPORT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pass_that_fails_is_a_sentence_and_its_report_is_kept(tmp_path, fault):
    lines, says, kept = FAULTS[fault]
    finding, _ = one_pass(tmp_path, Nsys(fake(tmp_path, *lines), "2025.3"))
    assert (finding["code"], finding["severity"]) == ("profiled", "unchecked")
    assert finding["sentence"].startswith("the profiled pass gave no trace: ")
    assert says in finding["sentence"]
    assert {path.name for path in (tmp_path / "profile").glob("trace*")} == set(kept)


def test_a_nsys_that_ignores_signals_is_ended_with_all_it_started(tmp_path):
    lines = "trap '' TERM INT; ranks", "setsid sleep 600 &", "while :; do sleep 0.1; done"
    finding, _ = one_pass(tmp_path, Nsys(fake(tmp_path, *lines), "2025.3"), start_timeout_s=1.0)
    assert "what started them did not end within 1 s" in finding["sentence"]


def test_a_pass_on_gpus_gives_its_trace_and_nsys_sees_no_secret(tmp_path):
    steps = [(pid, start, end, "step") for pid in (10, 11) for start, end in ((0, 13), (13, 20))]
    two_ranks(tmp_path / "full", ranges=[*steps, (10, 0, 0, "rank 0"), (11, 0, 0, "rank 1")])
    lines = (
        f"{EXPORTS} cp $(cat $report) $made; exit; fi; env > {tmp_path}/env.txt; ranks",
        f"echo {tmp_path}/full > $report.qdstrm; exit 1",
    )
    # nsys does not find its importer, complains, and has it all the same.
    importer = tmp_path / "host" / "QdstrmImporter"
    importer.parent.mkdir()
    importer.write_text("#!/bin/sh\nmv $2 ${2%.qdstrm}.nsys-rep\n")
    importer.chmod(0o755)
    finding, traced = one_pass(tmp_path, Nsys(fake(tmp_path, *lines), "2025.3"), device="cuda")
    assert finding["severity"] == "finding" and "whose rate is not used" in finding["sentence"]
    assert traced.effective["trace"]["capture_range"] is True
    # Two steps: communication 8 and 4 ms, of which 4 and 2 beside compute; rank 0 waited 4 ms.
    assert {name: traced.metrics[f"trace/{name}"] for name in NAMES} == pytest.approx(
        dict(zip(NAMES, (3, 2, 1, 0, 6000, 0, 1), strict=True))
    )
    folder = tmp_path / "profile"
    assert traced.tables["trace"] == summarize(within_steps(read_trace(str(folder)))).to_json()
    assert (folder / "timeline.svg").read_text().startswith("<svg")
    names = {path.name for path in folder.glob("trace*")}
    assert names == {"trace.nsys-rep", "trace.sqlite.gz"}
    seen = (tmp_path / "env.txt").read_text()
    assert SECRET not in seen and all(f"{name}={value}" in seen for name, value in KEPT.items())


def test_the_pass_of_a_script_tells_what_nccl_chose(tmp_path, hydra):
    """It is its tuning pass too: NCCL's logs lie where those of one do. Only scripts keep variables."""
    ran = f"benchmark.run=[{ROOT}/tests/data/own_code/src/ddp.py]"
    cell = dataclasses.replace(composed_cell("benchmark=script", ran), device="cpu")
    log = ROOT / "tests" / "data" / "nccl_h200_x8_default.log"
    lines = f"ranks; cp {log} $folder/nccl/host.1.log", f"env > {tmp_path}/env.txt; exit 1"
    _, traced = one_pass(tmp_path, Nsys(fake(tmp_path, *lines), "2025.3"), "cuda", cell)
    chosen = {(one["function"], one["bytes"]): one for one in traced.effective["choices"]}
    assert (
        chosen["AllReduce", 17348864]["protocol"] == "LL128"
        and "tuning/nccl/host.1.log" in traced.raw_sha256
    )
    seen = (tmp_path / "env.txt").read_text()
    assert "NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING,REG" in seen
    assert f"PLAIN={SECRET}" in seen and "PLANTED_API_KEY" not in seen


def test_ranges_without_any_kernel_are_no_trace_of_a_gpu(tmp_path):
    path = make_export(tmp_path / "a.sqlite", [], ranges=[(10, 0, 1, "step")])
    with closing(sqlite3.connect(path)) as made:
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            made.execute(f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}")
        made.commit()
    trace, cell = read_trace(str(path)), make_cell()
    assert checked(cell, trace) is trace
    with pytest.raises(ValueError, match=r"no GPU kernel was recorded on rank 0.*it is not 0 ms"):
        checked(dataclasses.replace(cell, device="cuda"), trace)


def test_an_agent_behind_a_profiler_ends_with_the_launcher():
    with subprocess.Popen(["sleep", "600"]) as launcher:
        program = (
            f"from benchmarks.rank.worker import die_with_launcher as watch; watch({launcher.pid})"
            "; import time; time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as agent:
            time.sleep(0.5)
            assert agent.poll() is None
            launcher.kill()
            launcher.wait()
            assert agent.wait(timeout=20) == -signal.SIGKILL


# --- what a trace says ----------------------------------------------------------------------------


def test_what_belongs_to_no_step_counts_nowhere(tmp_path):
    kernels = [
        (10, 0, 17, 0, 50, REDUCE, 1),  # before the first step
        (10, 0, 7, 60, 64, GEMM, 2),
        (10, 0, 17, 62, 66, REDUCE, 3),
    ]
    calls = [(10, 0, 1), (10, 52, 2), (10, 53, 3)]
    path = make_export(tmp_path / "a.sqlite", kernels, ranges=[(10, 51, 58, "step")], calls=calls)
    metrics = trace_metrics(summarize(within_steps(read_trace(str(path)))))
    expected = zip(NAMES[:-1], (4, 2, 2, 0, 4000, 0), strict=True)
    assert metrics == pytest.approx({f"trace/{name}": value for name, value in expected})
    assert disagreement(metrics) == {}
    found = disagreement(metrics | {"comm/exposed_ms": 2.5})
    assert found == {"trace/exposed_disagreement_ms": -0.5}


def test_without_communication_nothing_is_zero_and_a_server_is_no_rank(tmp_path):
    kernels = [(10, 0, 7, 0, 4, GEMM, 1), (10, 0, 7, 5, 10, GEMM, 2)]
    path = make_export(tmp_path / "a.sqlite", kernels)
    metrics = trace_metrics(summarize(read_trace(str(path))))
    assert metrics == {"trace/gpu_idle_share": pytest.approx(0.1)}
    # A process without a mark beside marked ones.
    kernels = [(10, 0, 7, 0, 4, GEMM, 1), (9, 1, 7, 0, 4, GEMM, 1)]
    path = make_export(tmp_path / "b.sqlite", kernels, ranges=[(10, 0, 0, "rank 0")])
    assert [(rank.rank, rank.pid) for rank in read_trace(str(path)).ranks] == [(0, 10)]


@pytest.mark.needs("nsys")
def test_a_real_nsys_traces_the_ranges_of_two_gloo_ranks(tmp_path):
    nsys = find(None, os.environ)
    finding, traced = one_pass(tmp_path, nsys)
    assert finding["severity"] == "finding", finding
    table = traced.tables["trace"]
    assert [(rank["rank"], rank["steps"]["count"]) for rank in table["ranks"]] == [(0, 3), (1, 3)]
    assert any("only step times" in note for note in table["notes"])
    assert traced.metrics == {}  # gloo's calls leave no range: nothing is known of them
    inside = tmp_path / "profile"
    for rank in (trace := read_trace(str(inside / "trace.sqlite.gz"))).ranks:
        names = [trace.names[number] for number in rank.ranges["name"].tolist()]
        counts = {name: names.count(name) for name in set(names) - {f"rank {rank.rank}"}}
        # DDP's exchange is within backward.
        assert counts == dict.fromkeys(("step", "forward", "backward", "optimizer"), 3)
    files = [path for path in inside.rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in path.read_bytes() for path in files)
    assert SECRET.encode() not in gzip.decompress((inside / "trace.sqlite.gz").read_bytes())
    everything = f"--output={tmp_path}/all"
    export = [nsys.path, "export", "--type=sqlite", everything, inside / "trace.nsys-rep"]
    assert subprocess.run(export, capture_output=True, check=False).returncode == 0
    data = (tmp_path / "all").read_bytes()
    assert TOKEN.encode() in data and SECRET.encode() not in data
    assert not any(path.stat().st_mode & 0o022 for path in (inside / "ranks").iterdir())
    assert json.loads((inside / "cell.json").read_text())["benchmark"]["name"] == "profiled_pass"
