"""`benchmark=collectives`: collectives over gloo, nccl-tests' figures and table, the α–β line."""

import ctypes
import dataclasses
import itertools
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from build import DATA, ROOT, composed_cell, make_cell
from hypothesis import given
from hypothesis import strategies as some
from rank_cases import OTHER_COLLECTIVES, SHORT

from analysis.native.nccl_tests import parse_nccl_tests
from benchmarks.collectives import derive as nccl_tests_table
from benchmarks.collectives.calls import (
    NCCL_TYPES,
    NcclCalls,
    known_input,
    loaded_library,
    wrong_elements,
)
from benchmarks.collectives.measure import CollectiveBenchmark, message_views
from benchmarks.collectives.request import COLLECTIVES, ELEMENT_BYTES, sizes
from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder, read_study
from benchmarks.timing import c_calls, statistics
from benchmarks.timing.clock import SpinBarrier

COMPILERS = [
    pytest.param(None, marks=pytest.mark.needs("compiler"), id="C"),
    pytest.param("/nowhere/cc", id="Python"),
]
PLACES = ("out_of_place", "in_place")
CPU = torch.device("cpu")


def cell_of(*asked, **where):
    options = [f"benchmark.{one}" for one in asked]
    return composed_cell("benchmark=collectives", *options, **where)


def run_of(found):
    (run,) = found["tables"]["nccl-tests"]["runs"]
    return run


def figures(run):
    return [(row["bytes"], row[place]) for row in run["rows"] for place in PLACES if row[place]]


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
        each = figure["per_iteration"]
        quantiles = [each[f"{at}_us"] for at in ("min", "p50", "p95", "p99", "max")]
        assert quantiles == sorted(quantiles) and quantiles[0] > 0
    busbw = [figure["busbw"] for _, figure in figures(run)]
    assert run["avg_busbw"] == pytest.approx(sum(busbw) / len(busbw))
    assert one["metrics"]["collectives/avg_busbw_gb_per_s"] == run["avg_busbw"]
    assert one["checks"]["wrong_elements"] == 0
    assert {**one, "output": ""} == {**other, "output": ""}


@pytest.mark.parametrize(
    ("number", "asked"),
    list(enumerate(OTHER_COLLECTIVES)),
    ids=["-".join(map(str, asked.values())) for asked in OTHER_COLLECTIVES],
)
def test_other_forms_of_collectives_return_what_they_should(forked, number, asked):
    found = forked("collectives_other")[0][number]
    wrong = 0 if asked.get("verify", True) else None
    for _, figure in figures(run_of(found)):
        assert figure["wrong"] == wrong
        assert ("per_iteration" in figure) == asked.get("percentiles", True)
    assert found["checks"].get("wrong_elements") == wrong


@pytest.mark.parametrize("name", COLLECTIVES)
def test_three_ranks_share_out_whole_multiples_of_sixteen_bytes(forked, name):
    run = run_of(forked("collectives_three")[0][list(COLLECTIVES).index(name)])
    (row,) = run["rows"]
    assert row["bytes"] == (1008 if COLLECTIVES[name].shares else 1024)
    assert all(figure["wrong"] == 0 for _, figure in figures(run))


def test_cpu_workers_wait_over_sockets_and_take_no_shared_memory(monkeypatch):
    monkeypatch.setattr(Ranks, "map_shared", lambda *_: pytest.fail("there may be no /dev/shm"))
    SpinBarrier(Ranks(0, 2, CPU))


def right_result(name, rank, op, root, size, share):
    """What a collective returns to a rank, from the definition alone."""
    whole = COLLECTIVES[name].shares and name not in ("all_gather", "gather")
    elements = share * size if whole else share
    inputs = [known_input(r, 0, elements, torch.float32, op, CPU) for r in range(size)]
    fold = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}[op]
    reduced, own = fold(torch.stack(inputs), 0), slice(rank * share, (rank + 1) * share)
    if "reduce" in name:
        return reduced[own] if name == "reduce_scatter" else reduced
    if name in ("all_gather", "gather"):
        return torch.cat(inputs)
    if name == "all_to_all":
        return torch.cat([tensor[own] for tensor in inputs])
    if name == "send_recv":
        return inputs[(rank - 1) % size].clone()
    return (inputs[root] if name == "broadcast" else inputs[root][own]).clone()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 3])
