"""`benchmark=collectives`: real collectives over gloo, their known results, nccl-tests' figures and table, the α–β line."""

import ctypes
import dataclasses
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build import composed_cell, make_cell
from hypothesis import given
from hypothesis import strategies as some
from rank_cases import OTHER_COLLECTIVES, SHORT

from analysis.native.nccl_tests import parse_nccl_tests
from benchmarks.collectives import derive as nccl_tests_table
from benchmarks.collectives.busbw import COLLECTIVES, ELEMENT_BYTES
from benchmarks.collectives.calls import NCCL_TYPES, NcclCalls, loaded_library
from benchmarks.collectives.measure import CollectiveBenchmark, message_views
from benchmarks.collectives.request import sizes
from benchmarks.collectives.wrong_elements import known_input, wrong_elements
from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder, read_study
from benchmarks.request import Room, refuse
from benchmarks.timing import alpha_beta, c_calls
from benchmarks.timing.clock import SpinBarrier
from conf.options import Refused

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
COMPILERS = [
    pytest.param(None, marks=pytest.mark.needs("compiler"), id="C"),
    pytest.param("/nowhere/cc", id="Python"),
]
PLACES = ("out_of_place", "in_place")
CPU = torch.device("cpu")


def cell_of(*asked, **where):
    return composed_cell("benchmark=collectives", *asked, **where)


def run_of(found):
    (run,) = found["tables"]["nccl-tests"]["runs"]
    return run


def figures(run):
    return [(row["bytes"], row[place]) for row in run["rows"] for place in PLACES if row[place]]


# Real collectives.


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_real_collective_returns_what_it_should_and_counts_as_nccl_tests_does(forked, name):
    one, other = (rank[list(COLLECTIVES).index(name)] for rank in forked("collectives"))
    run = run_of(one)
    assert (run["collective"], run["ranks"]) == (name, 2)
    assert [row["bytes"] for row in run["rows"]] == [1024, 4096, 16384]
    # Of two ranks.
    factor = 1 if name in ("all_reduce", "broadcast", "reduce", "send_recv") else 0.5
    parts = 2 if COLLECTIVES[name].shares else 1
    assert all(row["count"] == row["bytes"] / 4 / parts for row in run["rows"])
    for size, figure in figures(run):
        assert figure["wrong"] == 0
        assert figure["algbw"] == pytest.approx(size / figure["time_us"] / 1e3)
        assert figure["busbw"] == pytest.approx(figure["algbw"] * factor)
        assert 0 < figure["time_us"] <= figure["slowest_us"]
        quantiles = [
            figure["per_iteration"][f"{at}_us"] for at in ("min", "p50", "p95", "p99", "max")
        ]
        assert quantiles == sorted(quantiles) and quantiles[0] > 0
    busbw = [figure["busbw"] for _, figure in figures(run)]
    assert run["avg_busbw"] == pytest.approx(sum(busbw) / len(busbw))
    assert one["metrics"]["collectives/avg_busbw_gb_per_s"] == run["avg_busbw"]
    assert one["checks"]["wrong_elements"] == 0
    assert {**one, "output": ""} == {**other, "output": ""}


@pytest.mark.parametrize(
    "number",
    range(len(OTHER_COLLECTIVES)),
    ids=["-".join(map(str, asked.values())) for asked in OTHER_COLLECTIVES],
)
def test_other_forms_of_collectives_return_what_they_should(forked, number):
    found = forked("collectives_other")[0][number]
    verified = OTHER_COLLECTIVES[number].get("verify", True)
    for _, figure in figures(run_of(found)):
        assert figure["wrong"] == (0 if verified else None)
        assert ("per_iteration" in figure) == OTHER_COLLECTIVES[number].get("percentiles", True)
    assert found["checks"].get("wrong_elements") == (0 if verified else None)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_three_ranks_share_out_whole_multiples_of_sixteen_bytes(forked, name):
    run = run_of(forked("collectives_three")[0][list(COLLECTIVES).index(name)])
    (row,) = run["rows"]
    assert row["bytes"] == (1008 if COLLECTIVES[name].shares else 1024)
    assert all(figure["wrong"] == 0 for _, figure in figures(run))


