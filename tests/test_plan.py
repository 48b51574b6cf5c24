"""From requests to an ordered list of cells, on this machine's CPU workers and on recorded topologies."""

import dataclasses
import socket
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from analysis.study.noise_floor import FILE, Scatter, group_of_cell
from analysis.topology.model import distinct_classes
from analysis.topology.placement import choose_gpus
from analysis.topology.readers import read_topology
from analysis.topology.subsets import classes
from benchmarks.record import CellFolder
from conf import schema
from conf.command_line import normalise
from conf.host_limits import usable_cores
from conf.options import Refused
from launch.engines.environment import environment
from launch.machine.devices import Device, Machine, look
from launch.plan.order import PlannedCell, choose_replicates, known_freedom, ordered
from launch.plan.plan import Request, plan

ROOT = Path(__file__).parent.parent
DGX1 = str(ROOT / "tests" / "data" / "topo_dgx1_v100.txt")
H200 = str(ROOT / "tests" / "data" / "topo_h200_x8.txt")


def planned(*combinations: list[str], surrounding: dict[str, str] | None = None):
    """Plan a sweep of composed combinations."""
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        requests = [
            Request(
                OmegaConf.to_object(compose("config", normalise(["device=cpu", *typed]))), typed
            )
            for typed in combinations
        ]
    return plan(requests, {} if surrounding is None else surrounding)


def subsets(plan_) -> list[tuple[int, ...]]:
    return [entry.cell.gpus for entry in plan_.cells]


def test_words_name_subsets_of_the_cores():
    cores = min(usable_cores(), 8)
    every = tuple(range(cores))
    assert subsets(planned(["gpus=all"])) == [every]
    assert subsets(planned(["gpus=each"])) == [(slot,) for slot in every]
    assert subsets(planned(["gpus=0,3"])) == [(0, 3)]  # slots exist beyond the cores
    assert subsets(planned(["gpus=3,0"])) == [(3, 0)]  # the order is the rank order


def test_baselines_and_cells_with_fewer_settings_come_first():
    asked = [["gpus=0,1", "nccl.p2p_level=LOC"], ["gpus=0,1"], ["gpus=0"]]
    sweep = planned(*([*typed, f"topology={DGX1}", "dry_run=true"] for typed in asked))
    assert [(entry.cell.gpus, bool(entry.cell.nccl)) for entry in sweep.cells] == [
        ((0,), False),
        ((0, 1), False),
        ((0, 1), True),
    ]


def test_repeats_are_shuffled_by_the_seed_and_end_with_the_first_cell():
    combinations = [
        [f"gpus={gpus}", "repeats=3", "seed=7"] for gpus in ("0", "1", "2", "0,1", "0,2")
    ]
    order = planned(*combinations).cells
    assert len(order) == 3 * 5 + 1
    for repeat in range(3):
        turn = order[5 * repeat : 5 * repeat + 5]
        assert {entry.cell.repeat for entry in turn} == {repeat}
        assert len({entry.cell.gpus for entry in turn}) == 5
    assert order[-1].drift and order[-1].cell.gpus == order[0].cell.gpus
    assert len({entry.cell.key for entry in order}) == 16
    assert subsets(planned(*combinations)) == [entry.cell.gpus for entry in order]
    other = planned(*[[*typed[:2], "seed=8"] for typed in combinations])
    assert subsets(other) != [entry.cell.gpus for entry in order]


def test_later_repeats_favour_nothing_and_the_drift_run_is_no_repeat():
    asked = [
        ["gpus=0,1", "repeats=12", *setting]
        for setting in ([], ["nccl.p2p_level=LOC"], ["nccl.algo=Ring"])
    ]
    order = planned(["gpus=0", "repeats=12"], *asked).cells
    turns = [order[4 * repeat : 4 * repeat + 4] for repeat in range(12)]
    assert turns[0][0].cell.world_size == 1 and turns[0][1].cell.nccl == {}
    places = {
        tuple((one.cell.world_size, len(one.cell.nccl)) for one in turn) for turn in turns[1:]
    }
    assert len(places) > 3, "one order in every turn"
    assert (order[-1].drift, order[-1].cell.repeat) == (True, -12)


CALIBRATING = (
    ["gpus=0,1,2,3"], ["gpus=0,1", "nccl.p2p_level=LOC"], ["gpus=0,1", "batch_size=8"], ["gpus=0,1"],
    ["gpus=0,1", "strategy=none"], ["gpus=0,1", "benchmark=collectives"], ["gpus=1"], ["gpus=0"],
)  # fmt: skip


