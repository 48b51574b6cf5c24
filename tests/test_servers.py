"""Where parameter servers run, and which requests for them are refused on a machine with GPUs."""

import pytest
from build import configuration, environment

from benchmarks.record import CellFolder
from conf.options import Refused
from conf.resolve import checked, resolve, server_gpus
from launch.engines.environment import cell_process_command
from launch.machine.devices import Device, Machine

EVERYONE = (0, 1, 2, 3)
SYNC, ASYNC = "kvstore_dist_sync_device", "kvstore_dist_async_device"
ON_HOST = ("kvstore_dist_sync", "kvstore_dist_async")
# Strategies whose optimizer is not each rank's own.
SERVED = ("cpu_staged", "kvstore_local", "kvstore_device", *ON_HOST, SYNC, ASYNC)


def cell_of(strategy, *overrides, gpus=(0, 1), device="cuda"):
    """The cell of a request on a machine with four GPUs."""
    config, _ = checked(configuration(f"strategy={strategy}", *overrides))
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
    options = {"servers": servers, "server_gpus": "free"}
    assert server_gpus(options, gpus, "cuda", {"": EVERYONE}) == expected


@pytest.mark.parametrize(
    ("servers", "on", "expected"), [(2, "3+1", (3, 1)), (2, "[2,2]", (2, 2)), (1, "0", (0,))]
)
def test_servers_run_where_they_are_asked_to(hydra, servers, on, expected):
    cell = cell_of(SYNC, f"strategy.servers={servers}", f"strategy.server_gpus={on}")
    assert cell.server_gpus == expected


@pytest.mark.parametrize("strategy", [SYNC, ASYNC, *ON_HOST, "nccl_allreduce"])
def test_cpu_workers_and_other_strategies_have_no_gpu_servers(hydra, strategy):
    assert cell_of(strategy, device="cpu").server_gpus == ()
    assert bool(cell_of(strategy).server_gpus) == strategy.endswith("_device")


@pytest.mark.parametrize("strategy", ["nccl_allreduce", "none", *SERVED])
def test_the_loss_scaler_is_for_strategies_whose_ranks_update(hydra, strategy):
    if strategy in SERVED:
        sentence = rf"^precision=fp16: with strategy={strategy} expected auto, fp32, "
        with pytest.raises(Refused, match=sentence):
            cell_of(strategy, "precision=fp16")
    else:
        assert cell_of(strategy, "precision=fp16").precision == "fp16"


@pytest.mark.parametrize("gpus", [(0,), (0, 1), (0, 1, 2, 3)])
def test_the_least_bound_on_staleness_is_accepted(hydra, gpus):
    assert cell_of(ASYNC, f"strategy.max_staleness={len(gpus) - 1}", gpus=gpus)


@pytest.mark.parametrize(
    ("overrides", "processes", "visible"),
    [
        ((SYNC, "strategy.servers=2", "strategy.server_gpus=3+0"), 4, "GPU-1,GPU-0,GPU-3"),
        (("kvstore_dist_sync", "strategy.servers=3"), 5, "GPU-1,GPU-0"),
    ],
)
def test_servers_are_processes_of_the_cell_and_see_their_gpus_behind_the_ranks(
    hydra, tmp_path, overrides, processes, visible
):
    machine = Machine("cuda", tuple(Device(n, f"GPU-{n}") for n in EVERYONE), EVERYONE, 8)
    cell, folder = cell_of(*overrides, gpus=(1, 0)), CellFolder(tmp_path)
    assert cell_process_command(folder, cell, "exec")[-2] == str(processes)
    variables = environment(cell, machine, folder, "t", {})
    assert variables["CUDA_VISIBLE_DEVICES"] == visible


def test_where_servers_run_is_part_of_what_was_asked(hydra):
    first, second = (cell_of(SYNC, f"strategy.server_gpus={gpu}") for gpu in (2, 3))
    assert first.key != second.key
