"""Which cells of a sweep go on in the ranks of the cell before, by plans of real requests and of random lists."""

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
from cells import make_cell, strategy_of
from hypothesis import given, settings
from hypothesis import strategies as some

from conf.options import Refused
from conf.schema import Config, Engine
from launch.plan import pools
from launch.plan.about_pools import about_pools, refuse_warm_cold
from launch.plan.order import PoolPart, cold_and_warm, ordered
from launch.plan.pools import pool_key

STAYS = {
    PoolPart.ALONE: False,
    PoolPart.BEGINS: True,
    PoolPart.WARM: True,
    PoolPart.ENDS: False,
    PoolPart.LOT: False,
}
FRESH = {PoolPart.ALONE: True, PoolPart.BEGINS: True, PoolPart.WARM: False, PoolPart.ENDS: False, PoolPart.LOT: True}


@pytest.fixture
def dry_run(launch, tmp_path):
    """Plan only: (notes about pools, [(cell, its part)])."""

    def run(*typed):
        code, out, err = launch("-m", "model=fmnist_cnn", f"output_dir={tmp_path}", "dry_run=true", *typed)
        assert (code, err) == (0, "")
        notes = [line for line in out.splitlines() if line.startswith("note: ") and ("ranks" in line)]
        cells = [line.split(maxsplit=1)[1] for line in out.splitlines() if line[:4].strip().isdigit()]
        return notes, [one for one in cells if not one.startswith("cell")]

    return run


def batches(count, gpus=(0, 1), **changes):
    cells = [dataclasses.replace(make_cell(gpus, batch_size=2 + number), **changes) for number in range(count)]
    return cells


def everything(cell):
    return True


def parts(order):
    return [entry.part for entry in order]


def pools_of(order):
    """The pools of an order, each with its first cell and its end."""
    found = []
    for entry in order:
        if entry.part == PoolPart.BEGINS:
            found.append([entry])
        elif entry.part in (PoolPart.WARM, PoolPart.ENDS):
            found[-1].append(entry)
    return found


def test_a_dry_run_says_which_cells_go_on(dry_run):
    typed = ("gpus=0,1", "batch_size=2,4,8", "noise_pairs=0")
    (note,), cells = dry_run(*typed, "engine.start=warm", "seed=1")
    assert note.startswith("note: 2 cells use the ranks of the cell before, in 1 pool.")
    name = "fmnist_cnn · nccl_allreduce · gpus 0,1 · batch"
    assert cells == [
        f"{name} 2 · new ranks",
        f"{name} 4 · warm",
        f"{name} 8 · warm",
        f"{name} 2 · pool end · warm, for the last time",
    ]
    staged = batches(4, strategy=strategy_of({"name": "cpu_staged"}))
    (note,) = about_pools(ordered(staged, 1, 1, may_join=everything))
    assert note.endswith("every cell has new ranks: strategy=cpu_staged does not say that it gives all back")
    (note,) = about_pools(ordered(batches(2), 1, 1, may_join=everything))
    assert note.endswith("fewer than 3 cells of a repeat are open and alike in subset and settings")


def test_cells_share_ranks_if_they_differ_in_what_is_read_for_each_communicator():
    cell = make_cell()
    same = pool_key(cell)
    others = {
        "batch": dataclasses.replace(cell, batch_size=7),
        "algorithm": dataclasses.replace(cell, nccl={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}),
        "strategy": dataclasses.replace(cell, strategy=strategy_of({"name": "none"})),
    }
    assert {name: pool_key(one) == same for name, one in others.items()} == dict.fromkeys(others, True)
    other = {
        "order": dataclasses.replace(cell, gpus=(1, 0)),
        "more": dataclasses.replace(cell, gpus=(0, 1, 2)),
        "setting": dataclasses.replace(cell, nccl={"NCCL_P2P_LEVEL": "LOC"}),
        "device": dataclasses.replace(cell, device="cuda"),
    }
    assert {name: pool_key(one) in (None, same) for name, one in other.items()} == dict.fromkeys(other, False)
    never = {
        "hosts": dataclasses.replace(cell, hosts=("a", "b")),
        "nsys": dataclasses.replace(cell, profiler="nsys"),
        "servers": dataclasses.replace(cell, strategy=strategy_of({"name": "kvstore_dist_sync", "servers": 1})),
        "staged": dataclasses.replace(cell, strategy=strategy_of({"name": "cpu_staged"})),
    }
    assert {name: pool_key(one) for name, one in never.items()} == dict.fromkeys(never)


def test_one_repeat_keeps_its_order_and_has_a_pool_for_each_subset():
    cells = [*batches(3, (0, 1)), *batches(3, (0,)), *batches(2, (1,))]
    order = ordered(cells, 1, 3, may_join=everything)
    first, second = pools_of(order)
    assert [entry.cell.gpus for entry in first] == [(0,)] * 4 and [entry.cell.gpus for entry in second] == [(0, 1)] * 4
    assert [entry.cell.batch_size for entry in second] == [2, 3, 4, 2]
    assert parts(order)[4:6] == [PoolPart.ALONE, PoolPart.ALONE], "two cells take no less time in a pool"
    last = second[-1].cell
    assert last.ends_pool and last.key != second[0].cell.key and last.marks() == ["pool end"]
    assert dataclasses.replace(last, repeat=0) == second[0].cell


