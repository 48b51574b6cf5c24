"""How the agent decides between forking its ranks and starting them anew (benchmarks.rank.agent); real cells are elsewhere."""

import gc
import os

import pytest
import torch

from benchmarks.rank import agent, lifetime
from trainers import devices


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_ranks_are_forked_by_torchs_launcher(tmp_path):
    config = agent._preloaded(tmp_path, 3)
    assert (config.nproc_per_node, config.start_method, config.max_restarts) == (3, "fork", 0)
    assert getattr(config, "numa_options", None) is None  # torch binds nothing, and asks CUDA nothing


def test_an_agent_that_has_initialised_cuda_starts_ranks_anew(tmp_path, monkeypatch, capsys):
    assert not lifetime.cuda_initialised()
    monkeypatch.setattr(lifetime, "cuda_initialised", lambda: True)
    assert agent._preloaded(tmp_path, 2) is None
    assert capsys.readouterr().err == "ranks start anew: something here has initialised CUDA\n"


def test_a_launcher_that_takes_no_placeholder_starts_ranks_anew(tmp_path, monkeypatch, capsys):
    def refuses(*given, **named):
        raise TypeError("no such field")

    monkeypatch.setattr(agent, "LaunchConfig", refuses)
    assert agent._preloaded(tmp_path, 2) is None
    assert capsys.readouterr().err == "ranks start anew: torch's launcher says TypeError('no such field')\n"


def test_a_worker_on_the_cpu_keeps_its_cores():
    before = os.sched_getaffinity(0)
    devices.stay_near(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before