def test_wrong_elements_are_counted_and_right_ones_are_not(name, size):
    ops = ("sum", "min", "max") if COLLECTIVES[name].reduces else ("sum",)
    root = size - 1
    for rank, op in itertools.product(range(size), ops):
        arguments = (op, root, Ranks(rank, size, CPU))
        result = right_result(name, rank, op, root, size, share=32)
        assert wrong_elements(name, result, *arguments) == 0
        if name in ("reduce", "gather") and rank != root:
            continue  # has no result
        result[7] += 1
        assert wrong_elements(name, result, *arguments) == 1
        result[8] = float("nan")
        assert wrong_elements(name, result, *arguments) == 2
        assert wrong_elements(name, torch.zeros_like(result), *arguments) == len(result)


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


def test_buffers_start_as_known_inputs_and_every_iteration_is_a_sign_of_life(
    hydra, alone, tmp_path
):
    (tmp_path / "ranks").mkdir()
    asked = [f"{name}={SHORT[name]}" for name in SHORT if name != "name"]
    cell, reporter = cell_of(*asked, gpus=(0,), device="cpu"), Reporter(CellFolder(tmp_path), 0)
    benchmark = CollectiveBenchmark(cell, alone, reporter)
    assert set(benchmark._into.tolist()) == {1, 2, 3, 4}
    benchmark.measure()
    count = int((tmp_path / "ranks" / "0.count").read_text())
    assert count == (1 + 1) + 2 + (1 + 2)  # warm-up, window, one by one


ARGUMENTS = {
    "ncclAllReduce": 7, "ncclBroadcast": 7, "ncclReduce": 8, "ncclAllGather": 6,
    "ncclReduceScatter": 7, "ncclAlltoAll": 6, "ncclGather": 7, "ncclScatter": 7, "ncclSend": 6,
    "ncclRecv": 6, "ncclGroupStart": 0, "ncclGroupEnd": 0,
}  # fmt: skip


LATER = {"ncclAlltoAll", "ncclGather", "ncclScatter"}  # of a later release


class OneRank:
    """nccl.h for a communicator of one rank, on host memory, as C calls it: all is a copy."""

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
                pairs = zip(self.sent, self.awaited, strict=True)
                for (source, *sent), (target, *awaited) in pairs:
                    assert sent == awaited  # count, ncclDataType_t, peer
                    ctypes.memmove(target, source, 4 * sent[0])
            elif name != "ncclGroupStart":
                source, target, count, kind, *rest = values
                assert kind == 7 and rest[-2:] == [11, 22]  # ncclFloat32, communicator and stream
                if "educe" in name:  # ncclMax, and the root
                    assert rest[:-2] == ([2, 0] if name == "ncclReduce" else [2])
                ctypes.memmove(target, source, 4 * count)
            return 0

        arguments = [ctypes.c_long] * ARGUMENTS[name]
        self.kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function))
        return self.kept[-1]


def one_rank(library):
    calls = object.__new__(NcclCalls)
    calls._library, calls._communicator, calls._stream = library, 11, 22
    calls._ranks, calls._root, calls._op = Ranks(0, 1, CPU), 0, 2
    return calls


def made_by(compiler, monkeypatch):
    """Have the calls made by C (compiler None), or by Python, as where no compiler is."""
    if compiler:
        monkeypatch.setenv("CC", compiler)
        monkeypatch.setattr(c_calls, "compiled_loop", c_calls.compiled_loop.__wrapped__)
    assert c_calls.made_by() == ("Python" if compiler else "C")


