"""Composing a sweep cheaply gives what Hydra's own sweeper gives, and Ctrl-C ends it with one line."""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
from hydra._internal import hydra as hydras_own
from hydra._internal.core_plugins import basic_sweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job

from conf import schema
from conf.command_line import normalise
from launch.compose import sweeper

ROOT = Path(__file__).parent.parent
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
SWEEPS = (
    "gpus=0,3 seed=1 global_batch_size=8",
    "hydra.mode=MULTIRUN gpus=0+1,0+3",
    "-m gpus=0+1,0+3 strategy=nccl_allreduce,none nccl.other.NCCL_WIN_ENABLE=1 repeats=3",
    "-m nccl.other.NCCL_WIN_ENABLE=1 strategy=none repeats=3 optimizer.momentum=0,0.5 gpus=0+1,0+3",
    "-m seed=1,2 seed=3",
    "-m precision=fp32 seed=1,2 precision=bf16",
    "+experiment=mxnet_bandwidth strategy=kvstore_local optimizer.momentum=0",
    "-m +experiment=nccl_sweep,scaling",
)


def loaded(path):
    """A file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"fresh_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Compose a command with Hydra's three methods or with ours: [(configuration, overrides)]."""
    schema.register()

    def run(command, mode, run_job, sweep):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(hydras_own.Hydra, "get_mode", mode)
        monkeypatch.setattr(hydras_own, "run_job", run_job)
        monkeypatch.setattr(Plugins.instance().class_name_to_class[BASIC], "sweep", sweep)
        if sweep is not sweeper.sweep:  # Hydra's own methods make folders
            monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["launch.py", *normalise(command.split())])
        module = loaded(ROOT / "launch.py")
        module.collect()
        return [(config, sorted(overrides)) for config, overrides in module.composed]

    return run


@pytest.mark.parametrize("command", SWEEPS)
def test_composing_cheaply_gives_what_hydra_gives(jobs, command):
    own = loaded(Path(basic_sweeper.__file__)).BasicSweeper.sweep
    expected = jobs(command, sweeper.HYDRAS_OWN_MODE, run_job, own)
    assert len(expected) > 1 or "scaling" in command or "seed" in command
    assert jobs(command, sweeper.mode, sweeper.run_one, sweeper.sweep) == expected


@pytest.mark.parametrize(
    ("command", "count"), [("gpus=0,3", 1), ("-m gpus=0,3", 1), ("+experiment=scaling full=true", 2)]
)
def test_the_mode_costs_no_composition_where_nothing_sets_it(launch, monkeypatch, command, count):
    composed, own = [], hydras_own.Hydra.compose_config
    monkeypatch.setattr(
        hydras_own.Hydra, "compose_config", lambda *given, **named: composed.append(1) or own(*given, **named)
    )
    assert launch(*command.split(), "dry_run=true")[0] == 0
    assert len(composed) == count


def test_ctrl_c_while_planning_ends_with_one_line(launch, monkeypatch):
    def pressed(done, jobs):
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweeper, "_tell", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        ended = launch("-m", "seed=range(0,4)", "dry_run=true")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == (130, "", "launch.py: interrupted, nothing was started\n")