def test_cpu_workers_wait_over_sockets_and_take_no_shared_memory(monkeypatch):
    monkeypatch.setattr(
        Ranks, "map_shared", lambda self, size_bytes: pytest.fail("there may be no /dev/shm")
    )
    SpinBarrier(Ranks(0, 2, CPU))


# Wrong results.


def right_result(name, rank, op, root, size, share):
    """What a collective returns to a rank, from the definition alone."""
    whole = COLLECTIVES[name].shares and name not in ("all_gather", "gather")
    elements = share * size if whole else share
    inputs = [known_input(r, 0, elements, torch.float32, op, CPU) for r in range(size)]
    fold = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[op]
    reduced, own = fold(torch.stack(inputs), 0), slice(rank * share, (rank + 1) * share)
    results = {
        "all_reduce": reduced,
        "reduce": reduced,
        "reduce_scatter": reduced[own],
        "broadcast": inputs[root],
        "scatter": inputs[root][own],
        "all_gather": torch.cat(inputs),
        "gather": torch.cat(inputs),
        "all_to_all": torch.cat([tensor[own] for tensor in inputs]),
        "send_recv": inputs[(rank - 1) % size],
    }
    return results[name].clone()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 3])
def test_wrong_elements_are_counted_and_right_ones_are_not(name, size):
    ops = ("sum", "min", "max") if COLLECTIVES[name].reduces else ("sum",)
    for rank, op in itertools.product(range(size), ops):
        ranks, root = Ranks(rank, size, CPU), size - 1
        result = right_result(name, rank, op, root, size, share=32)

        def wrong(result, ranks=ranks, op=op, root=root):
            return wrong_elements(name, result, op, root, ranks)

        assert wrong(result) == 0
        if name in ("reduce", "gather") and rank != root:
            continue  # has no result
        result[7] += 1
        assert wrong(result) == 1
        result[8] = float("nan")
        assert wrong(result) == 2
        assert wrong(torch.zeros_like(result)) == len(result)


def test_a_collective_that_does_nothing_is_noticed(forked):
    for (found,) in forked("collectives_idle"):
        assert found["checks"]["wrong_elements"] > 256 and found["checks"]["wrong_bytes"] == [1024]


def test_a_rank_that_takes_anothers_part_is_noticed():
    ranks = Ranks(0, 2, CPU)
    first, second = (known_input(rank, 0, 64, torch.float32, "sum", CPU) for rank in range(2))
    swapped = torch.cat([second, first])  # three in four differ
    assert wrong_elements("all_gather", swapped, "sum", 0, ranks) > 64
    assert wrong_elements("all_reduce", first * 2, "sum", 0, ranks) > 32
    assert wrong_elements("broadcast", second, "sum", 0, ranks) > 32


@pytest.mark.parametrize("size", [2, 7, 31])
def test_a_mean_of_rounded_parts_is_right_and_half_of_it_is_not(size):
    ranks, mean = Ranks(0, size, CPU), torch.zeros(4096, dtype=torch.bfloat16)
    for rank in range(size):
        mean += known_input(rank, 0, 4096, torch.bfloat16, "avg", CPU) / size
    assert wrong_elements("all_reduce", mean, "avg", 0, ranks) == 0
    assert wrong_elements("all_reduce", mean / 2, "avg", 0, ranks) == 4096