@pytest.mark.parametrize("older", [False, True], ids=["2.28", "before"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_ncclss_functions_get_the_arguments_of_its_header(name, older, compiler, monkeypatch):
    made_by(compiler, monkeypatch)
    calls = one_rank(OneRank(LATER if older else ()))
    send, receive = torch.arange(1.0, 65.0), torch.zeros(64)
    calls.prepare(name, send, receive)()
    assert torch.equal(send, receive)
    lacking = name in ("all_to_all", "gather", "scatter") and older
    assert ("ncclGroupStart" in calls._library.named) == (name == "send_recv" or lacking)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_refusal_of_the_library_is_an_error_with_its_words_and_ends_the_calls(
    compiler, monkeypatch
):
    made_by(compiler, monkeypatch)
    made = []

    def answering(name, status):
        return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: made.append(name) or status)

    library = SimpleNamespace(
        ncclGroupStart=answering("start", 0),
        ncclAllReduce=answering("all_reduce", 5),
        ncclGroupEnd=answering("end", 0),
        ncclGetErrorString=lambda status: b"invalid usage %d" % status,
    )
    calls = one_rank(library)
    with pytest.raises(RuntimeError, match="ncclAllReduce: invalid usage 5"):
        calls.together([calls.prepare("all_reduce", torch.zeros(4), torch.zeros(4))])()
    assert made == ["start", "all_reduce"]


def test_torchs_libnccl_has_the_functions():
    try:
        library = loaded_library()
    except OSError:
        pytest.skip("this torch has no libnccl")
    assert all(hasattr(library, name) for name in ARGUMENTS.keys() - LATER)
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
    columns = ("bytes", "count", "dtype", "redop", "root")
    for ours, theirs in zip(run["rows"], said["rows"], strict=True):
        assert [theirs[column] for column in columns] == [ours[column] for column in columns]
        for place in PLACES:
            if ours[place] is None:
                assert set(theirs[place].values()) == {None}
                continue
            assert theirs[place]["wrong"] == 0
            for figure in ("time_us", "algbw", "busbw"):
                expected = pytest.approx(ours[place][figure], rel=1e-3, abs=0.0051)
                assert theirs[place][figure] == expected


def test_a_captured_run_is_printed_as_nccl_tests_printed_it(hydra):
    text = (DATA / "nccl_tests_h200_x8.txt").read_text()
    first = text[: text.index("# Collective test concluded")].splitlines()
    (run,) = parse_nccl_tests("\n".join(first) + "\n")
    devices = [{**one, "pid": 2368} for one in run.devices]
    ours = nccl_tests_table.table_lines(cell_of("max_bytes=4G"), run.to_json(), devices)
    ours, theirs = ([line.rstrip() for line in lines] for lines in (ours, first))
    assert ours[1] == theirs[2] and ours[3:-2] == theirs[4:]
    assert ours[2] == theirs[3].replace("nGpus 2", "nGpus 1")


def test_what_was_not_verified_is_not_said_to_be_right(forked):
    output = forked("collectives_other")[0][-1]["output"]
    (read,) = parse_nccl_tests(output)
    assert read.out_of_bounds is None and read.rows[0]["in_place"]["wrong"] is None
    assert "N/A" in output


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
        ("", (0, 1), [8 << k for k in range(28)]),
        ("max_bytes=64", (0, 1), [8, 16, 32, 64]),
        ("collective=all_gather max_bytes=256", (0, 1, 2), [48, 96, 240]),  # of 64, 128, 256
        ("min_bytes=1K max_bytes=3KiB step=1024", (0, 1), [1024, 2048, 3072]),
        ("min_bytes=1.5M max_bytes=1572864", (0, 1), [1572864]),
        ("collective=all_to_all min_bytes=32 max_bytes=80 step=8", (0, 1), [32, 64]),
    ],
)
def test_sizes_are_those_asked_for_rounded_down_to_what_can_be_shared_out(
    hydra, asked, gpus, found
):
    assert sizes(cell_of(*asked.split(), gpus=gpus)) == found


@given(
    some.integers(1, 16),
    some.sampled_from(sorted(COLLECTIVES)),
    some.integers(0, 12),
    some.integers(2, 9),
)
def test_every_size_can_be_shared_out_and_none_comes_twice(world, name, more, factor):
    options = {"collective": name, "dtype": "float64", "factor": factor, "step": None}
    options |= {"min_bytes": 16 * world * 8, "max_bytes": 128 * world << more}
    found = sizes(dataclasses.replace(make_cell(tuple(range(world))), benchmark=options))
    assert found == sorted(set(found)) and found[0] == 128 * world
    assert all(size % (16 * world if COLLECTIVES[name].shares else 8) == 0 for size in found)


