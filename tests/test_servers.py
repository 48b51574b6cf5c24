"""Where parameter servers run, and which requests for them are refused on a machine with GPUs."""

import pytest
from hydra import compose
from omegaconf import OmegaConf

from benchmarks.record import CellFolder
from conf.command_line import normalise
from conf.options import Refused
from conf.resolve import checked, resolve, server_gpus
from launch.engines.environment import cell_process_command, environment
from launch.machine.devices import Device, Machine

EVERYONE = (0, 1, 2, 3)
SYNC, ASYNC = "kvstore_dist_sync_device", "kvstore_dist_async_device"
# Strategies whose optimizer is not each rank's own.
SERVED = (
    "cpu_staged",
    "kvstore_local",
    "kvstore_device",
    "kvstore_dist_sync",
    "kvstore_dist_async",
    SYNC,
    ASYNC,
)


def asked(*overrides, gpus=(0, 1), device="cuda"):
    """The cell of a request on a machine with four GPUs."""
    config, _ = checked(OmegaConf.to_object(compose("config", overrides=normalise(overrides))))
    return resolve(config, gpus, device, all_gpus={"": EVERYONE})


@pytest.mark.parametrize(
    ("gpus", "servers", "expected"),
    [
        ((0, 1), 1, (2,)),
        ((3, 0), 2, (1, 2)),
        ((0, 1, 2, 3), 2, (0, 1)),  # none is free: servers share the workers' own
        ((3, 1, 2), 2, (3, 1)),  # too few are free
        ((0,), 4, (0, 0, 0, 0)),
    ],
)
def test_auto_takes_gpus_outside_the_subset_first(gpus, servers, expected):
    assert (
        server_gpus({"servers": servers, "server_gpus": "free"}, gpus, "cuda", {"": EVERYONE})
        == expected
    )


def test_servers_run_where_they_are_asked_to(hydra):
    assert asked(
        f"strategy={SYNC}", "strategy.servers=2", "strategy.server_gpus=3+1"
    ).server_gpus == (3, 1)
    assert asked(
        f"strategy={SYNC}", "strategy.servers=2", "strategy.server_gpus=[2,2]"
    ).server_gpus == (2, 2)
    assert asked(f"strategy={SYNC}", "strategy.server_gpus=0").server_gpus == (0,)


@pytest.mark.parametrize(
    "strategy", [SYNC, ASYNC, "kvstore_dist_sync", "kvstore_dist_async", "nccl_allreduce"]
)
def test_cpu_workers_and_other_strategies_have_no_gpu_servers(hydra, strategy):
    assert asked(f"strategy={strategy}", device="cpu").server_gpus == ()
    assert bool(asked(f"strategy={strategy}").server_gpus) == strategy.endswith("_device")


@pytest.mark.parametrize(
    ("overrides", "starts", "accepts"),
    [
        ([f"strategy={SYNC}", "strategy.servers=5"], "strategy.servers=5: ", "at most 4, the GPUs of this machine"),
        ([f"strategy={SYNC}", "strategy.server_gpus=4"], "strategy.server_gpus=4: ", "auto, or 1 of 0, 1, 2, 3 joined by +"),
        ([f"strategy={SYNC}", "strategy.server_gpus=2+3"], "strategy.server_gpus=2+3: ", "one for each of strategy.servers=1"),
        ([f"strategy={SYNC}", "strategy.servers=2", "strategy.server_gpus=3"], "strategy.server_gpus=3: ", "2 of 0, 1, 2, 3"),
        ([f"strategy={SYNC}", "strategy.server_gpus=x"], "strategy.server_gpus=x: ", "auto, or 1 of"),
        ([f"strategy={SYNC}", "strategy.server_gpus=-1"], "strategy.server_gpus=-1: ", "auto, or 1 of"),
        ([f"strategy={ASYNC}", "strategy.max_staleness=0"], "strategy.max_staleness=0: ", "accepted is at least 1"),
        *(
            ([f"strategy={strategy}", "precision=fp16"], "precision=fp16: ", f"with other strategies than {strategy}")
            for strategy in SERVED
        ),
    ],
)  # fmt: skip
def test_what_no_server_can_do_is_refused_in_one_sentence(hydra, overrides, starts, accepts):
    with pytest.raises(Refused) as refused:
        asked(*overrides)
    sentence = str(refused.value)
    assert sentence.startswith(starts) and accepts in sentence and "\n" not in sentence


def test_the_least_bound_on_staleness_is_accepted(hydra):
    for gpus in ((0,), (0, 1), (0, 1, 2, 3)):
        assert asked(f"strategy={ASYNC}", f"strategy.max_staleness={len(gpus) - 1}", gpus=gpus)


def test_the_loss_scaler_is_for_strategies_whose_ranks_update(hydra):
    assert asked("precision=fp16").precision == "fp16"
    assert asked("precision=fp16", "strategy=none").precision == "fp16"


def test_servers_are_processes_of_the_cell_and_see_their_gpus_behind_the_ranks(hydra, tmp_path):
    machine = Machine("cuda", tuple(Device(n, f"GPU-{n}") for n in EVERYONE), EVERYONE, 8)
    cell = asked(f"strategy={SYNC}", "strategy.servers=2", "strategy.server_gpus=3+0", gpus=(1, 0))
    assert cell_process_command(CellFolder(tmp_path), cell, "exec")[-2] == str(2 + 2)
    assert (
        environment(cell, machine, CellFolder(tmp_path), "t", {})["CUDA_VISIBLE_DEVICES"]
        == "GPU-1,GPU-0,GPU-3"
    )
    host = asked("strategy=kvstore_dist_sync", "strategy.servers=3", gpus=(1, 0))
    assert cell_process_command(CellFolder(tmp_path), host, "exec")[-2] == str(2 + 3)
    assert (
        environment(host, machine, CellFolder(tmp_path), "t", {})["CUDA_VISIBLE_DEVICES"]
        == "GPU-1,GPU-0"
    )


def test_where_servers_run_is_part_of_what_was_asked(hydra):
    one, other = (asked(f"strategy={SYNC}", f"strategy.server_gpus={gpu}") for gpu in (2, 3))
    assert one.key != other.key
