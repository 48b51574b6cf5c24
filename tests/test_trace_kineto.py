"""Traces of torch.profiler: small ones with known times, and damage.

What the two captures of tests/data say is in tests/golden/trace.txt: kineto_h200_x2 is torch 2.11 on
two H200, two steps of ResNet-50 (DDP, bf16), with ranges, GPU work and its launches; kineto_gloo_x2
is torch 2.15 on two CPU ranks, three steps of DDP with every collective, where rank 1 sleeps 5 ms.
"""

import json

import pytest
from traces import GLOO

from analysis.input_files import UnreadableInput
from analysis.trace.events import spans
from analysis.trace.source import read_trace
from analysis.trace.trace_summary import summarize, trace_metrics

BASE_NS = 1_790_857_026_000_000_000


def event(cat, name, pid, tid, start, length, **args):
    """A complete event; times in µs."""
    place = {"pid": pid, "tid": tid, "ts": start, "dur": length}
    return {"ph": "X", "cat": cat, "name": name, "args": args} | place


def kernel(name, start, length, stream=7, device=0, correlation=0, **args):
    where = {"device": device, "stream": stream, "correlation": correlation}
    return event("kernel", name, device, stream, start, length, **where, **args)


def host(cat, name, start, length, thread=1, **args):
    return event(cat, name, 99, thread, start, length, **args)


