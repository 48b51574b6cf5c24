"""From requests to an ordered list of cells, on CPU workers and on recorded topologies."""

import dataclasses
import functools
import itertools
import socket
import sys

import pytest
from build import ROOT, environment
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from analysis.study.noise_floor import FILE, Scatter, group_of_cell
from benchmarks.record import CellFolder
from conf import schema
from conf.command_line import normalise
from conf.host import usable_cores
from conf.options import Refused
from launch.machine.devices import look
from launch.plan.order import PlannedCell, choose_replicates, known_freedom, ordered
from launch.plan.plan import Request, plan

DGX1 = str(ROOT / "tests" / "data" / "topo_dgx1_v100.txt")
H200 = str(ROOT / "tests" / "data" / "topo_h200_x8.txt")
ON_DGX1 = [f"topology={DGX1}", "dry_run=true", "noise_pairs=0"]


@functools.cache
def composed(*typed):
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", normalise(["device=cpu", *typed]))


def planned(*combinations, surrounding=None):
    """Plan a sweep of composed combinations."""
    requests = []
    for typed in combinations:
        requests.append(Request(OmegaConf.to_object(composed(*typed)), typed))
    return plan(requests, surrounding or {})


def cells_of(*combinations, **named):
    return [entry.cell for entry in planned(*combinations, **named).cells]


def subsets(plan_):
    return [entry.cell.gpus for entry in plan_.cells]


def says(plan_, words):
    """How many notices of a plan have some words."""
    return sum(words in notice for notice in plan_.notices)


def test_words_name_subsets_of_the_cores():
    every = tuple(range(min(usable_cores(), 8)))
    words = {"all": [every], "each": [(slot,) for slot in every]}
    words |= {"0,3": [(0, 3)]}  # slots exist beyond the cores
    words |= {"3,0": [(3, 0)]}  # the order is the rank order
    for word, expected in words.items():
        assert subsets(planned([f"gpus={word}"])) == expected


def test_baselines_and_cells_with_fewer_settings_come_first():
    asked = [["gpus=0,1", "nccl.p2p_level=LOC"], ["gpus=0,1"], ["gpus=0"]]
    sweep = planned(*([*typed, *ON_DGX1] for typed in asked))
    found = [(entry.cell.gpus, bool(entry.cell.nccl)) for entry in sweep.cells]
    assert found == [((0,), False), ((0, 1), False), ((0, 1), True)]


def test_repeats_are_shuffled_by_the_seed_and_end_with_the_first_cell():
    every = ("0", "1", "2", "0,1", "0,2")
    combinations = [[f"gpus={gpus}", "repeats=3", "seed=7"] for gpus in every]
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
    settings = ([], ["nccl.p2p_level=LOC"], ["nccl.algo=Ring"])
    asked = [["gpus=0,1", "repeats=12", *setting] for setting in settings]
    order = planned(["gpus=0", "repeats=12"], *asked).cells
    shapes = [(entry.cell.world_size, len(entry.cell.nccl)) for entry in order]
    turns = [tuple(shapes[4 * repeat : 4 * repeat + 4]) for repeat in range(12)]
    assert turns[0][:2] == ((1, 0), (2, 0)) and len({*turns[1:]}) > 3, "one order in every turn"
    assert (order[-1].drift, order[-1].cell.repeat) == (True, -12)


CALIBRATING = (
    ["gpus=0,1,2,3"], ["gpus=0,1", "nccl.p2p_level=LOC"], ["gpus=0,1", "batch_size=8"],
    ["gpus=0,1"], ["gpus=0,1", "strategy=none"], ["gpus=0,1", "benchmark=collectives"],
    ["gpus=1"], ["gpus=0"],
)  # fmt: skip


def predicted(*more):
    return planned(*([*typed, *ON_DGX1, "repeats=3", *more] for typed in CALIBRATING))


def test_with_forecasts_the_cells_come_first_that_the_others_are_forecast_from():
    """Later repeats favour nothing."""
    sweep = predicted("predict=auto")
    cells = [entry.cell for entry in sweep.cells]
    assert [cell.gpus for cell in cells[:8]] == [(1,), (0,), *[(0, 1)] * 5, (0, 1, 2, 3)]
    assert cells[2].benchmark["name"] == "collectives" and cells[3].strategy["name"] == "none"
    assert [len(cell.nccl) for cell in cells[2:7]] == [0, 0, 0, 0, 1]
    assert says(sweep, "forecasts each run before it starts")
    assert all(cell.benchmark["calibrate"] == "all" for cell in cells if cell.trains)
    plain = predicted("predict=false").cells
    for order in (sweep.cells, plain):
        assert order[-1].drift and order[-1].cell.gpus == order[0].cell.gpus
    names = [cell.name for cell in cells]
    plainly = [entry.cell.name for entry in plain]
    assert names[8:24] == plainly[8:24] and names[:8] != plainly[:8]