@pytest.mark.parametrize("size", [62, 63, 1024])
def test_sums_over_many_ranks_are_exact_and_lack_no_rank(size):
    parts = [known_input(rank, 0, 512, torch.bfloat16, "sum", CPU, size) for rank in range(size)]
    total, ranks = torch.stack(parts).sum(0, dtype=torch.float64), Ranks(0, size, CPU)
    assert wrong_elements("all_reduce", total.bfloat16(), "sum", 0, ranks) == 0
    assert 0 < total.min() <= total.max() <= 256
    for part in (parts[0], parts[-1]):
        lacking = int((part != 0).sum())
        assert lacking >= 512 // 17
        assert wrong_elements("all_reduce", (total - part).bfloat16(), "sum", 0, ranks) == lacking


def test_buffers_start_as_known_inputs_and_every_iteration_is_a_sign_of_life(hydra, tmp_path):
    (tmp_path / "ranks").mkdir()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        asked = [f"benchmark.{name}={SHORT[name]}" for name in SHORT if name != "name"]
        cell, reporter = cell_of(*asked, gpus=(0,), device="cpu"), Reporter(CellFolder(tmp_path), 0)
        benchmark = CollectiveBenchmark(cell, Ranks(0, 1, CPU), reporter)
        assert set(benchmark._into.tolist()) == {1, 2, 3, 4}
        benchmark.measure()
    finally:
        torch.distributed.destroy_process_group()
    count = int((tmp_path / "ranks" / "0.count").read_text())
    assert count == (1 + 1) + 2 + (1 + 2)  # warm-up, window, one by one


# What a library is called with.


ARGUMENTS = {
    "ncclAllReduce": 7, "ncclBroadcast": 7, "ncclReduce": 8, "ncclAllGather": 6, "ncclReduceScatter": 7, "ncclAlltoAll": 6,
    "ncclGather": 7, "ncclScatter": 7, "ncclSend": 6, "ncclRecv": 6, "ncclGroupStart": 0, "ncclGroupEnd": 0,
}  # fmt: skip


class OneRank:
    """The functions of nccl.h for a communicator of one rank, on host memory, as C calls them: every collective is a copy."""

    def __init__(self, without=()):
        self.without, self.named, self.sent, self.awaited, self.kept = without, [], [], [], []

    def __getattr__(self, name):
        if name.startswith("__") or name in self.without:
            raise AttributeError(name)

        def function(*values):
            self.named.append(name)
            if name == "ncclSend":
                self.sent.append(values[:4])
            elif name == "ncclRecv":
                self.awaited.append(values[:4])
            elif name == "ncclGroupEnd":
                for (source, *sent), (target, *awaited) in zip(
                    self.sent, self.awaited, strict=True
                ):
                    assert sent == awaited  # count, ncclDataType_t, peer
                    ctypes.memmove(target, source, 4 * sent[0])
            elif name != "ncclGroupStart":
                source, target, count, kind, *rest = values
                assert kind == 7 and rest[-2:] == [11, 22]  # ncclFloat32, communicator and stream
                if "educe" in name:  # ncclMax, and the root
                    assert rest[:-2] == ([2, 0] if name == "ncclReduce" else [2])
                ctypes.memmove(target, source, 4 * count)
            return 0

        self.kept.append(
            ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * ARGUMENTS[name])(function)
        )
        return self.kept[-1]


def one_rank(library):
    calls = object.__new__(NcclCalls)
    calls._library, calls._communicator, calls._stream = library, 11, 22
    calls._ranks, calls._root, calls._op = Ranks(0, 1, CPU), 0, 2
    return calls


def made_by(compiler, monkeypatch):
    """Have the calls made by C (compiler None), or by Python, as where that compiler is not there."""
    if compiler:
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setattr(c_calls, "compiled_loop", c_calls.compiled_loop.__wrapped__)
    assert c_calls.made_by() == ("Python" if compiler else "C")


@pytest.mark.parametrize(
    "without", [(), ("ncclAlltoAll", "ncclGather", "ncclScatter")], ids=["2.28", "before"]
)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_ncclss_functions_get_the_arguments_of_its_header(name, without, compiler, monkeypatch):
    made_by(compiler, monkeypatch)
    calls = one_rank(OneRank(without))
    send, receive = torch.arange(1.0, 65.0), torch.zeros(64)
    calls.prepare(name, send, receive)()
    assert torch.equal(send, receive)
    lacking = name in ("all_to_all", "gather", "scatter") and bool(without)
    assert ("ncclGroupStart" in calls._library.named) == (name == "send_recv" or lacking)