def predicted(*more):
    return planned(
        *(
            [*typed, f"topology={DGX1}", "dry_run=true", "noise_pairs=0", *more]
            for typed in CALIBRATING
        )
    )


def test_with_forecasts_the_cells_come_first_that_the_others_are_forecast_from():
    sweep = predicted("predict=auto")
    cells = [one.cell for one in sweep.cells]
    assert [cell.gpus for cell in cells] == [(1,), (0,), *[(0, 1)] * 5, (0, 1, 2, 3)]
    kinds = [(cell.benchmark["name"], cell.strategy["name"], len(cell.nccl)) for cell in cells[2:7]]
    assert (
        kinds[0][0] == "collectives"
        and kinds[1][1] == "none"
        and [one[2] for one in kinds] == [0, 0, 0, 0, 1]
    )
    assert "says before each cell what it should give" in " ".join(sweep.notices)
    assert all(cell.benchmark["calibrate"] == "all" for cell in cells if cell.trains)


def test_with_forecasts_later_repeats_favour_nothing():
    turns = {}
    for predict in ("auto", "false"):
        order = predicted(f"predict={predict}", "repeats=3").cells
        turns[predict] = [
            [(one.cell.gpus, one.cell.nccl, one.cell.name) for one in order[8 * n : 8 * n + 8]]
            for n in range(3)
        ]
        assert order[-1].drift and order[-1].cell.gpus == order[0].cell.gpus
    assert turns["auto"][1:] == turns["false"][1:] and turns["auto"][0] != turns["false"][0]
    assert [len(gpus) for gpus, *_ in turns["auto"][0]] == [1, 1, 2, 2, 2, 2, 2, 4]


def test_a_calibration_that_was_chosen_stays():
    for level in ("none", "timeline", "all"):
        (cell,) = planned(["gpus=0,1", "predict=auto", f"benchmark.calibrate={level}"]).cells
        assert cell.cell.benchmark.get("calibrate", "timeline") == level
    assert (
        planned(["gpus=0,1"]).cells[0].cell.key
        != planned(["gpus=0,1", "predict=auto"]).cells[0].cell.key
    )
    assert (
        planned(["gpus=0,1"]).cells[0].cell.key
        == planned(["gpus=0,1", "predict=false"]).cells[0].cell.key
    )
    with pytest.raises(Refused, match="predict=true: accepted are auto or false"):
        planned(["gpus=0,1", "predict=true"])
    with pytest.raises(Refused, match="a sweep has one predict"):
        planned(["gpus=0,1", "predict=auto"], ["gpus=0"])


def test_a_waterfall_has_its_control_cells_once():
    sweep = planned(
        ["gpus=scale", "waterfall=true", "profiler=torch"],
        ["gpus=0,1", "strategy=none", "waterfall=true"],
    )
    cells = {(one.cell.strategy["name"], one.cell.gpus): one.cell.profiler for one in sweep.cells}
    found = [(one.cell.strategy["name"], one.cell.gpus, one.cell.profiler) for one in sweep.cells]
    for gpus in ((0,), (1,)):
        assert ("none", gpus, "none") in found and ("nccl_allreduce", gpus, "none") in found
    assert ("nccl_allreduce", (0, 1), "torch") in found and cells["none", (0, 1)] == "none"
    assert not any("asked for twice" in notice for notice in sweep.notices)


def test_a_waterfall_that_adds_no_cell_says_so():
    asked = ([], ["gpus=0,1"], ["strategy=none", "gpus=0,1"], ["benchmark=p2p", "gpus=0,1"])
    told = [planned(["gpus=0", "waterfall=true", *more]).notices for more in asked]
    assert [any("waterfall=true adds no cell" in one for one in notices) for notices in told] == [
        True,
        False,
        True,
        True,
    ]
    assert not any("waterfall" in one for one in planned(["gpus=0"]).notices)


def test_gpus_alone_are_measured_once_where_nccls_settings_are_swept():
    sweep = planned(
        ["gpus=0"], ["gpus=0", "nccl.p2p_level=LOC"], ["gpus=0,1", "nccl.p2p_level=LOC"]
    )
    assert [(one.cell.gpus, bool(one.cell.nccl)) for one in sweep.cells] == [
        ((0,), False),
        ((0, 1), True),
    ]
    assert any("NCCL settings have no effect on CPU workers" in notice for notice in sweep.notices)
    assert not any("GPU alone" in notice for notice in sweep.notices)
    elsewhere = ["gpus=0", f"topology={H200}", "dry_run=true"]
    on_gpus = planned(elsewhere, [*elsewhere, "nccl.p2p_level=LOC"])
    assert any("NCCL settings do not reach a GPU alone" in notice for notice in on_gpus.notices)
    alone = planned(["gpus=0", "nccl.p2p_level=LOC"])
    assert alone.cells[0].cell.nccl == {"NCCL_P2P_LEVEL": "LOC"}, (
        "it was asked for, and nothing stands for it"
    )


