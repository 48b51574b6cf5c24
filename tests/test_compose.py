"""The compose API gives what Hydra's own sweeper gives, quickly, and Ctrl-C ends it with one line."""

import os
import signal
import sys

import hydra
import pytest
from build import ROOT
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf import command_line, schema
from launch import compose

COMMANDS = (
    "gpus=0,3 seed=1 global_batch_size=8",
    "-m gpus=0+1,0+3 strategy=nccl_allreduce,none nccl.other.NCCL_WIN_ENABLE=1 repeats=3",
    "-m optimizer.momentum=0,0.5 optimizer.beta1=0.5 optimizer.name=sgd,adamw",
    "-m model=glob(resnet1*) seed=range(0,2)",
    "-m +data.options={a:1},{a:2} seed=1,2",
    "full=True +experiment=mxnet_bandwidth strategy=kvstore_local optimizer.momentum=0",
    "-m full=True +experiment=nccl_sweep,scaling",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_requests_are_those_of_hydras_own_sweeper(command, monkeypatch, tmp_path):
    jobs = []

    @hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="config")
    def collect(config):
        jobs.append((OmegaConf.to_object(config), sorted(HydraConfig.get().overrides.task)))

    line = command_line.read(command.split())
    options = [word for word in command.split() if word == "-m"]
    schema.register()
    GlobalHydra.instance().clear()
    monkeypatch.chdir(tmp_path)  # Hydra makes folders
    monkeypatch.setattr(
        sys, "argv", ["launch.py", *options, *command_line.normalise(line.overrides)]
    )
    collect()
    requests, _ = compose.requests_of(line, {"CUDA_VISIBLE_DEVICES": ""})
    assert [(request.config, sorted(request.overrides)) for request in requests] == jobs
    assert len(jobs) > 1 or "seed" in command


@pytest.mark.parametrize(
    ("command", "compositions"),
    [
        ("gpus=0,3", 1),
        ("-m gpus=0,3 nccl.p2p_level=LOC", 1),
        ("-m seed=range(0,50) gpus=0,3 optimizer.momentum=0,0.5", 1),
        ("-m strategy=nccl_allreduce,none seed=1,2,3", 3),
        ("+experiment=scaling full=true", 1),
    ],
)
def test_each_combination_of_choices_is_composed_once(
    launch, monkeypatch, composed_once, command, compositions
):
    composed_once.clear()
    composed, own = [], compose.compose
    monkeypatch.setattr(
        compose, "compose", lambda *given, **named: composed.append(1) or own(*given, **named)
    )
    assert launch(*command.split(), "dry_run=true")[0] == 0
    assert len(composed) == compositions


def test_a_value_that_refers_to_another_one_follows_it(launch, tmp_path):
    study = tmp_path / "mine" / "experiment" / "own.yaml"
    study.parent.mkdir(parents=True)
    study.write_text("# @package _global_\nbatch_size: ${seed}\n")
    arguments = (
        "--config-dir", str(tmp_path / "mine"), "-m", "+experiment=own", "gpus=0", "seed=3,4",
        "dry_run=true",
    )  # fmt: skip
    code, out, err = launch(*arguments)
    assert (code, err) == (0, "") and "batch 3" in out and "batch 4" in out


def test_ctrl_c_while_planning_ends_with_one_line(launch, monkeypatch):
    own = compose.Base.with_values

    def pressed(base, overrides):
        signal.raise_signal(signal.SIGINT)
        return own(base, overrides)

    monkeypatch.setattr(compose.Base, "with_values", pressed)
    monkeypatch.setattr(os, "_exit", sys.exit)  # it would end the tests
    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores SIGINT
    try:
        ended = launch("-m", "seed=range(0,4)", "dry_run=true")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == (130, "", "launch.py: interrupted, nothing was started\n")


def test_a_file_that_changed_is_read_again(launch, tmp_path):
    study = tmp_path / "mine" / "experiment" / "own.yaml"
    study.parent.mkdir(parents=True)
    for gpu in (0, 1):
        study.write_text(f"# @package _global_\ngpus: ['{gpu}']\n")
        code, out, err = launch(
            "--config-dir", str(tmp_path / "mine"), "+experiment=own", "dry_run=true"
        )
        assert (code, err) == (0, "") and f" · gpus {gpu}\n" in out