def nccl(start, length, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", **more):
    return kernel(name, start, length, stream=17, **more)


def write(path, events, rank=None, world_size=None, host_name=None, base=BASE_NS):
    info = {"rank": rank, "world_size": world_size}
    content = {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}
    content["distributedInfo"] = {key: value for key, value in info.items() if value is not None}
    if host_name:
        content["host_name"] = host_name
    path.write_text(json.dumps(content))
    return path


def summary_of(*paths):
    return summarize(read_trace(",".join(map(str, paths))))


@pytest.fixture
def two(tmp_path):
    """Rank 0 computes 0-10 ms and reduces 8-16; rank 1 computes 2-12 and reduces 12-16."""
    folder = tmp_path / "run"
    folder.mkdir()
    at = 4_412_273_548_867.822  # µs: as far from the base as in a real file
    where = {"device": 0, "stream": 8, "bytes": 4_000_000}
    copy = host("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 20_000, 1000, **where)
    first = [kernel("gemm", at, 10_000), nccl(at + 8000, 8000), copy]
    second = [kernel("gemm", at + 2000, 10_000, device=1), nccl(at + 12_000, 4000, device=1)]
    write(folder / "a.json", first, 0, 2, "vm")
    write(folder / "b.json", second, 1, 2, "vm")
    (folder / "record.json").write_text('{"cell": "not a trace"}')
    return folder


def test_a_folder_of_ranks_is_one_trace_with_known_times(two):
    found = summary_of(two)
    assert summary_of(two / "b.json", two / "a.json").ranks == found.ranks
    places = [(rank.rank, rank.device, rank.backend) for rank in found.ranks]
    assert places == [(0, 0, "nccl"), (1, 1, "nccl")]
    first, second = found.ranks
    for rank, times in ((first, (8, 2, 6, 4)), (second, (4, 0, 4, 0))):
        kinds = (rank.comm_ms, rank.overlapped_ms, rank.exposed_ms, rank.wait_ms)
        assert kinds == pytest.approx(times, abs=1e-5)
    assert first.gpu_idle_share == pytest.approx(4 / 21, abs=1e-6)
    (copy,) = first.memcpy
    assert (copy["kind"], copy["calls"], copy["bytes"]) == ("DtoH", 1, 4_000_000)
    assert copy["gb_per_s"] == pytest.approx(4)
    (across,) = found.collectives
    assert (across["transfer_ms"], across["wait_ms"]) == pytest.approx((4, 2), abs=1e-5)
    assert found.notes == ["no range named step: time per step is not known"]


def test_times_are_exact_to_the_nanosecond(tmp_path):
    events = [kernel("gemm", 4_412_273_548_867.823, 0.001), nccl(1_682_725_898_082_228, 30_669)]
    (rank,) = read_trace(str(write(tmp_path / "a.json", events, base=0))).ranks
    assert spans(rank.compute).tolist() == [[4_412_273_548_867_823, 4_412_273_548_867_824]]
    start, end = 1_682_725_898_082_228_000, 1_682_725_898_112_897_000
    assert spans(rank.collectives).tolist() == [[start, end]]


def test_clocks_of_two_hosts_are_not_compared(two):
    events = [json.loads((two / name).read_text())["traceEvents"] for name in ("a.json", "b.json")]
    write(two / "b.json", events[1], 1, 2, "elsewhere")
    found = summary_of(two)
    assert [rank.wait_ms for rank in found.ranks] == [None, None]
    assert found.collectives == []
    assert any("whose clocks differ" in note for note in found.notes)
    for rank, name in enumerate(("a.json", "b.json")):  # a release that does not name the host
        write(two / name, events[rank], rank, 2)
    found = summary_of(two)
    assert found.ranks[0].wait_ms == pytest.approx(4, abs=1e-5)
    assert any("do not name their host" in note for note in found.notes)


GROUPS = ({"Process Group Name": "0"}, {"Process Group Name": "1", "Process Group Ranks": "[0, 1]"})


def test_process_groups_are_matched_apart(two):
    """By order alone, rank 0's first call would meet rank 1's first of the other group."""

    def ranks_with_groups(*orders):
        for rank, (first, second) in enumerate(orders):
            calls = [nccl(10, 100 + rank, device=rank, **GROUPS[first])]
            calls.append(nccl(200, 50, device=rank, **GROUPS[second]))
            write(two / ("a.json", "b.json")[rank], calls, rank, 2, "vm")
        return summary_of(two)

    found = ranks_with_groups((0, 1), (1, 0))
    assert found.collectives == []
    assert sum("of process group" in note for note in found.notes) == 2
    found = ranks_with_groups((0, 1), (0, 1))
    assert [matched["communicator"] for matched in found.collectives] == ["0", "1 [0, 1]"]


def test_operators_inside_a_call_of_gloo_are_not_compute(tmp_path):
    events = [
        host("cpu_op", "aten::mm", 0, 10, thread=1),
        host("cpu_op", "c10d::allreduce_", 10, 20, thread=1),
        host("user_annotation", "gloo:all_reduce", 5, 20, thread=2),
        host("cpu_op", "aten::copy_", 6, 15, thread=2),
    ]
    (rank,) = summary_of(write(tmp_path / "rank3.json", events)).ranks
    assert (rank.rank, rank.compute_ms) == (3, 0.01)
    assert (rank.overlapped_ms, rank.exposed_ms) == (0.005, 0.015)


def test_gloo_beside_gpu_kernels(tmp_path):
    """Gloo is the communication where NCCL has no kernel, and is only noted where it has."""
    events = [kernel("gemm", 0, 10), host("user_annotation", "gloo:all_reduce", 5, 20)]
    found = summary_of(write(tmp_path / "a.json", events))
    assert (found.ranks[0].exposed_ms, found.ranks[0].backend) == (0.015, "gloo")
    found = summary_of(write(tmp_path / "b.json", [*events, nccl(0, 1)]))
    assert (found.ranks[0].comm_ms, found.ranks[0].backend) == (0.001, "nccl")
    assert any("1 calls of gloo on the host, not counted" in note for note in found.notes)


def test_events_without_a_usable_time_are_counted_and_left_out(tmp_path):
    odd = [kernel("a", float("nan"), 1), kernel("b", 0, -1), kernel("c", "x", 1)]
    odd += [kernel("d", 1e300, 1), kernel(5, 0, 1)]
    events = [*odd, kernel("gemm", 0, 1), "no event", {"ph": "X"}]
    trace = read_trace(str(write(tmp_path / "a.json", events)))
    assert len(trace.ranks[0].compute) == 1
    assert any("5 events without a usable time" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cut.json", "cut or damaged JSON"),
        ("record.json", "without a list `traceEvents`"),
        ("none.json", "without GPU kernels"),
        ("deep.json", "cut or damaged JSON"),
        ("matrix.txt", "expected an SQLite export of nsys or the JSON of torch.profiler"),
        ("cut.json.gz", "cut or damaged gzip"),
        ("empty", "no trace in this folder"),
    ],
)
def test_damage_and_foreign_json(two, refusal, name, says):
    (two / "cut.json").write_text((two / "a.json").read_text()[:-200])
    write(two / "none.json", [])
    (two / "matrix.txt").write_text("[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]")
    (two / "deep.json").write_text('{"a":' * 100_000)
    (two / "cut.json.gz").write_bytes((GLOO / "rank0.json.gz").read_bytes()[:4000])
    (two / "empty").mkdir()
    assert says in refusal("trace", two / name)


@pytest.mark.parametrize(
    ("rank", "world_size", "says"),
    [(0, 2, "a.json and again.json are both rank 0"), (3, 4, "runs with 2 and 4 ranks together")],
)
def test_files_that_are_no_one_run_are_refused(two, tmp_path, refusal, rank, world_size, says):
    again = write(tmp_path / "again.json", [kernel("gemm", 0, 1)], rank, world_size, "vm")
    assert says in refusal("trace", f"{two / 'a.json'},{again}")


def test_a_part_of_the_ranks_is_said(two):
    trace = read_trace(str(two / "a.json"))
    assert any("1 of 2 ranks are given" in note for note in trace.notes)
    with pytest.raises(UnreadableInput, match=r"b\.json"):
        (two / "b.json").write_text("{")
        read_trace(f"{two / 'a.json'},{two / 'b.json'}")


def test_exposed_time_between_kernels_that_follow_each_other_is_told_apart(tmp_path):
    step = host("user_annotation", "step", 0, 100)
    numbers = (1, 2, 3, 4)
    launches = [host("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=n) for n in numbers]

    def written(name, rank, world_size, *starts, calls=()):
        kernels = [kernel("gemm", start, 10, correlation=n) for n, start in enumerate(starts, 1)]
        return write(tmp_path / name, [step, *launches, *kernels, *calls], rank, world_size)

    call = nccl(15, 55, correlation=4)
    (rank,) = summary_of(written("a.json", 0, 1, 10, 26, 47, calls=[call])).ranks  # 6, 11 µs apart
    assert rank.steps.exposed_ms == pytest.approx(0.030)
    assert rank.steps.exposed_in_gaps_ms == pytest.approx(0.006)
    assert rank.gap_us == pytest.approx(6)
    paths = written("a.json", 0, 2, 10, 26), written("b.json", 1, 2, 10, 22, 36)  # 6; 2, 4 µs apart
    assert trace_metrics(summary_of(*paths))["trace/gap_us"] == pytest.approx((6 + 3) / 2)