def test_cells_with_equal_graphs_stand_side_by_side_in_another_order_in_each_repeat():
    compiled = [
        dataclasses.replace(make_cell(batch_size=batch), optimize="compile", nccl=nccl)
        for nccl in ({}, {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"})
        for batch in (2, 4)
    ]
    eager = batches(3)
    order = ordered([*compiled, *eager], 6, 1, may_join=everything)
    pools = [[entry.cell for entry in pool if entry.part != PoolPart.ENDS] for pool in pools_of(order)]
    assert len(pools) == 6
    for cells in pools:
        graphs = [cell.graph for cell in cells if cell.compiled]
        assert len(graphs) >= 5 and sum(one != other for one, other in pairwise(graphs)) == 1
    assert len({next(cell.batch_size for cell in cells if cell.compiled) for cells in pools}) == 2
    orders = {tuple(str(cell.nccl) for cell in cells if cell.compiled and cell.batch_size == 2) for cells in pools}
    assert len(orders) > 2
    assert len({tuple(cell.compiled for cell in cells) for cells in pools}) > 2, (
        "cells that are not compiled go between"
    )


def test_a_second_run_never_shares_ranks_with_the_first():
    cells = batches(6)
    for seed in range(20):
        order = ordered(cells, 1, seed, twice=cells[4:], may_join=everything)
        seconds = [at for at, entry in enumerate(order) if entry.marks == ["second run"]]
        assert len(seconds) == 2 and {order[at].part for at in seconds} == {PoolPart.ALONE}
        for at in seconds:
            first = next(place for place, one in enumerate(order) if one.cell.batch_size == order[at].cell.batch_size)
            assert first < at - 1


lists = some.lists(some.tuples(some.integers(1, 14), some.sampled_from([(0,), (1,), (0, 1)])), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(lists, some.integers(1, 3), some.integers(0, 5))
def test_every_list_is_measured_whole_and_a_pool_lies_within_one_repeat(asked, repeats, seed):
    cells = list({cell.key: cell for count, gpus in asked for cell in batches(count, gpus)}.values())
    order = ordered(cells, repeats, seed, may_join=everything)
    wanted = {dataclasses.replace(cell, repeat=repeat).key for cell in cells for repeat in range(repeats)}
    measured = Counter(entry.cell.key for entry in order)
    assert set(measured.values()) == {1} and wanted <= set(measured)
    others = [entry for entry in order if entry.cell.key not in wanted]
    assert all(entry.drift or entry.part == PoolPart.ENDS for entry in others)
    for entry in order:
        assert (entry.stays, entry.fresh) == (STAYS[entry.part], FRESH[entry.part])
    for pool in pools_of(order):
        *members, last = pool
        assert pools.FEWEST <= len(members) <= pools.MOST and last.part == PoolPart.ENDS
        assert len({pool_key(entry.cell) for entry in pool}) == 1
        assert len({entry.cell.repeat for entry in members}) == 1
        assert last.cell == members[0].cell.at_pool_end()
    for one, following in pairwise(order):
        assert one.stays == (not following.fresh), "ranks that stay are gone on in"
    if repeats > 1:
        turns = [entry.cell.repeat for entry in order if entry.cell.repeat >= 0]
        assert turns == sorted(turns) and order[-1].drift and order[-1].part == PoolPart.ALONE
    assert ordered(cells, repeats, seed, may_join=everything) == order


def test_pools_of_a_repeated_list_are_drawn_anew_in_each_repeat():
    order = ordered(batches(24), 3, 0, may_join=everything)
    together = [frozenset(entry.cell.batch_size for entry in pool[:-1]) for pool in pools_of(order)]
    assert len(together) == 9 and len(set(together)) == 9
    sizes = {len(one) for one in together}
    assert max(sizes) - min(sizes) <= 1


def test_one_cell_in_ten_is_measured_in_new_ranks_by_lot():
    found = Counter[int]()
    for seed in range(60):
        order = ordered(batches(25), 1, seed, may_join=everything)
        found[sum(entry.part == PoolPart.LOT for entry in order)] += 1
    assert set(found) == {2, 3} and 15 < found[2] < 45, "2.5 on average"
    few = Counter(PoolPart.LOT in parts(ordered(batches(5), 1, seed, may_join=everything)) for seed in range(60))
    assert 15 < few[True] < 45, "0.5 on average"


def test_cells_that_are_done_are_in_no_pool():
    cells = batches(6)
    order = ordered(cells, 1, 3, may_join=lambda cell: cell.batch_size > 4)
    pool = next(iter(pools_of(order)), [])
    assert all(entry.cell.batch_size > 4 for entry in pool)
    assert not pools_of(ordered(cells, 1, 3, may_join=lambda cell: cell.batch_size > 5)), "two are left"


def test_a_proof_measures_new_ranks_and_those_that_went_on_in_turns():
    order = cold_and_warm(batches(2), 3)
    assert parts(order) == 6 * [PoolPart.BEGINS, PoolPart.WARM, PoolPart.WARM, PoolPart.ALONE]
    assert len({entry.cell.key for entry in order}) == 24
    assert [entry.cell.repeat for entry in order if entry.cell.batch_size == 2] == [*range(12)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": Engine()}, "warm_cold=8: accepted with engine.start=warm, not with engine.start=auto"),
        ({"repeats": 2}, "accepted with repeats=1"),
        ({"noise_pairs": 2}, "accepted with noise_pairs=0"),
        ({"strategy": {"name": "cpu_staged"}}, "strategy=cpu_staged does not say"),
    ],
)
def test_a_proof_that_cannot_be_made_is_refused(changes, said):
    cell = make_cell(strategy=strategy_of(changes.pop("strategy", {"name": "none"})))
    config = dataclasses.replace(Config(warm_cold=8, engine=Engine(start="warm")), **changes)
    with pytest.raises(Refused, match=said):
        refuse_warm_cold(config, [cell])
    refuse_warm_cold(dataclasses.replace(config, warm_cold=0), [cell])
