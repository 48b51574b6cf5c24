"""Traces of torch.profiler: small ones with known times, two real gloo ranks, and damage.

tests/data/kineto_h200_x2 is torch 2.11 on two H200: two steps of ResNet-50 (DDP, batch 256, bf16); kept are ranges, GPU work
and its launches, with kernels' names cut short. tests/data/kineto_gloo_x2 is torch 2.15 on two CPU ranks: three steps of DDP
with all-reduce, all-gather, broadcast, barrier, send and receive; rank 1 sleeps 5 ms before the all-reduce. As exported,
gzipped.
"""

import gzip
import json
from pathlib import Path

import pytest
from traces import GLOO

from analysis.__main__ import main
from analysis.errors import UnreadableInput
from analysis.trace.source import read_trace
from analysis.trace.summary import summarize, trace_metrics

H200 = Path(__file__).parent / "data" / "kineto_h200_x2"
BASE_NS = 1_790_857_026_000_000_000


def kernel(name, start, length, stream=7, device=0, correlation=0, **args):
    where = {"device": device, "stream": stream, "correlation": correlation}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": length,
        "args": where | args,
    }


def host(cat, name, start, length, thread=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 99,
        "tid": thread,
        "ts": start,
        "dur": length,
        "args": args,
    }


def nccl(start, length, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", **more):
    return kernel(name, start, length, stream=17, **more)


def write(path, events, rank=None, world_size=None, host_name=None, base=BASE_NS):
    info = {
        key: value
        for key, value in (("rank", rank), ("world_size", world_size))
        if value is not None
    }
    whole = {
        "schemaVersion": 1,
        "distributedInfo": info,
        "baseTimeNanoseconds": base,
        "traceEvents": events,
    }
    path.write_text(json.dumps(whole | ({"host_name": host_name} if host_name else {})))
    return path


@pytest.fixture
def two(tmp_path):
    """Rank 0 computes 0-10 ms and reduces 8-16; rank 1 computes 2-12 and reduces 12-16."""
    folder = tmp_path / "run"
    folder.mkdir()
    at = 4_412_273_548_867.822  # µs: as far from the base as in a real file
    copy = host(
        "gpu_memcpy",
        "Memcpy DtoH (Device -> Pinned)",
        at + 20_000,
        1000,
        device=0,
        stream=8,
        bytes=4_000_000,
    )
    write(folder / "a.json", [kernel("gemm", at, 10_000), nccl(at + 8000, 8000), copy], 0, 2, "vm")
    write(
        folder / "b.json",
        [kernel("gemm", at + 2000, 10_000, device=1), nccl(at + 12_000, 4000, device=1)],
        1,
        2,
        "vm",
    )
    (folder / "record.json").write_text('{"cell": "not a trace"}')
    return folder


def test_a_folder_of_ranks_is_one_trace_with_known_times(two):
    found = summarize(read_trace(str(two)))
    first, second = found.ranks
    assert [(one.rank, one.device, one.backend) for one in found.ranks] == [
        (0, 0, "nccl"),
        (1, 1, "nccl"),
    ]
    assert [first.comm_ms, first.overlapped_ms, first.exposed_ms, first.wait_ms] == pytest.approx(
        [8, 2, 6, 4], abs=1e-5
    )
    assert [second.comm_ms, second.exposed_ms, second.wait_ms] == pytest.approx([4, 4, 0], abs=1e-5)
    assert first.gpu_idle_share == pytest.approx(4 / 21, abs=1e-6)
    (copy,) = first.memcpy
    assert (copy.kind, copy.calls, copy.bytes, copy.gb_per_s) == (
        "DtoH",
        1,
        4_000_000,
        pytest.approx(4),
    )
    (across,) = found.collectives
    assert (across.transfer_ms, across.wait_ms) == (
        pytest.approx(4, abs=1e-5),
        pytest.approx(2, abs=1e-5),
    )
    assert found.notes == ["no range named step: time per step is not known"]


def test_files_joined_by_commas_are_one_trace(two):
    joined = read_trace(f"{two / 'b.json'},{two / 'a.json'}")
    assert summarize(joined).ranks == summarize(read_trace(str(two))).ranks


def test_times_are_exact_to_the_nanosecond(tmp_path):
    events = [kernel("gemm", 4_412_273_548_867.823, 0.001), nccl(1_682_725_898_082_228, 30_669)]
    (rank,) = read_trace(str(write(tmp_path / "a.json", events, base=0))).ranks
    assert (rank.compute.start.tolist(), rank.compute.duration.tolist()) == (
        [4_412_273_548_867_823],
        [1],
    )
    assert rank.collectives.spans.tolist() == [
        [1_682_725_898_082_228_000, 1_682_725_898_112_897_000]
    ]


def test_clocks_of_two_hosts_are_not_compared(two):
    events = json.loads((two / "b.json").read_text())["traceEvents"]
    write(two / "b.json", events, 1, 2, "elsewhere")
    found = summarize(read_trace(str(two)))
    assert [one.wait_ms for one in found.ranks] == [None, None]
    assert found.collectives == []
    assert any("whose clocks differ" in note for note in found.notes)
    for name, rank in (("a.json", 0), ("b.json", 1)):  # a release that does not name the host
        write(two / name, json.loads((two / name).read_text())["traceEvents"], rank, 2)
    found = summarize(read_trace(str(two)))
    assert found.ranks[0].wait_ms == pytest.approx(4, abs=1e-5)
    assert any("do not name their host" in note for note in found.notes)


def test_process_groups_are_matched_apart(two):
    """The same name in two groups: by order alone, rank 0's first call would meet rank 1's first of the other group."""
    for rank, (first, second) in enumerate((("0", "1"), ("1", "0"))):
        groups = {
            "0": {"Process Group Name": "0"},
            "1": {"Process Group Name": "1", "Process Group Ranks": "[0, 1]"},
        }
        events = [
            nccl(10, 100 + rank, device=rank, **groups[first]),
            nccl(200, 50, device=rank, **groups[second]),
        ]
        write(two / f"{'ab'[rank]}.json", events, rank, 2, "vm")
    found = summarize(read_trace(str(two)))
    assert found.collectives == []
    assert sum("of process group" in note for note in found.notes) == 2
    for rank in range(2):
        events = [
            nccl(10, 100 + rank, device=rank, **groups["0"]),
            nccl(200, 50, device=rank, **groups["1"]),
        ]
        write(two / f"{'ab'[rank]}.json", events, rank, 2, "vm")
    assert [one.communicator for one in summarize(read_trace(str(two))).collectives] == [
        "0",
        "1 [0, 1]",
    ]


def test_steps_by_launch_and_the_profilers_own_steps(tmp_path):
    events = [
        nccl(100, 10, correlation=1),
        nccl(200, 30, correlation=2),
        host("cuda_runtime", "cudaLaunchKernelExC", 10, 1, correlation=1),
        host("cuda_runtime", "cudaLaunchKernelExC", 30, 1, correlation=2),
        host("user_annotation", "ProfilerStep#3", 0, 20),
        host("user_annotation", "ProfilerStep#4", 20, 20),
    ]
    steps = summarize(read_trace(str(write(tmp_path / "a.json", events)))).ranks[0].steps
    assert (steps.source, steps.count, steps.by, steps.comm_ms) == (
        "ProfilerStep",
        2,
        "launch",
        0.02,
    )
    named = [*events, host("user_annotation", "step", 0, 40)]
    steps = summarize(read_trace(str(write(tmp_path / "b.json", named)))).ranks[0].steps
    assert (steps.source, steps.count, steps.comm_ms) == ('range "step"', 1, 0.04)


def test_the_gloo_ranks_of_torch_profiler():
    found = summarize(read_trace(str(GLOO)))
    for rank in found.ranks:
        events = json.loads(gzip.decompress((GLOO / f"rank{rank.rank}.json.gz").read_bytes()))[
            "traceEvents"
        ]
        times = [event["dur"] for event in events if event["name"] == "gloo:all_reduce"]
        reduce = next(one for one in rank.nccl if one.name == "AllReduce")
        assert (rank.backend, rank.device, rank.gpu_idle_share) == ("gloo", None, None)
        assert (reduce.calls, reduce.total_ms) == (len(times), pytest.approx(sum(times) / 1e3))
        assert rank.comm_ms == pytest.approx(rank.exposed_ms + rank.overlapped_ms)
        assert (rank.steps.count, rank.steps.source) == (3, 'range "step"')
    met = {one.name: one.matched for one in found.collectives}
    assert met == {"AllReduce": 6, "AllGather": 3, "Broadcast": 5, "Barrier": 3}
    assert found.stragglers[0].rank == 1  # it slept
    assert found.stragglers[0].others_waited_ms > 10


def test_operators_inside_a_call_of_gloo_are_not_compute(tmp_path):
    events = [
        host("cpu_op", "aten::mm", 0, 10, thread=1),
        host("cpu_op", "c10d::allreduce_", 10, 20, thread=1),
        host("user_annotation", "gloo:all_reduce", 5, 20, thread=2),
        host("cpu_op", "aten::copy_", 6, 15, thread=2),
    ]
    (rank,) = summarize(read_trace(str(write(tmp_path / "rank3.json", events)))).ranks
    assert (rank.rank, rank.compute_ms, rank.overlapped_ms, rank.exposed_ms) == (
        3,
        0.01,
        0.005,
        0.015,
    )


def test_gloo_beside_gpu_kernels(tmp_path):
    """Staging through the host: gloo is the communication where NCCL has no kernel, and is only noted where it has."""
    events = [kernel("gemm", 0, 10), host("user_annotation", "gloo:all_reduce", 5, 20)]
    found = summarize(read_trace(str(write(tmp_path / "a.json", events))))
    assert (found.ranks[0].exposed_ms, found.ranks[0].backend) == (0.015, "gloo")
    found = summarize(read_trace(str(write(tmp_path / "b.json", [*events, nccl(0, 1)]))))
    assert (found.ranks[0].comm_ms, found.ranks[0].backend) == (0.001, "nccl")
    assert any("1 calls of gloo on the host, not counted" in note for note in found.notes)


def test_older_categories_and_a_bare_list_of_events(tmp_path):
    events = [kernel("gemm", 0, 10) | {"cat": "Kernel"}, nccl(5, 10) | {"cat": "Kernel"}]
    (tmp_path / "a.json").write_text(json.dumps(events))
    assert summarize(read_trace(str(tmp_path / "a.json"))).ranks[0].exposed_ms == 0.005


def test_events_without_a_usable_time_are_counted_and_left_out(tmp_path):
    odd = [
        kernel("a", float("nan"), 1),
        kernel("b", 0, -1),
        kernel("c", "x", 1),
        kernel("d", 1e300, 1),
        kernel(5, 0, 1),
    ]
    trace = read_trace(
        str(write(tmp_path / "a.json", [*odd, kernel("gemm", 0, 1), "no event", {"ph": "X"}]))
    )
    assert len(trace.ranks[0].compute) == 1
    assert any("5 events without a usable time" in note for note in trace.notes)


def refused(capsys, *arguments):
    assert main(["trace", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_damage_and_foreign_json(two, tmp_path, capsys):
    whole = (two / "a.json").read_text()
    (tmp_path / "cut.json").write_text(whole[:-200])
    assert "cut or damaged JSON" in refused(capsys, tmp_path / "cut.json")
    assert "without a list `traceEvents`" in refused(capsys, two / "record.json")
    assert "without GPU kernels" in refused(capsys, write(tmp_path / "none.json", []))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "cut or damaged JSON" in refused(capsys, tmp_path / "deep.json")
    (tmp_path / "cut.json.gz").write_bytes((GLOO / "rank0.json.gz").read_bytes()[:4000])
    assert "cut or damaged gzip" in refused(capsys, tmp_path / "cut.json.gz")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no trace in this folder" in refused(capsys, empty)


def test_files_that_are_no_one_run_are_refused(two, tmp_path, capsys):
    again = write(tmp_path / "again.json", [kernel("gemm", 0, 1)], 0, 2, "vm")
    assert "a.json and again.json are both rank 0" in refused(capsys, f"{two / 'a.json'},{again}")
    larger = write(tmp_path / "larger.json", [kernel("gemm", 0, 1)], 3, 4, "vm")
    assert "runs with 2 and 4 ranks together" in refused(capsys, f"{two / 'a.json'},{larger}")
    said = refused(capsys, two / "a.json", two / "b.json")
    assert "share no rank (ranks 0 against 1)" in said
    assert "joined by commas" in said


def test_a_part_of_the_ranks_is_said(two):
    trace = read_trace(str(two / "a.json"))
    assert any("1 of 2 ranks are given" in note for note in trace.notes)
    with pytest.raises(UnreadableInput, match=r"b\.json"):
        (two / "b.json").write_text("{")
        read_trace(f"{two / 'a.json'},{two / 'b.json'}")


def test_exposed_time_between_kernels_that_follow_each_other_is_told_apart(tmp_path):
    step = host("user_annotation", "step", 0, 100)
    launches = [
        host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=number)
        for number in (1, 2, 3, 4)
    ]
    kernels = [
        kernel("gemm", start, 10, correlation=n) for n, start in ((1, 10), (2, 26), (3, 47))
    ]  # 6 and 11 µs apart
    write(tmp_path / "a.json", [step, *launches, *kernels, nccl(15, 55, correlation=4)], 0, 1)
    (rank,) = summarize(read_trace(str(tmp_path / "a.json"))).ranks
    exposed = rank.steps.exposed_ms, rank.steps.exposed_in_gaps_ms
    assert exposed == (pytest.approx(0.030), pytest.approx(0.006)) and rank.gap_us == pytest.approx(
        6
    )
    kernels = [
        kernel("gemm", start, 10, correlation=n) for n, start in ((1, 10), (2, 22), (3, 36))
    ]  # 2 and 4 µs apart
    write(tmp_path / "b.json", [step, *launches, *kernels], 1, 2)
    write(
        tmp_path / "a.json",
        [step, *launches, *kernels[:1], kernel("gemm", 26, 10, correlation=2)],
        0,
        2,
    )
    both = read_trace(f"{tmp_path / 'a.json'},{tmp_path / 'b.json'}")
    assert trace_metrics(summarize(both))["trace/gap_us"] == pytest.approx((6 + 3) / 2)


def test_the_times_of_two_gpus_are_those_of_their_kernels():
    summary = summarize(read_trace(str(H200)))
    durations = []
    for rank, found in enumerate(summary.ranks):
        events = json.loads(gzip.decompress((H200 / f"rank{rank}.json.gz").read_bytes()))[
            "traceEvents"
        ]
        kernels = [one for one in events if one.get("cat") == "kernel"]
        calls = sorted(
            (one for one in kernels if one["name"].startswith("nccl")), key=lambda one: one["ts"]
        )
        durations.append([one["dur"] for one in calls])
        (reduces,) = found.nccl
        assert (found.rank, found.device, found.backend, reduces.name, reduces.calls) == (
            rank,
            rank,
            "nccl",
            "AllReduce",
            8,
        )
        assert reduces.total_ms == pytest.approx(sum(durations[-1]) / 1e3)
        busy_us, until = 0.0, 0.0  # kernels of two streams overlap
        for one in sorted((one for one in kernels if one not in calls), key=lambda one: one["ts"]):
            end = one["ts"] + one["dur"]
            busy_us += max(0.0, end - max(one["ts"], until))
            until = max(until, end)
        assert found.compute_ms == pytest.approx(busy_us / 1e3, rel=1e-6)
        assert (
            found.steps.count == 2
            and 0 < found.steps.exposed_in_gaps_ms < found.steps.exposed_ms < found.steps.comm_ms
        )
    (across,) = summary.collectives
    assert across.matched == 8
    # The last rank to come does not wait: its call is the transfer.
    assert across.transfer_ms == pytest.approx(sum(map(min, *durations)) / 1e3, rel=1e-6)
    (late,) = summary.stragglers
    assert late.rank == 1
