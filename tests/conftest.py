"""What several test files start from."""

import contextlib
import fcntl
import functools
import gc
import importlib.metadata
import importlib.util
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import faults_seen
import hypothesis
import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from rank_cases import GROUPS

from conf import groups, schema
from conf.cell import Cell
from conf.options import Refused
from launch import compose
from launch.nsys import find
from launch.plan import refusals

ROOT = Path(__file__).parent.parent
IN_NAMESPACES = ROOT / "tests" / "in_namespaces.sh"
hypothesis.settings.register_profile("ringside", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("ringside")
# Else hundreds of processes would compile Ringside anew; pytest-xdist's processes inherit it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
FEW_TESTS_OF_RANKS = 6
LONGEST = """
    test_live_faults test_as_asked test_golden test_own_page test_faulty_sweeps test_end_to_end
    test_across_hosts test_mlflow_ui test_hosts test_compiled_cells test_own_code test_requests
    test_measuring test_calibration test_report test_tracking test_agents test_forecasts
    test_written_paths test_damaged_files test_compose test_sync test_planted
"""

# They leave a context of CUDA in this process, which the checks of later sweeps would see.
USE_CUDA_HERE = ("test_fastest", "test_graphs", "test_p2p_benchmark")


# --- what a test needs beside Python, venv and pip


def has_nsys():
    try:
        return bool(find(None, os.environ))
    except Refused:
        return False


def has_compiler(variable, *usual):
    """Whether the compiler that a variable names is there, or else one of the usual ones."""
    named = os.environ.get(variable, "").split()[:1]
    return any(map(shutil.which, named or usual))


def succeeds(*command, **environment):
    around = {**os.environ, **environment}
    return subprocess.run(command, env=around, capture_output=True, timeout=60).returncode == 0


def has_strace():
    """Whether it is there and may trace: a container can forbid it."""
    return shutil.which("strace") and succeeds("strace", "-f", "true")


def has_mlflow_ui():
    try:
        return bool(importlib.metadata.version("mlflow"))  # mlflow-skinny has no server
    except importlib.metadata.PackageNotFoundError:
        return False


def has(*modules):
    """Whether Python finds all of some modules."""
    return all(importlib.util.find_spec(name) for name in modules)


def has_slurm():
    """Whether the Slurm of .ci/slurm runs; never another, to which a test must not submit."""
    folder = os.environ.get("RINGSIDE_TEST_SLURM")
    if not folder or not shutil.which("scontrol"):
        return False
    return succeeds("scontrol", "ping", SLURM_CONF=f"{folder}/slurm.conf")


# What `@pytest.mark.needs(...)` accepts: how it is found, and what a skipped test says.
NEEDS = {
    "nsys": (has_nsys, "needs Nsight Systems: run .ci/nsys, or put NVIDIA's nsys on PATH"),
    "chromium": (lambda: shutil.which("chromium"), "needs chromium: apt install chromium"),
    "compiler": (
        lambda: has_compiler("CC", "cc", "gcc", "clang"),
        "needs a C compiler: apt install gcc libc6-dev",
    ),
    "C++": (lambda: has_compiler("CXX", "g++"), "needs a C++ compiler: apt install g++"),
    "fish": (lambda: shutil.which("fish"), "needs the shell fish: apt install fish"),
    "strace": (has_strace, "needs strace, allowed to trace: apt install strace"),
    "root": (lambda: os.geteuid() == 0, "needs root: run the tests as root"),
    "latexmk": (
        lambda: shutil.which("latexmk") and shutil.which("pdflatex"),
        "needs LaTeX: apt install latexmk texlive-latex-recommended",
    ),
    "slurm": (
        has_slurm,
        "needs the Slurm that .ci/slurm starts (as root), and its folder in RINGSIDE_TEST_SLURM",
    ),
    "submitit": (lambda: has("submitit"), "needs submitit: pip install -e '.[slurm]'"),
    "namespaces": (
        lambda: succeeds(IN_NAMESPACES, "1gbit", "--", "true"),
        "needs user and network namespaces (unshare -Urnm), ip and tc: apt install iproute2",
    ),
    "delays": (
        lambda: succeeds(IN_NAMESPACES, "-d", "1ms", "1gbit", "--", "true"),
        "needs the namespaces of tests/in_namespaces.sh, and netem or /dev/net/tun",
    ),
    "sshd": (lambda: Path("/usr/sbin/sshd").exists(), "needs an sshd: apt install openssh-server"),
    "mlflow-ui": (has_mlflow_ui, "needs the whole MLflow: pip install -e '.[ui]'"),
    "timm": (lambda: has("timm"), "needs timm: pip install -e '.[timm]'"),
    "jupyter": (
        lambda: has("nbclient", "ipykernel"),
        "needs what runs a notebook: pip install -e '.[notebook]'",
    ),
}


@functools.cache
def lacking(tool):
    """Why a test that needs this tool cannot run here; None where it is there."""
    found, reason = NEEDS[tool]
    return None if found() else reason


OPTIONS = {
    "--skipped-to": "write the tests that were skipped for want of a tool, one a line",
    "--campaign-to": "write what came of every fault of the campaign, as JSON",
}
NUMBERS = {
    "--seed": (1, "what the campaign draws its order and ranks from"),
    "--faults": (None, "take so many faults of one host from the campaign's tables"),
    "--host-faults": (None, "take so many faults of two hosts"),
    "--kills": (200, "how many launchers the campaign kills at random"),
    "--launchers": (20, "how often launchers share a study, and a store"),
}


def pytest_addoption(parser):
    group = parser.getgroup("ringside")
    for name, words in OPTIONS.items():
        group.addoption(name, metavar="FILE", help=words)
    for name, (usual, words) in NUMBERS.items():
        group.addoption(name, type=int, default=usual, metavar="N", help=words)
    group.addoption(
        "--shared-gpu", action="store_true", help="ranks share one GPU; tests of speed are left out"
    )
    group.addoption(
        "--nothing-skipped", action="store_true", help="a test that is skipped counts as failed"
    )


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup(item):
    """Skip a test that needs what is not here."""
    tools = (tool for mark in item.iter_markers("needs") for tool in mark.args)
    if reasons := list(filter(None, map(lacking, tools))):
        pytest.skip("; ".join(reasons))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and item.config.getoption("nothing_skipped"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr[2]} (with --nothing-skipped this is a failure)"
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Write what was skipped for a need, and what the campaign saw.

    pytest-xdist's processes have no terminal, so this runs once.
    """
    outcomes = faults_seen.reported(terminalreporter.stats)
    if outcomes:
        terminalreporter.write_line(faults_seen.summary(outcomes))
    if file := config.getoption("campaign_to"):
        Path(file).write_text(json.dumps(outcomes, indent=1) + "\n")
    if file := config.getoption("skipped_to"):
        skipped = terminalreporter.stats.get("skipped", [])
        lines = [f"{report.nodeid}\n" for report in skipped if "needs" in report.keywords]
        Path(file).write_text("".join(lines))


# --- order, and what several files start from


def pytest_collection_modifyitems(config, items):
    """Modules that take minutes start first, what uses CUDA in this process comes last; of GPUs
    that are shared no speed is judged.
    """
    if config.getoption("shared_gpu"):
        marks = {item: item.get_closest_marker("multi_gpu") for item in items}
        apart = [item for item, mark in marks.items() if mark and not mark.kwargs.get("shared")]
        config.hook.pytest_deselected(items=apart)
        items[:] = [item for item in items if item not in apart]
    order = {name: number for number, name in enumerate(LONGEST.split())}

    def place(item):
        stem = item.path.stem
        return stem in USE_CUDA_HERE and "gpu" in item.keywords, order.get(stem, len(order))

    items.sort(key=place)


def pytest_collection_finish():
    """Keep tests and imports out of garbage collection, a tenth of the time of a request.

    torch computes on one thread, as in a rank: processes with a thread for each core wait.
    """
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def sharing(request):
    """The options of launch.py by which two ranks share the GPU that there is; none of them for two
    GPUs. The study is then DEFAULT-rehearsal: `default*`."""
    return ["rehearse=2"] if request.config.getoption("shared_gpu") else []


@pytest.fixture(scope="session", autouse=True)
def composed_once():
    """Have Hydra compose each choice of groups once in a process: it takes 0.1 s each time."""
    bases, make = {}, compose.Base.__init__

    def share(base, overrides):
        key = tuple(overrides)
        if compose.ConfigDir.folders:  # a test writes files there
            make(base, overrides)
        elif key in bases:
            base.__dict__ = bases[key].__dict__
        else:
            make(base, overrides)
            bases[key] = base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose.Base, "__init__", share)
        yield bases


@pytest.fixture
def hydra():
    """Hydra reads this checkout's configuration; `compose` works inside."""
    GlobalHydra.instance().clear()
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


@pytest.fixture
def alone():
    """A process group of this process alone: its only rank, a CPU worker."""
    import torch
    import torch.distributed as dist

    from benchmarks.rank.ranks import Ranks

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def memory_needed(monkeypatch):
    """Have this process say what memory cells need, not a child, which would import torch anew."""

    def run(command, input, **_):
        from trainers.needed_memory import needed

        try:
            answers = [needed(Cell.from_dict(cell)) for cell in json.loads(input)]
        except Exception:
            return SimpleNamespace(returncode=1)
        return SimpleNamespace(returncode=0, stdout=json.dumps(answers))

    monkeypatch.setattr(refusals, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def launch(monkeypatch, tmp_path, memory_needed):
    """Run launch.py in this process, in an empty folder: (exit status, stdout, stderr)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        out, err = io.StringIO(), io.StringIO()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.raises(SystemExit) as ended,
            ):
                runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
        finally:
            for number, handler in handlers.items():  # an interrupted process ignores them
                signal.signal(number, handler)
            groups.add_config_dir([])  # other tests know nothing of its --config-dir
            compose.ConfigDir.folders = []
        return ended.value.code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def undrawn(monkeypatch):
    """Have matplotlib write empty files: figures take half of the time of a report, and the test
    looks at none of them.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    def savefig(figure, out, **options):
        out.write(b'<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda engine, figure: None)


@pytest.fixture
def refusal(capsys):
    """Call a command of `python -m analysis` that is refused; returns its one sentence."""
    from analysis.__main__ import main

    def said(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return said


@contextlib.contextmanager
def shared_folder(tmp_path_factory, name, part="lock"):
    """Yield a folder that pytest-xdist's processes share, with a lock on a part of it."""
    folder = tmp_path_factory.getbasetemp()  # each process has one in the same folder
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    folder.mkdir(exist_ok=True)
    with (folder / part).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def forked(tmp_path_factory, request):
    """What every rank found in a case of rank_cases: forked(case) is a list by rank.

    Cases run when the first test asks for them, in ranks forked from one process (forked_ranks):
    where few tests were collected only theirs, else with each all of its group, in the same ranks.
    """
    few = sum("forked" in getattr(item, "fixturenames", ()) for item in request.session.items)
    few = few <= FEW_TESTS_OF_RANKS
    servers = []

    def run(folder, names):
        if not servers:
            environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
            command = [sys.executable, ROOT / "tests" / "forked_ranks.py", folder]
            pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
            around = os.environ | environment
            servers.append(subprocess.Popen(command, env=around, text=True, **pipes))
        servers[0].stdin.write(f"{json.dumps(names)}\n")
        servers[0].stdin.flush()
        assert servers[0].stdout.readline() == "done\n", "forked_ranks has ended"

    def read(name):
        names = [name] if few else next(group for group in GROUPS if name in group)
        with shared_folder(tmp_path_factory, "forked", f"{next(iter(names))}.lock") as folder:
            missing = [name for name in names if not any(folder.glob(f"{name}-*"))]
            if missing:
                run(folder, missing)
        errors = [path.read_text() for path in folder.glob(f"{name}-*.error")]
        assert not errors, errors[0]
        return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]

    with shared_folder(tmp_path_factory, "forked") as read.folder:
        pass
    yield read
    for server in servers:
        server.stdin.close()
        server.wait()


@pytest.fixture(scope="session")
def store_template(tmp_path_factory):
    """An initialised store: making one takes seconds."""
    with shared_folder(tmp_path_factory, "template") as folder:
        if not (folder / "mlflow.db").exists():
            from launch.tracking import store

            store.connect(store.store_uri(None, folder), folder / "mlartifacts")
    return folder / "mlflow.db"


@pytest.fixture
def output_dir(tmp_path, store_template):
    """An output folder with an initialised store."""
    folder = (
        tmp_path / "out puts%20#1"
    )  # a space, a percent sign and a hash mean something in a URI
    folder.mkdir()
    shutil.copy(store_template, folder / "mlflow.db")
    return folder
