"""How the agent decides between forking its ranks and starting them anew; real cells are elsewhere."""

import gc
import os
import signal
import subprocess
import sys
import tempfile

import pytest
import torch

from benchmarks.rank import cell_process, worker
from benchmarks.rank.cell_process import ExitWatcher, NoLogFiles
from trainers.process import stay_near


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_ranks_are_forked_unless_the_agent_has_initialised_cuda(tmp_path, monkeypatch, capsys):
    assert not worker.cuda_initialised()
    assert cell_process._import_for_ranks(tmp_path)
    monkeypatch.setattr(worker, "cuda_initialised", lambda: True)
    assert not cell_process._import_for_ranks(tmp_path)
    assert capsys.readouterr().err == "ranks start anew: something here has initialised CUDA\n"


def test_torch_makes_no_folder_for_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nowhere = NoLogFiles().reify({0: {}, 1: {}})
    assert nowhere.stdouts == nowhere.error_files == {0: "", 1: ""} and nowhere.tee_stdouts == {}
    assert list(tmp_path.iterdir()) == []


SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def ranks():
    """Three processes that sleep."""
    several = [subprocess.Popen(SLEEPER) for _ in range(3)]
    yield several
    for process in several:
        process.kill()
        process.wait()


@pytest.mark.parametrize("with_descriptors", [True, False])
def test_ends_are_seen_in_their_order_with_their_statuses(ranks, monkeypatch, with_descriptors):
    if not with_descriptors:  # as in a container that forbids the call

        def refuses(pid):
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refuses)
    seen = ExitWatcher({number: process.pid for number, process in enumerate(ranks)})
    assert seen.wait(0.01) == []
    ranks[2].kill()
    found = seen.wait(0.2) or seen.wait(0.2)
    assert found == [2] and seen.statuses == {2: -signal.SIGKILL}
    ranks[0].terminate()
    assert (seen.wait(0.2) or seen.wait(0.2)) == [0] and seen.statuses[0] == -signal.SIGTERM
    assert seen.wait(0.01) == []
    assert ranks[2].wait() == -signal.SIGKILL, "the process was left for its parent to reap"


def test_a_process_that_is_just_ending_belongs_to_those_that_ended(ranks, monkeypatch):
    monkeypatch.setattr(cell_process, "LEAVING_SECONDS", 0.05)
    monkeypatch.setattr(cell_process, "_is_ending", lambda pid: pid == ranks[1].pid)
    seen = ExitWatcher({number: process.pid for number, process in enumerate(ranks)})
    ranks[0].kill()
    assert (seen.wait(0.2) or seen.wait(0.2)) == [0]
    assert seen.wait_for_leaving() == [1] and seen.wait_for_leaving() == []
    assert seen.statuses == {0: -signal.SIGKILL, 1: None}


def test_a_worker_on_the_cpu_keeps_its_cores():
    before = os.sched_getaffinity(0)
    stay_near(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before