def test_prepared_calls_are_made_in_order_or_as_one_group():
    calls = one_rank(OneRank())
    send, receive = torch.arange(1.0, 65.0), torch.zeros(64)
    names = ("all_reduce", "send_recv", "broadcast")
    several = [calls.prepare(name, send, receive) for name in names]
    calls.in_order(several)()
    group = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    assert calls._library.named == ["ncclAllReduce", *group, "ncclBroadcast"]
    calls._library.named.clear()
    calls.together(several[::2])()
    assert calls._library.named == [group[0], "ncclAllReduce", "ncclBroadcast", group[-1]]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_refusal_of_the_library_is_an_error_with_its_words_and_ends_the_calls(
    compiler, monkeypatch
):
    made_by(compiler, monkeypatch)
    made = []

    def answering(name, status):
        return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: made.append(name) or status)

    library = type("Library", (), {
        "ncclGroupStart": answering("start", 0), "ncclAllReduce": answering("all_reduce", 5),
        "ncclGroupEnd": answering("end", 0), "ncclGetErrorString": staticmethod(lambda status: b"invalid usage %d" % status),
    })()  # fmt: skip
    calls = one_rank(library)
    with pytest.raises(RuntimeError, match="ncclAllReduce: invalid usage 5"):
        calls.together([calls.prepare("all_reduce", torch.zeros(4), torch.zeros(4))])()
    assert made == ["start", "all_reduce"]


def test_torchs_libnccl_has_the_functions():
    try:
        library = loaded_library()
    except OSError:
        pytest.skip("this torch has no libnccl")
    since = {"ncclAlltoAll", "ncclGather", "ncclScatter"}  # of a later release
    assert all(hasattr(library, name) for name in ARGUMENTS.keys() - since)
    assert len(set(NCCL_TYPES.values())) == len(NCCL_TYPES) == len(ELEMENT_BYTES)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_messages_rotate_through_the_buffers_without_leaving_them(name):
    out, into = torch.zeros(1024), torch.zeros(1024)
    for in_place in (False, True) if COLLECTIVES[name].in_place else (False,):
        seen = set()
        for place, rank in itertools.product(range(4), range(2)):
            send, receive = message_views(name, 1024, in_place, out, into, place, rank, 2)
            assert max(send.numel(), receive.numel()) == 256
            ours = into if in_place else out
            assert 0 <= send.data_ptr() - ours.data_ptr() <= 4096 - send.nbytes
            assert 0 <= receive.data_ptr() - into.data_ptr() <= 4096 - receive.nbytes
            seen.add((receive if receive.numel() == 256 else send).data_ptr())
        assert len(seen) == 4


# nccl-tests' table.


@pytest.mark.parametrize("name", COLLECTIVES)
def test_our_table_reads_back_as_nccl_tests_own(forked, name):
    found = forked("collectives")[0][list(COLLECTIVES).index(name)]
    (read,) = parse_nccl_tests(found["output"])
    said, run = read.to_json(), run_of(found)
    assert (said["collective"], said["ranks"], said["errors"], said["notes"]) == (name, 2, [], [])
    assert said["avg_busbw"] == pytest.approx(run["avg_busbw"], rel=1e-5)
    assert said["out_of_bounds"] == 0
    assert said["settings"]["iters"] == 2 and said["settings"]["warmup iters"] == 1
    assert [device["name"] for device in said["devices"]] == ["CPU worker"] * 2
    for ours, theirs in zip(run["rows"], said["rows"], strict=True):
        for column in ("bytes", "count", "dtype", "redop", "root"):
            assert theirs[column] == ours[column]
        for place in PLACES:
            if ours[place] is None:
                assert all(value is None for value in theirs[place].values())
                continue
            assert theirs[place]["wrong"] == 0
            for figure in ("time_us", "algbw", "busbw"):
                value = ours[place][figure]
                assert theirs[place][figure] == pytest.approx(value, rel=1e-3, abs=0.0051)