SIZES = [8 << k for k in range(30)]


def protocols(size):
    """µs of three lines that do not join."""
    if size < 65536:
        return 10 + size / 20e3
    return 14 + size / 100e3 if size < 1 << 22 else 25 + size / 345e3


def test_one_line_is_found_as_one_line_and_what_does_not_fit_is_said():
    line = statistics.fit(SIZES, [7.5 + size / 345e3 for size in SIZES])
    (piece,) = line.pieces
    assert (piece.from_bytes, piece.to_bytes) == (8, SIZES[-1])
    assert piece.alpha_us == pytest.approx(7.5) and piece.beta_gb_per_s == pytest.approx(345)
    assert line.worst_error < 1e-9
    assert piece.time_us(345e6) == pytest.approx(1007.5)
    line = statistics.fit([8, 16, 32], [10.0, 20.0, 10.0])
    assert line.worst_error > 0.2 and line.pieces[0].rms_error == line.rms_error
    (piece,) = statistics.fit([8, 16, 32, 64], [10.0] * 4).pieces  # times that do not grow
    assert piece.beta_gb_per_s is None and piece.alpha_us == pytest.approx(10)
    assert statistics.fit([8, 16], [10.0, 11.0]) is None


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_protocols_that_do_not_join_are_found_apart(noise):
    draw = random.Random(3)
    line = statistics.fit(SIZES, [protocols(size) * draw.gauss(1, noise) for size in SIZES])
    assert [piece.from_bytes for piece in line.pieces] == [8, 65536, 1 << 22]
    for piece, (alpha, beta) in zip(line.pieces, [(10, 20), (14, 100), (25, 345)], strict=True):
        assert piece.alpha_us == pytest.approx(alpha, rel=1e-6 + 3 * noise)
        assert piece.beta_gb_per_s == pytest.approx(beta, rel=1e-6 + 3 * noise)
    assert line.rms_error <= line.worst_error < 1e-6 + 3 * noise


def test_the_command_leaves_a_record_with_its_table(launch, tmp_path):
    options = ("max_bytes=1K", "iterations=2", "format=nccl-tests")
    asked = ["gpus=0,1", "benchmark=collectives", *(f"benchmark.{one}" for one in options)]
    asked += ["tracking=none", "validity.foreign_cpu_limit=1"]  # other tests run beside this one
    code, out, err = launch(*asked, f"output_dir={tmp_path}")
    assert (code, err) == (0, ""), out + err
    ((record,), _) = read_study(tmp_path / "default")
    assert record.validity.verdict == "valid" and record.tables["alpha_beta"]["pieces"]
    assert record.tables["nccl-tests"]["runs"][0]["collective"] == "all_reduce"
    (printed,) = (tmp_path / "default").glob("*/output.txt")
    (read,) = parse_nccl_tests(printed.read_text())
    assert len(read.rows) == 8 and "# Avg bus bandwidth" in out


FORMS = [f"collective={name}" for name in COLLECTIVES] + [
    "cuda_graph=true",
    "coalesced=4",
    "op=avg",
]


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.parametrize("calls", ["nccl", "torch"])
@pytest.mark.parametrize("asked", FORMS)
def test_gpus_return_what_they_should(tmp_path, sharing, asked, calls):
    options = (asked, f"calls={calls}", "max_bytes=16M", "factor=16")
    command = [
        sys.executable, "launch.py", "gpus=0,1", "benchmark=collectives", "tracking=none", *sharing,
    ]  # fmt: skip
    command += [f"output_dir={tmp_path}", *(f"benchmark.{option}" for option in options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (study,) = tmp_path.glob("default*")
    ((record,), _) = read_study(study)
    assert record.checks["wrong_elements"] == 0 and record.validity.verdict != "invalid"
    assert record.checks["calls"] == calls