def test_a_calibration_that_was_chosen_stays():
    for level in ("none", "timeline", "all"):
        (cell,) = cells_of(["gpus=0,1", "predict=auto", f"benchmark.calibrate={level}"])
        assert cell.benchmark.get("calibrate", "timeline") == level
    asked = ["gpus=0,1"], ["gpus=0,1", "predict=auto"], ["gpus=0,1", "predict=false"]
    plain, auto, off = (cells_of(typed)[0].key for typed in asked)
    assert plain == off != auto


def test_a_waterfall_has_its_control_cells_once():
    asked = ["gpus=scale", "profiler=torch"], ["gpus=0,1", "strategy=none"]
    sweep = planned(*([*typed, "waterfall=true"] for typed in asked))
    cells = {(entry.cell.strategy["name"], entry.cell.gpus): entry.cell for entry in sweep.cells}
    for strategy in ("none", "nccl_allreduce"):
        assert {cells[strategy, gpus].profiler for gpus in ((0,), (1,))} == {"none"}
    assert cells["nccl_allreduce", (0, 1)].profiler == "torch"
    assert cells["none", (0, 1)].profiler == "none" and not says(sweep, "duplicate")


def test_gpus_alone_are_measured_once_where_nccls_settings_are_swept():
    asked = ["gpus=0"], ["gpus=0", "nccl.p2p_level=LOC"], ["gpus=0,1", "nccl.p2p_level=LOC"]
    sweep = planned(*asked)
    found = [(entry.cell.gpus, bool(entry.cell.nccl)) for entry in sweep.cells]
    assert found == [((0,), False), ((0, 1), True)]
    assert says(sweep, "NCCL settings have no effect on CPU workers")
    assert not says(sweep, "no effect on one GPU")
    elsewhere = ["gpus=0", f"topology={H200}", "dry_run=true"]
    on_gpus = planned(elsewhere, [*elsewhere, "nccl.p2p_level=LOC"])
    assert says(on_gpus, "NCCL settings have no effect on one GPU")
    (alone,) = cells_of(["gpus=0", "nccl.p2p_level=LOC"])
    assert alone.nccl == {"NCCL_P2P_LEVEL": "LOC"}, "nothing stands for what was asked for"


def test_strong_scaling_has_a_batch_that_one_gpu_holds_and_all_share():
    cells = cells_of(["gpus=scale", "global_batch_size=auto", *ON_DGX1])
    sizes = [(cell.world_size, cell.batch_size) for cell in cells]
    assert sizes == [(1, 256), (2, 128), (4, 64), (8, 32)]
    assert {cell.global_batch_size for cell in cells} == {256}


def test_equal_cells_are_measured_once():
    # Batch 8 is what auto means for ResNet-50 on a CPU worker.
    sweep = planned(["gpus=0,1"], ["gpus=0,1", "batch_size=8"], ["gpus=1,0"])
    assert subsets(sweep) == [(0, 1), (1, 0)] and says(sweep, "duplicate")


def test_what_cpu_workers_do_otherwise_is_told_once():
    sweep = planned(["gpus=best:2", "nccl.p2p_level=LOC"], ["gpus=worst:1"])
    assert subsets(sweep) == [(0,), (0, 1)]
    for words in ("CPU workers have no links", "running on 2 CPU workers", "have no effect"):
        assert says(sweep, words) == 1
    assert says(planned(["gpus=0,1,2,3,4,5,6,7"]), "8 CPU workers share") == (usable_cores() < 8)
    share = sweep.machine.threads
    for threads, told in ((str(share), 0), (str(share + 1), 1)):
        words = f"OMP_NUM_THREADS={threads} has no effect on CPU workers: each has {share} thread"
        assert says(planned(["gpus=0"], surrounding={"OMP_NUM_THREADS": threads}), words) == told
    servers = ["gpus=0,1", "strategy=kvstore_dist_sync_device"]
    for more, told in (([], 0), (["strategy.server_gpus=9"], 1)):
        words = "strategy.server_gpus has no effect on CPU workers"
        assert says(planned([*servers, *more]), words) == told


# The environment of a cell's processes.


@pytest.mark.parametrize(("ranks", "lazily"), [(64, None), (65, "1")])
def test_many_ranks_connect_only_where_they_speak(ranks, lazily, tmp_path):
    cell = dataclasses.replace(cells_of(["gpus=0"])[0], gpus=tuple(range(ranks)))
    made = environment(cell, look("cpu", {}), CellFolder(tmp_path), "t", {})
    assert made.get("TORCH_GLOO_LAZY_INIT") == lazily


def test_control_cells_have_labels_of_their_own():
    """A control cell of strong scaling names the images per rank that it has, and neither profiler
    nor another's options."""
    asked = [
        "gpus=0,1", "waterfall=true", "global_batch_size=8", "optimize=compile", "profiler=torch",
        "strategy.comm_hook=bf16",
    ]  # fmt: skip
    cells = cells_of(asked, surrounding={"CXX": sys.executable})
    found = {(cell.strategy["name"], cell.world_size): cell.labels for cell in cells}
    assert found == {
        ("none", 1): ("batch 4", "compile"),
        ("nccl_allreduce", 1): ("batch 4", "compile", "comm_hook=bf16"),
        ("none", 2): ("batch 4", "compile"),
        ("nccl_allreduce", 2): ("global batch 8", "compile", "comm_hook=bf16", "profiler=torch"),
    }