def test_what_was_not_verified_is_not_said_to_be_right(forked):
    output = forked("collectives_other")[0][-1]["output"]
    (read,) = parse_nccl_tests(output)
    assert (
        read.out_of_bounds is None and read.rows[0]["in_place"]["wrong"] is None and "N/A" in output
    )


def test_a_captured_run_is_printed_as_nccl_tests_printed_it(hydra):
    text = (DATA / "nccl_tests_h200_x8.txt").read_text()
    first = text[: text.index("# Collective test concluded")].splitlines()
    (run,) = parse_nccl_tests("\n".join(first) + "\n")
    cell = cell_of("benchmark.max_bytes=4G")
    devices = [{**one, "pid": 2368} for one in run.devices]
    ours = nccl_tests_table.table_lines(cell, run.to_json(), devices)
    theirs = [line.rstrip() for line in first]
    ours = [line.rstrip() for line in ours]
    assert ours[1] == theirs[2] and ours[3:-2] == theirs[4:]
    assert ours[2] == theirs[3].replace("nGpus 2", "nGpus 1")


# Sizes and bandwidths.


def test_busbw_is_that_of_every_captured_row():
    checked_rows = 0
    for run in parse_nccl_tests((DATA / "nccl_tests_h200_x8.txt").read_text()):
        factor = COLLECTIVES[run.collective].factor(run.ranks)
        rounding = 0.005 * (1 + factor) + 1e-9
        for _, figure in figures({"rows": run.rows}):
            busbw = figure["algbw"] * factor
            assert figure["busbw"] == pytest.approx(busbw, abs=rounding, rel=1e-3)
            checked_rows += 1
    assert checked_rows > 300


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [
        ([], (0, 1), [8 << k for k in range(28)]),
        (["benchmark.max_bytes=64"], (0, 1), [8, 16, 32, 64]),
        (["benchmark.collective=all_gather", "benchmark.max_bytes=256"], (0, 1, 2), [48, 96, 240]),  # of 64, 128, 256
        (["benchmark.min_bytes=1K", "benchmark.max_bytes=3KiB", "benchmark.step=1024"], (0, 1), [1024, 2048, 3072]),
        (["benchmark.min_bytes=1.5M", "benchmark.max_bytes=1572864"], (0, 1), [1572864]),
        (["benchmark.collective=all_to_all", "benchmark.min_bytes=32", "benchmark.max_bytes=80", "benchmark.step=8"],
         (0, 1), [32, 64]),
    ],
)  # fmt: skip
def test_sizes_are_those_asked_for_rounded_down_to_what_can_be_shared_out(
    hydra, asked, gpus, found
):
    assert sizes(cell_of(*asked, gpus=gpus)) == found


@given(
    some.integers(1, 16),
    some.sampled_from(sorted(COLLECTIVES)),
    some.integers(0, 12),
    some.integers(2, 9),
)
def test_every_size_can_be_shared_out_and_none_comes_twice(world, name, more, factor):
    benchmark = {"collective": name, "dtype": "float64", "min_bytes": 16 * world * 8, "max_bytes": 128 * world << more,
                 "factor": factor, "step": None}  # fmt: skip
    found = sizes(dataclasses.replace(make_cell(tuple(range(world))), benchmark=benchmark))
    assert found == sorted(set(found)) and found[0] == 128 * world
    assert all(size % (16 * world if COLLECTIVES[name].shares else 8) == 0 for size in found)


