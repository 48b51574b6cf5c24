"""A sweep under strace: every file that it makes, replaces or removes lies where it may, and nothing is left elsewhere."""

import os
import re
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from build import ROOT

from benchmarks.record import read_study

CALLS = (
    "open,openat,creat,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,link,linkat,truncate,"
    "mknod,mknodat,chmod,fchmodat,chown,lchown,fchownat"
)
ASKED = (
    "gpus=0,1", "model=fmnist_cnn", "strategy=kvstore_dist_sync", "batch_size=4", "benchmark.max_seconds=0.3",
    "benchmark.min_iterations=3", "benchmark.max_iterations=5", "benchmark.warmup_iterations=1",
    "benchmark.warmup_min_seconds=0", "benchmark.warmup_max_seconds=1", "benchmark.exchange_iterations=2",
    "benchmark.limit_iterations=0", "benchmark.exposed_rounds=0", "noise_pairs=0",
)  # fmt: skip
# Folders that libraries keep between runs for every program of the user's, and the variables that name them.
CACHES = {
    "MPLCONFIGDIR": "matplotlib's list of the fonts, else in ~/.cache and ~/.config: to look for them takes seconds",
    "TORCHINDUCTOR_CACHE_DIR": "what torch.compile compiled, else in TMPDIR: torch makes the folder when it is imported",
}
ELSEWHERE = (
    "/dev/null",
    "/dev/shm/ringside-",  # shared memory of a cell, removed once it is mapped
    "/dev/shm/sem.",  # semaphores of multiprocessing, removed at once; torch's agent has queues
)
STRING = r'"((?:[^"\\]|\\.)*)"'
SHOWN_AT = re.compile(rf"(?:AT_FDCWD|\d+)<([^>]*)>, {STRING}")  # a folder, and a path from it
WRITES = r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC"
UMASK = 0o077


def contents(*folders):
    """Every path below some folders, and the hash of what it holds."""
    return {
        path: sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for folder in folders
        for path in folder.rglob("*")
    }


def changed(trace):
    """The paths that a file of strace says were opened for writing, made, renamed or removed."""
    for line in trace.read_text(errors="replace").splitlines():
        call = re.match(r"(\w+)\((.*)\) = (\d+)(?:<(.*)>)?$", line)
        if call is None:
            continue  # it failed
        if call[1].startswith("open") and not re.search(WRITES, call[2]):
            continue
        if call[4]:  # opened: where it really is
            yield call[4].removesuffix(" (deleted)").removesuffix("(deleted)").removesuffix(">")
        elif found := SHOWN_AT.findall(call[2]):
            yield from (os.path.normpath(Path(folder) / path) for folder, path in found)
        else:
            yield from re.findall(STRING, call[2])


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The folders of a sweep, the paths that it changed, and what was in them before."""
    base = tmp_path_factory.mktemp("traced").resolve()
    folders = {}
    for name in ("out", "tmp", "home", "here", "beside", "caches", "trace"):
        folders[name] = base / name
        folders[name].mkdir()
    (folders["home"] / ".netrc").write_text("secret")
    (folders["beside"] / "thesis.tex").write_text("text")
    before = contents(folders["home"], folders["here"], folders["beside"])
    kept = dict(os.environ)
    for name in os.environ:
        if name.startswith(("XDG_", "MLFLOW_")):
            del kept[name]
    environment = kept | dict.fromkeys(CACHES, str(folders["caches"])) | {
        "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folders["tmp"]), "HOME": str(folders["home"]),
        "PYTHONDONTWRITEBYTECODE": "1",  # __pycache__ of the checkout
    }  # fmt: skip
    strace = [*["strace", "-ff", "--seccomp-bpf", "-y", "-s", "4096"], "-e", f"trace={CALLS}"]
    strace += ["-o", folders["trace"] / "of"]
    done = subprocess.run(
        [*strace, sys.executable, ROOT / "launch.py", *ASKED, f"output_dir={folders['out']}"],
        cwd=folders["here"], env=environment, umask=UMASK, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    paths = {path for trace in folders["trace"].iterdir() for path in changed(trace)}
    return folders, paths, before


@pytest.mark.needs("strace")
def test_every_path_that_a_sweep_changes_is_where_it_may_be(traced):
    folders, paths, _ = traced
    out = folders["out"]
    assert len(paths) > 100 and read_study(out / "default")[0][0].state == "finished"
    for written in ("mlflow.db", ".mlflow.db.lock", "default/journal.jsonl", "default/report"):
        assert str(out / written) in paths, "strace sees what is known to be written"
    assert any(path.startswith("/dev/shm/ringside-") for path in paths)
    inside = tuple(f"{folders[name]}/" for name in ("out", "tmp", "caches"))
    assert {path for path in paths if not path.startswith((*inside, *ELSEWHERE))} == set()


@pytest.mark.needs("strace")
def test_a_sweep_leaves_nothing_elsewhere(traced):
    folders, paths, before = traced
    assert contents(folders["home"], folders["here"], folders["beside"]) == before
    assert [path.name for path in folders["tmp"].iterdir()] == []
    assert not [path for path in paths if path.startswith("/dev/shm/") and Path(path).exists()]


@pytest.mark.needs("strace")
def test_no_file_has_a_right_that_the_umask_takes(traced):
    out = traced[0]["out"]
    assert [path for path in out.rglob("*") if path.lstat().st_mode & UMASK] == []
    assert stat.S_IMODE((out / "mlflow.db").stat().st_mode) == 0o600
