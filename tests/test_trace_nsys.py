"""Traces of Nsight Systems: small exports of known times, damage.

What the captures say is in tests/golden/trace.txt.
tests/data/nsys_h200_x2_p2p_level_{NVL,LOC}.sqlite.gz are ResNet-50 (DDP) on two H200 (nsys 2025.3),
scrubbed by analysis.trace.scrub, without the tables of CUDA calls, synchronizations and streams and
without the kernels (but NCCL's) and memsets before the last 70 ms.
"""

import gzip
import sqlite3
from contextlib import closing

import pytest
from traces import GATHER, GEMM, MS, NVL, REDUCE, make_export, two_ranks

from analysis.__main__ import main
from analysis.trace.source import read_trace
from analysis.trace.steps import choose_window
from analysis.trace.trace_summary import summarize


def summary_of(*kernels, folder, **tables):
    return summarize(read_trace(str(make_export(folder / "a.sqlite", kernels, **tables))))


def test_exposed_overlapped_wait_and_transfer(tmp_path):
    found = summarize(read_trace(str(two_ranks(tmp_path / "a.sqlite"))))
    first, second = found.ranks
    for rank, times in ((first, (8, 4, 4, 4)), (second, (4, 0, 4, 0))):
        assert (rank.comm_ms, rank.overlapped_ms, rank.exposed_ms, rank.wait_ms) == times
    assert (first.compute_ms, first.gpu_idle_share, first.window_ms) == (16, 0, 20)
    (across,) = found.collectives
    assert (across["name"], across["matched"]) == ("AllReduce", 1)
    assert (across["wait_ms"], across["transfer_ms"]) == (2, 4)
    assert found.stragglers == [{"rank": 1, "last": 1, "of": 1, "others_waited_ms": 4}]
    assert first.steps is None
    assert any("no range named step" in note for note in found.notes)


def test_copies_between_gpus_are_communication_and_host_copies_are_not(tmp_path):
    copies = [(10, 0, 20, 4, 6, 10, 100), (10, 0, 21, 30, 31, 2, 100)]
    (rank,) = summary_of((10, 0, 7, 0, 5, GEMM, 1), folder=tmp_path, copies=copies).ranks
    assert (rank.comm_ms, rank.overlapped_ms, rank.exposed_ms, rank.nccl) == (2, 1, 1, [])
    assert {copy["kind"]: copy["exposed_ms"] for copy in rank.memcpy} == {"PtoP": 1, "DtoH": 1}
    assert rank.gpu_idle_share == pytest.approx(24 / 31)


def test_no_communication_is_unknown_and_not_zero(tmp_path, capsys):
    found = summary_of((10, 0, 7, 0, 5, GEMM, 1), folder=tmp_path)
    (rank,) = found.ranks
    unknown = (rank.comm_ms, rank.exposed_ms, rank.overlapped_ms, rank.wait_ms, rank.backend)
    assert unknown == (None,) * 5
    for words in ("no kernel of NCCL on any rank", "only one rank"):
        assert any(words in note for note in found.notes)
    assert main(["trace", str(tmp_path / "a.sqlite")]) == 0
    assert "communication" not in capsys.readouterr().out.split("note")[0]


def test_work_belongs_to_the_step_that_launched_it(tmp_path):
    """The host is ahead: it launched the second step's kernels while the first step's still ran."""
    kernels = []
    for launch, (start, end) in enumerate(((2, 10), (10, 14), (14, 20), (20, 22)), start=1):
        stream, name = (7, GEMM) if launch % 2 else (17, REDUCE)
        kernels.append((10, 0, stream, start, end, name, launch))
    ranges = [(10, 0, 3, "step 0"), (10, 3, 6, "step 1"), (10, 4, 5, "forward")]
    calls = [(10, 1, 1), (10, 2, 2), (10, 4, 3), (10, 5, 4)]
    trace = read_trace(str(make_export(tmp_path / "a.sqlite", kernels, ranges=ranges, calls=calls)))
    steps = summarize(trace).ranks[0].steps
    assert (steps.count, steps.median_ms, steps.times_ms, steps.by) == (2, 3, [3, 3], "launch")
    assert (steps.comm_ms, steps.exposed_ms, steps.wait_ms) == (3, 3, None)
    assert choose_window(trace, 1)[:2] == (14 * MS, 22 * MS)
    with pytest.raises(ValueError, match="step 2 is not in the trace; expected 0 to 1"):
        choose_window(trace, 2)
    unlaunched = read_trace(str(make_export(tmp_path / "b.sqlite", kernels, ranges=ranges)))
    assert summarize(unlaunched).ranks[0].steps.by == "start"


def test_cuda_visible_devices_is_undone_and_marks_number_the_ranks(tmp_path):
    gpus = [(0, "H", "0000:06"), (3, "H", "0000:09")]
    path = two_ranks(tmp_path / "a.sqlite", gpus=gpus, cuda=[(3, 0, 10), (0, 1, 11)])
    ranks = read_trace(str(path)).ranks
    places = [(rank.rank, rank.device, rank.bus_id, rank.pid) for rank in ranks]
    assert places == [(0, 3, "0000:09", 10), (1, 0, "0000:06", 11)]
    marked = two_ranks(tmp_path / "b.sqlite", ranges=[(10, 0, 1, "rank 1"), (11, 0, 1, "rank 0")])
    trace = read_trace(str(marked))
    assert [(rank.rank, rank.device) for rank in trace.ranks] == [(0, 1), (1, 0)]
    assert not any("number the ranks" in note for note in trace.notes)