# Bad requests.


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("benchmark.collective=allreduce", "accepted are all_reduce, all_gather"),
        ("benchmark.min_bytes=2M benchmark.max_bytes=1M", "benchmark.min_bytes=2M: accepted is at most max_bytes, 1048576"),
        ("benchmark.min_bytes=1T", "accepted are whole bytes of at least 1, as 65536, 64K, 64KiB, 1M or 4G"),
        ("benchmark.min_bytes=0", "benchmark.min_bytes=0: accepted are whole bytes"),
        ("benchmark.max_bytes=-4", "benchmark.max_bytes=-4: accepted are whole bytes"),
        ("benchmark.max_bytes=1.0001K", "benchmark.max_bytes=1.0001K: accepted are whole bytes"),
        ("benchmark.max_bytes=true", "benchmark.max_bytes=True: accepted are whole bytes"),
        ("benchmark.max_bytes=[1]", "accepted are whole bytes"),
        ("benchmark.min_bytes=10", "benchmark.min_bytes=10: accepted is a multiple of 4, the bytes of a float32"),
        ("benchmark.step=6", "benchmark.step=6: accepted is a multiple of 4"),
        ("benchmark.collective=all_gather benchmark.min_bytes=16", "all_gather over 2 ranks moves multiples of 32 bytes"),
        ("benchmark.step=8 benchmark.factor=2", "benchmark.step=8: accepted without a factor"),
        ("benchmark.step=4", "accepted are at most 128"),
        ("benchmark.factor=1", "accepted is auto or a whole number of at least 2"),
        ("benchmark.dtype=int32 benchmark.op=avg", "benchmark.op=avg: int32 cannot hold a mean"),
        ("benchmark.collective=broadcast benchmark.op=max", "benchmark.op=max: broadcast reduces nothing; accepted with all"),
        ("benchmark.dtype=fp8", "accepted are float32, float64"),
        ("benchmark.root=1", "benchmark.root=1: all_reduce has no root; accepted is 0"),
        ("benchmark.collective=reduce benchmark.root=2", "benchmark.root=2: accepted is a rank, 0 to 1"),
        ("benchmark.collective=send_recv benchmark.placement=in", "send_recv has no form in place"),
        ("benchmark.calls=torch benchmark.placement=out", "all_reduce overwrites its input in torch.distributed"),
        ("benchmark.collective=gather benchmark.calls=torch benchmark.coalesced=2", "gather is accepted with calls=nccl"),
        ("benchmark.max_bytes=40G", "benchmark.max_bytes=40G: each rank needs 83.0 GiB, the smallest GPU has 80.0 GiB"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_measured_is_refused_with_a_sentence(hydra, asked, sentence):
    with pytest.raises(Refused) as refused:
        refuse(cell_of(*asked.split()), Room(80 << 30))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("op=avg", "benchmark.op=avg: accepted on GPUs only"),
        ("calls=nccl", "benchmark.calls=nccl: accepted on GPUs only, not on CPU workers"),
        ("cuda_graph=true", "benchmark.cuda_graph=true: accepted on GPUs only"),
        ("placement=out", "overwrites its input in torch.distributed"),
        ("max_bytes=900000G", "a share of the host's free memory among 2 is"),
    ],
)
def test_what_cpu_workers_cannot_do_is_refused(hydra, asked, sentence):
    with pytest.raises(Refused) as refused:
        refuse(cell_of(f"benchmark.{asked}", device="cpu"), Room(host_bytes=8 << 30))
    assert sentence in str(refused.value)


def test_requests_that_fit_pass(hydra):
    for asked in ("max_bytes=38G", "max_bytes=70G benchmark.placement=in", "cuda_graph=true"):
        refuse(cell_of(*f"benchmark.{asked}".split()), Room(80 << 30))
    refuse(cell_of("benchmark.max_bytes=40G"), Room())
    refuse(cell_of(gpus=(0,), device="cpu"), Room(host_bytes=8 << 30))


# The α–β line.

SIZES = [8 << k for k in range(30)]