def test_a_compiled_cell_on_cpu_workers_needs_the_compiler_that_torch_calls(tmp_path):
    around, compiled = {"PATH": str(tmp_path)}, ["gpus=0", "optimize=max"]
    planned(["gpus=0"], surrounding=around)
    # Of other hosts nothing is known.
    planned([*compiled, "nodes=a,b", "engine=ssh", "dry_run=true"], surrounding=around)
    assert planned(compiled, surrounding={**around, "CXX": sys.executable}).cells
    said = r"^optimize=max: needs a C\+\+ compiler on CPU workers, and {} is not found; "
    for compiler, named in ((None, r"g\+\+"), ("clang++ -m64", r"clang\+\+ -m64"), ("", "CXX=")):
        variables = around if compiler is None else {**around, "CXX": compiler}
        with pytest.raises(Refused, match=said.format(named)):
            planned(compiled, surrounding=variables)


# Second runs.


@pytest.fixture(scope="module")
def eight():
    """The cells and the configuration of a sweep over eight subsets."""
    every = ("0", "1", "2", "3", "0,1", "0,2", "1,2", "0,1,2")
    sweep = planned(*([f"gpus={gpus}", "noise_pairs=0"] for gpus in every))
    config = dataclasses.replace(sweep.config, noise_pairs="auto")
    return [entry.cell for entry in sweep.cells], config


def twice(eight, known=None, was=lambda cell: False, count=8, **config):
    """The order of a sweep's first cells, and {subset that runs twice: cells in between}."""
    cells, asked = eight[0][:count], dataclasses.replace(eight[1], **config)
    chosen = choose_replicates(cells, asked, known or {}, was)
    order = ordered(cells, asked.repeats, asked.seed, chosen)
    keys = [dataclasses.replace(entry.cell, repeat=0).key for entry in order]
    between = {}
    for at, entry in enumerate(order):
        if entry.run_suffixes:
            between[entry.cell.gpus] = at - keys.index(keys[at]) - 1
    return order, between


def test_a_longer_list_measures_one_cell_in_four_a_second_time(eight):
    assert twice(eight, count=4) == ([PlannedCell(cell) for cell in eight[0][:4]], {})
    assert twice(eight, noise_pairs=0)[1] == {}
    order, found = twice(eight)
    assert len(order) == 10 and len({entry.cell.key for entry in order}) == 10 and len(found) == 2
    suffixes = sorted(entry.run_suffixes for entry in order)
    assert suffixes[-3:] == [[], ["second run"], ["second run"]]
    assert twice(eight) == (order, found)
    of_repeats = [entry.run_suffixes for entry in twice(eight, repeats=2)[0]]
    assert ["second run"] not in of_repeats, "repeats are pairs enough"
    (links,) = cells_of(["benchmark=collectives", "noise_pairs=auto"])
    many = [dataclasses.replace(links, gpus=(gpu,)) for gpu in range(8)]
    assert twice((many, eight[1]))[1] == {}, "no cell has a model"
    assert len(twice((many, eight[1]), noise_pairs=3)[1]) == 3


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_second_run_is_never_directly_after_the_first(eight, count):
    for pairs, seed in itertools.product(range(1, count + 1), range(5)):
        order, found = twice(eight, count=count, noise_pairs=pairs, seed=seed)
        assert len(found) == pairs and len(order) == count + pairs, order
        assert min(found.values()) > 0, order


def test_the_group_of_which_least_is_known_runs_a_second_time_first(eight):
    def sizes(*freedom):
        rows = {}
        for cell, known in zip((eight[0][0], eight[0][4], eight[0][7]), freedom, strict=True):
            group = group_of_cell(cell, socket.gethostname())
            rows[group, "throughput/images_per_second"] = Scatter(known + 1, known, 1e-6)
        return [len(gpus) for gpus in twice(eight, known_freedom(rows))[1]]

    assert len(twice(eight)[1]) == 2 and sorted(sizes(5, 5, 1))[1] == 3
    assert sizes(5, 1, 5) == [2, 2] and sizes(1, 5, 5) == [1, 1]
    assert len(sizes(50, 50, 50)) == 1, "one pair keeps the floor fresh"


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
    assert says(sweep, "1 of 5 configurations measured twice")
    (again,) = [entry.cell for entry in sweep.cells if entry.run_suffixes]
    (tmp_path / FILE).write_text("not json")
    CellFolder(tmp_path / "default" / again.folder).make().record.write_text("{}")
    keys = [entry.cell.key for entry in sweep.cells]
    assert [entry.cell.key for entry in planned(*typed).cells] == keys