def test_a_stray_context_is_no_rank(tmp_path):
    calls = [(10 + rank, rank, 17, 0, 1, REDUCE, 1) for rank in range(2)]
    found = summary_of(*calls, (11, 0, 7, 0, 1, GEMM, 2), folder=tmp_path)
    assert [rank.pid for rank in found.ranks] == [10, 11]
    assert any("process 11 also ran 1 kernels on CUDA device 0" in note for note in found.notes)


SEND = "ncclDevKernel_SendRecv(x)"
LATE = [(10, 0, 17, at, at + 3, REDUCE, at) for at in (0, 100, 200)]
LATE += [(11, 1, 17, at + 1, at + 3, REDUCE, at) for at in (100, 200)]


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (LATE, "AllReduce: 3 on rank 0, 2 on rank 1"),
        ([*LATE, (10, 0, 17, 300, 301, GATHER, 9)], "AllGather: only on rank 0"),
        ([(10, 0, 17, 0, 3, REDUCE, 1), (11, 1, 17, 50, 53, REDUCE, 1)], "1 of 1 calls end on one"),
        ([(10 + n, n, 17, 0, 3, SEND, 1) for n in range(3)], "does not say which ranks take part"),
    ],
)
def test_calls_that_cannot_be_the_same_are_not_matched(tmp_path, kernels, says):
    found = summary_of(*kernels, folder=tmp_path)
    assert found.collectives == [] and any(says in note for note in found.notes)
    assert [rank.wait_ms for rank in found.ranks] == [None] * len(found.ranks)


def test_point_to_point_kernels_of_two_ranks_are_matched(tmp_path):
    pair = summary_of(*((10 + n, n, 17, 0, 3, SEND, 1) for n in range(2)), folder=tmp_path)
    assert [matched["name"] for matched in pair.collectives] == ["SendRecv"]


def test_ranges_alone_are_step_times(tmp_path):
    """What nsys records of ranks on CPUs: NVTX ranges and no CUDA activity at all."""
    ranges = [(pid, start, start + 2, "step") for pid in (20, 21) for start in (0, 5)]
    tables = [f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET")]
    drops = [f"DROP TABLE {table}" for table in tables]
    found = summary_of(folder=tmp_path, ranges=ranges, extra=drops)
    steps = [(rank.rank, rank.device, rank.steps.times_ms) for rank in found.ranks]
    assert steps == [(0, None, [2, 2]), (1, None, [2, 2])]
    for rank in found.ranks:
        assert (rank.comm_ms, rank.compute_ms, rank.gpu_idle_share) == (None, None, None)
    assert any("only step times" in note for note in found.notes)


def test_calls_without_kernels_are_an_error_with_its_cause(tmp_path, refusal):
    said = refusal("trace", make_export(tmp_path / "a.sqlite", [], calls=[(10, 1, 1)]))
    assert "1 CUDA calls and no GPU kernel" in said and "not 0 ms" in said
    assert "2025.3.2 is too old for the machine's CUDA driver" in said
    assert "no GPU kernel" in refusal("trace", make_export(tmp_path / "b.sqlite", []))


def test_graphs_traced_as_a_whole(tmp_path, refusal):
    table = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
    graphs = [f"CREATE TABLE {table} (start, end)", f"INSERT INTO {table} VALUES (1, 2)"]
    empty = make_export(tmp_path / "a.sqlite", [], extra=graphs)
    assert "--cuda-graph-trace=node" in refusal("trace", empty)
    kernel = (1, 0, 7, 0, 1, GEMM, 1)
    trace = read_trace(str(make_export(tmp_path / "b.sqlite", [kernel], extra=graphs)))
    assert any("--cuda-graph-trace=node" in note for note in trace.notes)


def test_foreign_cut_and_damaged_files(tmp_path, refusal):
    def database(*statements):
        path = tmp_path / "made.sqlite"
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as made:
            for statement in statements:
                made.execute(statement)
            made.commit()
        return path.read_bytes()

    whole, kernels = two_ranks(tmp_path / "whole.sqlite"), "CUPTI_ACTIVITY_KIND_KERNEL"
    soon = [f"UPDATE {kernels} SET start = 'soon'"]
    contents = {
        "foreign": database("CREATE TABLE runs (id)"),
        "schema": database(
            "CREATE TABLE META_DATA_EXPORT (name, value)", f"CREATE TABLE {kernels} (begin, finish)"
        ),
        "text": two_ranks(tmp_path / "soon.sqlite", extra=soon).read_bytes(),
        "cut": gzip.decompress(NVL.read_bytes())[:300_000],
        "torn": whole.read_bytes().replace(b"KIND_MEMSET (", b"KIND_MEM\x98ET (", 1),
        "packed": NVL.read_bytes()[:50_000],
        "empty": b"",
        "noise": b"\x00\x01noise",
    }
    says = {
        "foreign": "not an export of Nsight Systems (its tables: runs)",
        "schema": f"{kernels} has no column start, end",
        "text": "holds text where numbers belong",
        "cut": "damaged or cut",
        "torn": "damaged or cut",
        "packed": "cut or damaged gzip",
    }
    for name, content in contents.items():
        path = tmp_path / (f"{name}.sqlite.gz" if name == "packed" else f"{name}.sqlite")
        path.write_bytes(content)
        assert says.get(name, "") in refusal("trace", path), name
    refusal("trace", tmp_path / "absent.sqlite")