def protocols(size):
    """µs of three lines that do not join."""
    if size < 65536:
        return 10 + size / 20e3
    return 14 + size / 100e3 if size < 1 << 22 else 25 + size / 345e3


def test_one_line_is_found_as_one_line():
    line = alpha_beta.fit(SIZES, [7.5 + size / 345e3 for size in SIZES])
    (piece,) = line.pieces
    assert (piece.from_bytes, piece.to_bytes) == (8, SIZES[-1])
    assert piece.alpha_us == pytest.approx(7.5) and piece.beta_gb_per_s == pytest.approx(345)
    assert line.worst_error < 1e-9
    assert piece.time_us(345e6) == pytest.approx(1007.5)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_protocols_that_do_not_join_are_found_apart(noise):
    draw = random.Random(3)
    line = alpha_beta.fit(SIZES, [protocols(size) * draw.gauss(1, noise) for size in SIZES])
    assert [piece.from_bytes for piece in line.pieces] == [8, 65536, 1 << 22]
    for piece, (alpha, beta) in zip(line.pieces, [(10, 20), (14, 100), (25, 345)], strict=True):
        assert piece.alpha_us == pytest.approx(alpha, rel=1e-6 + 3 * noise)
        assert piece.beta_gb_per_s == pytest.approx(beta, rel=1e-6 + 3 * noise)
    assert line.rms_error <= line.worst_error < 1e-6 + 3 * noise


def test_the_error_of_a_line_that_does_not_fit_is_said():
    line = alpha_beta.fit([8, 16, 32], [10.0, 20.0, 10.0])
    assert line.worst_error > 0.2 and line.pieces[0].rms_error == line.rms_error


def test_times_that_do_not_grow_have_no_bandwidth():
    (piece,) = alpha_beta.fit([8, 16, 32, 64], [10.0] * 4).pieces
    assert piece.beta_gb_per_s is None and piece.alpha_us == pytest.approx(10)
    assert alpha_beta.fit([8, 16], [10.0, 11.0]) is None


# The main path, and real GPUs.


def test_the_command_leaves_a_record_with_its_table(launch, tmp_path):
    asked = [
        "gpus=0,1",
        "benchmark=collectives",
        "benchmark.max_bytes=1K",
        "benchmark.iterations=2",
    ]
    asked += ["tracking=none", "validity.foreign_cpu_limit=1"]  # other tests run beside this one
    code, out, err = launch(*asked, "benchmark.format=nccl-tests", f"output_dir={tmp_path}")
    assert (code, err) == (0, ""), out + err
    ((record,), _) = read_study(tmp_path / "default")
    assert record.validity.verdict == "valid" and record.tables["alpha_beta"]["pieces"]
    assert record.tables["nccl-tests"]["runs"][0]["collective"] == "all_reduce"
    (printed,) = (tmp_path / "default").glob("*/output.txt")
    (read,) = parse_nccl_tests(printed.read_text())
    assert len(read.rows) == 8 and "# Avg bus bandwidth" in out


def collectives_on_gpus(tmp_path, *asked):
    done = subprocess.run(
        [sys.executable, "launch.py", "gpus=0,1", "benchmark=collectives", "tracking=none", f"output_dir={tmp_path}", *asked],
        cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ((record,), _) = read_study(tmp_path / "default")
    return record


OTHER_FORMS = ("cuda_graph=true", "coalesced=4", "op=avg")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("calls", ["nccl", "torch"])
@pytest.mark.parametrize("asked", [*(f"collective={name}" for name in COLLECTIVES), *OTHER_FORMS])
def test_gpus_return_what_they_should(tmp_path, asked, calls):
    options = (asked, f"calls={calls}", "max_bytes=16M", "factor=16")
    record = collectives_on_gpus(tmp_path, *(f"benchmark.{option}" for option in options))
    assert record.checks["wrong_elements"] == 0 and record.validity.verdict != "invalid"
    assert record.checks["calls"] == calls