def test_words_by_link_mean_the_first_cpu_workers():
    sweep = planned(["gpus=best:2"], ["gpus=worst:1"])
    assert subsets(sweep) == [(0,), (0, 1)]
    assert any("CPU workers have no links" in notice for notice in sweep.notices)


def test_strong_scaling_has_a_batch_that_one_gpu_holds_and_all_share():
    cells = planned(
        ["gpus=scale", "global_batch_size=auto", f"topology={DGX1}", "dry_run=true"]
    ).cells
    assert [(one.cell.world_size, one.cell.batch_size) for one in cells] == [
        (1, 256),
        (2, 128),
        (4, 64),
        (8, 32),
    ]
    assert {one.cell.global_batch_size for one in cells} == {256}


def test_equal_cells_are_measured_once():
    sweep = planned(["gpus=0,1"], ["gpus=0,1", "batch_size=8"], ["gpus=1,0"])
    assert subsets(sweep) == [
        (0, 1),
        (1, 0),
    ]  # batch 8 is what auto means for ResNet-50 on a CPU worker
    assert any("asked for twice" in notice for notice in sweep.notices)


def test_a_sweep_has_one_study():
    with pytest.raises(Refused, match="study=a,b: a sweep has one study"):
        planned(["study=a"], ["study=b"])


def test_more_cpu_workers_than_cores_are_told():
    sweep = planned(["gpus=0,1,2,3,4,5,6,7"])
    assert any("8 CPU workers share" in notice for notice in sweep.notices) == (usable_cores() < 8)


def test_threads_that_cpu_workers_do_not_take_are_told():
    share = planned(["gpus=0"]).machine.threads
    for said, told in ((str(share), 0), (str(share + 1), 1)):
        notices = planned(["gpus=0"], surrounding={"OMP_NUM_THREADS": said}).notices
        words = f"OMP_NUM_THREADS={said} has no effect on CPU workers: each has {share} thread"
        assert sum(words in notice for notice in notices) == told


def test_no_gpu_is_said_once_and_settings_are_not_applicable():
    sweep = planned(["gpus=0", "nccl.p2p_level=LOC"], ["gpus=0,1"])
    assert sum("no GPU is used" in notice for notice in sweep.notices) == 1
    assert sum("have no effect" in notice for notice in sweep.notices) == 1


@pytest.mark.parametrize(("topology", "expected"), [(DGX1, 56 + 1), (H200, 7 + 1)])
def test_classes_of_recorded_machines(topology, expected):
    sweep = planned(["gpus=classes", f"topology={topology}", "dry_run=true", "noise_pairs=0"])
    assert len(sweep.cells) == expected
    assert sweep.cells[0].cell.gpus == (0,)


def test_sizes_best_worst_and_second_members():
    dgx1 = [f"topology={DGX1}", "dry_run=true", "noise_pairs=0"]
    assert len(planned(["gpus=classes:3", *dgx1]).cells) == 7
    assert len(planned(["gpus=classes:2", "second_member=true", *dgx1]).cells) == 6
    topology = read_topology(DGX1)
    for word, expected in (("best:2", "NV2"), ("worst:2", "SYS")):
        (subset,) = subsets(planned([f"gpus={word}", *dgx1]))
        assert distinct_classes(subset, topology.to_json()["links"]) == expected
    placement = choose_gpus(topology, 8)
    worst_order = placement.worst_order.order
    assert subsets(planned(["gpus=worst_order:8", *dgx1])) == [worst_order]
    assert set(worst_order) == set(range(8)) and worst_order != placement.best.order
    assert [one.size for one in classes(topology, 2)] == [2, 2, 2]
    with pytest.raises(Refused, match="classes:9: accepted is a size of 1 to 8"):
        planned(["gpus=classes:9", *dgx1])


def test_gpus_of_servers_are_said_to_have_no_effect_on_cpu_workers():
    asked, said = (
        ["gpus=0,1", "strategy=kvstore_dist_sync_device"],
        "strategy.server_gpus has no effect on CPU workers",
    )
    told = [planned([*asked, *more]).notices for more in ([], ["strategy.server_gpus=9"])]
    assert [any(said in notice for notice in notices) for notices in told] == [False, True]


