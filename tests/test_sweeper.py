"""Composing a sweep cheaply gives what Hydra's own sweeper gives, and Ctrl-C ends it with one line."""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
from hydra._internal import hydra as hydras_own
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins import basic_sweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job

from conf import schema
from conf.command_line import normalise
from launch.compose import remembered, sweeper

ROOT = Path(__file__).parent.parent
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# Where Hydra has what reads and merges files: the place, its name, their own, ours.
REMEMBERED = (
    (ConfigRepository, "load_config", remembered.HYDRAS_LOAD, remembered.load_config),
    (
        ConfigLoaderImpl,
        "_compose_config_from_defaults_list",
        remembered.HYDRAS_COMPOSE,
        remembered.compose,
    ),
)
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
        is_hydras = sweep is not sweeper.sweep
        for owner, name, own, ours in REMEMBERED:
            monkeypatch.setattr(owner, name, own if is_hydras else ours)
        monkeypatch.setattr(hydras_own.Hydra, "get_mode", mode)
        monkeypatch.setattr(hydras_own, "run_job", run_job)
        monkeypatch.setattr(Plugins.instance().class_name_to_class[BASIC], "sweep", sweep)
        if is_hydras:  # Hydra's own methods make folders
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
    for _ in range(2):  # from the files, and as it is remembered
        assert jobs(command, sweeper.mode, sweeper.run_one, sweeper.sweep) == expected


@pytest.mark.parametrize(
    ("command", "count"),
    [("gpus=0,3", 1), ("-m gpus=0,3", 1), ("+experiment=scaling full=true", 2)],
)
def test_the_mode_costs_no_composition_where_nothing_sets_it(launch, monkeypatch, command, count):
    composed, own = [], hydras_own.Hydra.compose_config
    monkeypatch.setattr(
        hydras_own.Hydra,
        "compose_config",
        lambda *given, **named: composed.append(1) or own(*given, **named),
    )
    assert launch(*command.split(), "dry_run=true")[0] == 0
    assert len(composed) == count


def test_ctrl_c_while_planning_ends_with_one_line(launch, monkeypatch):
    def pressed(done, jobs):
        if done == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweeper, "_tell", pressed)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores SIGINT
    try:
        ended = launch("-m", "seed=range(0,4)", "dry_run=true")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == (130, "", "launch.py: interrupted, nothing was started\n")


def test_a_file_that_changed_is_read_again_and_one_that_did_not_gives_the_same(launch, tmp_path):
    study = tmp_path / "mine" / "experiment" / "own.yaml"
    study.parent.mkdir(parents=True)
    cells = []
    for gpu in (0, 1, 1):
        study.write_text(f"# @package _global_\ngpus: ['{gpu}']\n")
        code, out, err = launch(
            "--config-dir", str(tmp_path / "mine"), "+experiment=own", "dry_run=true"
        )
        assert (code, err) == (0, "")
        cells += [line.rpartition(" · ")[2] for line in out.splitlines() if " · " in line]
    assert cells == ["gpus 0", "gpus 1", "gpus 1"]