def test_topology_words_need_a_topology(tmp_path):
    broken = tmp_path / "topo.txt"
    broken.write_text("nothing of the kind\n")
    with pytest.raises(Refused, match="needs the machine's topology"):
        planned(["gpus=classes", f"topology={broken}", "dry_run=true"])
    with pytest.raises(
        Refused, match=r"machine's topology; .*absent\.txt: no such file or directory$"
    ):
        planned(["gpus=classes", f"topology={tmp_path / 'absent.txt'}", "dry_run=true"])


def test_every_surrounding_variable_but_another_launchers_reaches_the_ranks(tmp_path):
    cell = planned(["gpus=0,1", "nccl.p2p_level=LOC"]).cells[0].cell
    safe = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    made = environment(
        cell,
        look("cpu", {}),
        CellFolder(tmp_path),
        "t",
        {**safe, "RANK": "3", "MASTER_PORT": "1", "HOME": "h"},
    )
    assert {name: made[name] for name in safe} == safe
    assert made["HOME"] == "h" and "RANK" not in made and "MASTER_PORT" not in made
    assert "NCCL_P2P_LEVEL" not in made  # a CPU worker has no NCCL


@pytest.mark.parametrize(("ranks", "lazily"), [(64, None), (65, "1")])
def test_many_ranks_connect_only_where_they_speak(ranks, lazily, tmp_path):
    cell = dataclasses.replace(planned(["gpus=0"]).cells[0].cell, gpus=tuple(range(ranks)))
    made = environment(cell, look("cpu", {}), CellFolder(tmp_path), "t", {})
    assert made.get("TORCH_GLOO_LAZY_INIT") == lazily


def test_gpu_ranks_get_their_gpus_in_order_and_an_empty_nccl_conf(tmp_path):
    machine = Machine("cuda", tuple(Device(n, f"GPU-{n}") for n in range(4)), (0, 1, 2, 3), 8)
    cell = planned(["gpus=3,0", "nccl.p2p_level=LOC"]).cells[0].cell
    cell = dataclasses.replace(cell, device="cuda")
    made = environment(
        cell, machine, CellFolder(tmp_path), "t", {"NCCL_P2P_LEVEL": "SYS", "NCCL_NVLS_ENABLE": "0"}
    )
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-3,GPU-0"
    assert made["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made["NCCL_P2P_LEVEL"] == "LOC" and made["NCCL_NVLS_ENABLE"] == "0"
    assert made["NCCL_CONF_FILE"] == str(tmp_path / "nccl" / "nccl.conf")


def test_control_cells_have_labels_of_their_own():
    """A control cell of strong scaling names the images per rank that it has, and neither profiler nor another's options."""
    combination = ["gpus=0,1", "waterfall=true", "global_batch_size=8", "optimize=compile", "profiler=torch",
                   "strategy.comm_hook=bf16"]  # fmt: skip
    cells = [
        entry.cell for entry in planned(combination, surrounding={"CXX": sys.executable}).cells
    ]
    found = {(one.strategy["name"], one.world_size): one.labels for one in cells}
    assert found == {
        ("none", 1): ("batch 4", "compile"),
        ("nccl_allreduce", 1): ("batch 4", "compile", "comm_hook=bf16"),
        ("none", 2): ("batch 4", "compile"),
        ("nccl_allreduce", 2): ("global batch 8", "compile", "comm_hook=bf16", "profiler=torch"),
    }


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, r"g\+\+"),
        ({"CXX": "clang++ -m64"}, r"clang\+\+ -m64"),
        ({"CXX": ""}, "CXX="),
        ({"CXX": sys.executable}, ""),
    ],
)
def test_a_compiled_cell_on_cpu_workers_needs_the_compiler_that_torch_calls(
    variables, named, tmp_path
):
    around = {"PATH": str(tmp_path), **variables}
    planned(["gpus=0"], surrounding=around)
    planned(
        ["gpus=0", "optimize=max", "nodes=a,b", "engine=ssh", "dry_run=true"], surrounding=around
    )  # of other hosts nothing is known
    if not named:
        assert planned(["gpus=0", "optimize=max"], surrounding=around).cells
        return
    with pytest.raises(
        Refused,
        match=f"^optimize=max: needs a C\\+\\+ compiler on CPU workers, and {named} is not found; ",
    ):
        planned(["gpus=0", "optimize=max"], surrounding=around)


@pytest.fixture(scope="module")
def eight():
    """The cells and the configuration of a sweep over eight subsets."""
    sweep = planned(
        *[
            [f"gpus={gpus}", "noise_pairs=0"]
            for gpus in ("0", "1", "2", "3", "0,1", "0,2", "1,2", "0,1,2")
        ]
    )
    assert len(sweep.cells) == 8
    return [entry.cell for entry in sweep.cells], dataclasses.replace(
        sweep.config, noise_pairs="auto"
    )


def twice(eight, known=None, was=lambda cell: False, count=8, **config):
    """The order of a sweep's first cells, and {subset that runs a second time: other cells in between}."""
    cells, asked = eight[0][:count], dataclasses.replace(eight[1], **config)
    chosen = choose_replicates(cells, asked, known or {}, was)
    order = ordered(cells, asked.repeats, asked.seed, chosen)
    keys = [dataclasses.replace(entry.cell, repeat=0).key for entry in order]
    return order, {
        entry.cell.gpus: at - keys.index(keys[at]) - 1
        for at, entry in enumerate(order)
        if entry.run_suffixes
    }


def test_a_longer_list_measures_one_cell_in_four_a_second_time(eight):
    assert twice(eight, count=4) == ([PlannedCell(cell) for cell in eight[0][:4]], {})
    assert twice(eight, noise_pairs=0)[1] == {}
    order, found = twice(eight)
    assert len(order) == 10 and len({entry.cell.key for entry in order}) == 10 and len(found) == 2
    assert sorted(entry.run_suffixes for entry in order)[-3:] == [
        [],
        ["second run"],
        ["second run"],
    ]
    assert twice(eight) == (order, found)
    assert all(entry.run_suffixes != ["second run"] for entry in twice(eight, repeats=2)[0]), (
        "repeats are pairs enough"
    )
    links = planned(["benchmark=collectives", "noise_pairs=auto"]).cells[0].cell
    many = [dataclasses.replace(links, gpus=(gpu,)) for gpu in range(8)]
    assert twice((many, eight[1]))[1] == {}, "no cell has a model"
    assert len(twice((many, eight[1]), noise_pairs=3)[1]) == 3


def test_a_second_run_is_never_directly_after_the_first(eight):
    for count in (2, 3, 5, 8):
        for pairs in range(1, count + 1):
            for seed in range(5):
                order, found = twice(eight, count=count, noise_pairs=pairs, seed=seed)
                assert (
                    len(found) == pairs and len(order) == count + pairs and min(found.values()) > 0
                ), order


def test_the_group_of_which_least_is_known_runs_a_second_time_first(eight):
    def known(*freedom):
        rows = {
            (group_of_cell(cell, socket.gethostname()), "throughput/images_per_second"): Scatter(
                one + 1, one, 1e-6
            )
            for cell, one in zip((eight[0][0], eight[0][4], eight[0][7]), freedom, strict=True)
        }
        return known_freedom(rows)

    def sizes(freedom):
        return [len(gpus) for gpus in twice(eight, freedom)[1]]

    assert len(sizes({})) == 2
    assert sorted(sizes(known(5, 5, 1)))[1] == 3
    assert sizes(known(5, 1, 5)) == [2, 2] and sizes(known(1, 5, 5)) == [1, 1]
    assert sizes(known(50, 50, 50)) != [] and len(sizes(known(50, 50, 50))) == 1, (
        "one pair keeps the floor fresh"
    )


def test_a_sweep_that_goes_on_has_the_second_runs_that_it_had(eight):
    _, first = twice(eight)
    for gpus in ((0, 1), (3,)):
        _, found = twice(eight, was=lambda cell: cell.gpus == gpus)  # noqa: B023
        assert gpus in found and len(found) == len(first)
    _, found = twice(eight, was=lambda cell: cell.gpus in first, seed=5)
    assert found.keys() == first.keys()


def test_the_plan_says_which_cells_run_a_second_time(tmp_path):
    typed = [[f"gpus={gpus}", f"output_dir={tmp_path}"] for gpus in ("0", "1", "2", "0,1", "0,2")]
    sweep = planned(*typed)
    assert any(notice.startswith("1 of 5 cells runs a second time") for notice in sweep.notices)
    (again,) = [entry.cell for entry in sweep.cells if entry.run_suffixes]
    (tmp_path / FILE).write_text("not json")
    CellFolder(tmp_path / "default" / again.folder).make().record.write_text("{}")
    assert [entry.cell.key for entry in planned(*typed).cells] == [
        entry.cell.key for entry in sweep.cells
    ]


def test_pairs_and_repeats_are_not_asked_for_together():
    with pytest.raises(Refused, match="noise_pairs=2: accepted are auto and 0 with repeats=3"):
        planned(["gpus=0", "noise_pairs=2", "repeats=3"])
