"""`benchmark=p2p`: its requests, what it counts, two and three real CPU workers, its records.

The test of real GPUs at the end needs two: `pytest -m multi_gpu tests/test_p2p_benchmark.py`.
"""

import dataclasses
import itertools
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from build import links_cell
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.charts import shade
from benchmarks.p2p import derive, measure
from benchmarks.p2p.copies import (
    Copy,
    CopyMethod,
    differing,
    matchings,
    write_opposite,
    write_pattern,
)
from benchmarks.rank.ranks import Reporter, Result
from benchmarks.record import CellFolder, read_lines

NAMES = [
    "unidirectional_disabled", "unidirectional_enabled", "unidirectional_enabled_reads",
    "bidirectional_disabled", "bidirectional_enabled",
    "latency_cpu_disabled", "latency_cpu_enabled", "latency_cpu_enabled_reads",
]  # fmt: skip


class FixedLinks:
    """A copy within a member takes 1 ms, to another 2 ms; each further copy at once adds 1 ms."""

    words = {"enabled": "known", "disabled": "known"}  # noqa: RUF012
    late, enqueued_by = 0, None

    def __init__(self, count, without=(), wrong=()):
        self.devices = [{"name": "NVIDIA H200", "bus_id": f"0000:0{n}:1a"} for n in range(count)]
        self.without, self.wrong, self.timed = without, wrong, []

    def can_access(self, a, b):
        return (a, b) not in self.without

    def time(self, copies, how):
        self.timed.append((copies, how))
        ms = [
            ((1 if copy.source == copy.target else 2) + len(copies) - 1) * how.iterations
            for copy in copies
        ]
        return ms, max(ms)

    def latency(self, copy, how):
        return 1.0 + copy.source, 5.0 + copy.target

    def wrong_elements(self, copy, how):
        return 7 if (copy.source, copy.target, how.enabled) in self.wrong else 0

    def close(self):
        pass


def measured(ids, links, tmp_path, **options):
    """(what a record has, raw lines) of links whose times are known."""
    asked = {"name": "p2p", "bytes": 1_000_000, "repeats": 2} | options
    cell = dataclasses.replace(links_cell(len(ids), asked), gpus=ids)
    folder = CellFolder(tmp_path)
    folder.rank_lines(0).parent.mkdir(exist_ok=True)
    folder.rank_lines(0).unlink(missing_ok=True)
    result, reporter = Result(), Reporter(folder, 0)
    result.checks |= measure.PairBenchmark(ids, links, cell.benchmark, reporter).measure()
    facts = dataclasses.asdict(result)
    reporter.line("result", **facts)
    lines = list(read_lines(folder.rank_lines(0)))
    derived = derive.derive({0: lines}, cell)
    return SimpleNamespace(**derived.with_facts(facts), output=derived.output), lines


def test_the_counting_is_the_tools(tmp_path):
    result, lines = measured((3, 5), FixedLinks(2), tmp_path, direction="read")
    matrices = result.tables["p2p"]["matrices"]
    gpu_names = [name.replace("cpu", "gpu") for name in NAMES[5:]]
    latencies = itertools.chain(*zip(gpu_names, NAMES[5:], strict=True))
    assert list(matrices) == [*NAMES[:5], *latencies]
    # 1 MB in 2 ms; within one member it is read and written, in 1 ms.
    assert matrices["unidirectional_enabled"] == [[2.0, 0.5], [0.5, 2.0]]
    # 2 MB in 3 ms; within one member 4 MB in 2 ms.
    third = pytest.approx(2 / 3)
    assert matrices["bidirectional_disabled"] == [[2.0, third], [third, 2.0]]
    assert matrices["latency_gpu_enabled"] == [[1.0, 1.0], [2.0, 2.0]]  # the row copies
    assert matrices["latency_gpu_enabled_reads"] == [[1.0, 2.0], [1.0, 2.0]]  # the column's
    assert sum(line["kind"] == "p2p" for line in lines) == 2 * len(matrices)  # every repeat
    assert result.checks == {"copies_compared": 24, "copies_wrong": {}, "measured_late": 0}
    assert next(iter(result.metrics)) == "p2p/unidirectional_enabled_gb_per_s"
    assert result.metrics["p2p/latency_gpu_disabled_most_us"] == 2.0
    assert result.metrics["p2p/bandwidth_spread_share"] == 0
    assert "latency gpu enabled, µs (median of 2, entries vary by up to 0.0 %)" in result.output


def test_both_directions_are_two_writes_and_a_read_is_made_by_its_target(tmp_path):
    links = FixedLinks(2)
    measured((0, 1), links, tmp_path, direction="read", repeats=1, p2p="enabled")
    between = [timed for timed in links.timed if timed[0][0].source != timed[0][0].target]
    pairs = [[(copy.source, copy.target) for copy in copies] for copies, _ in between]
    to, back = (0, 1), (1, 0)
    assert pairs == [[to], [back], [back], [to], [to, back], [back, to]]
    runners = [[how.runner(copy) for copy in copies] for copies, how in between]
    assert runners == [[0], [1], [0], [1], [0, 1], [1, 0]]


def test_one_member_alone_has_a_diagonal(tmp_path):
    result, _ = measured((4,), FixedLinks(1), tmp_path, concurrent=True)
    assert result.metrics["p2p/local_unidirectional_enabled_gb_per_s"] == 2.0
    assert "p2p_concurrent" not in result.tables
    assert result.output.splitlines()[-1].startswith("One member alone")


def test_a_required_pair_without_access_ends_the_cell_with_a_sentence(tmp_path):
    links = FixedLinks(3, without=[(2, 0)])
    sentence = r"^benchmark.p2p=required: no peer access between GPUs 1-9;"
    with pytest.raises(ValueError, match=sentence):
        measured((9, 4, 1), links, tmp_path, p2p="required")
    assert not links.timed
    table = measured((9, 4, 1), links, tmp_path)[0].tables["p2p"]
    assert table["access"] == {"4-9": True, "1-9": False, "1-4": True}


def test_elements_that_did_not_arrive_are_counted(tmp_path):
    result, _ = measured((3, 5), FixedLinks(2, wrong=[(0, 1, True)]), tmp_path)
    wrong = {"3->5 enabled, 1000000 bytes": 7, "3->5 enabled, 16 bytes": 7}
    assert result.checks["copies_wrong"] == wrong


def test_a_pattern_belongs_to_one_pair():
    buffer = torch.empty(1 << 16, dtype=torch.int32)
    write_pattern(buffer, 1)
    assert differing(buffer, 1) == 0 and buffer.unique().numel() == buffer.numel()
    assert all(differing(buffer, seed) == buffer.numel() for seed in (2, 3, 9, 64))
    buffer[77] += 1
    assert differing(buffer, 1) == 1
    write_opposite(buffer, 1)
    assert differing(buffer, 1) == buffer.numel()


@given(st.integers(1, 40))
def test_matchings_hold_every_pair_once_and_no_member_twice(count):
    rounds = matchings(count)
    pairs = list(itertools.chain(*rounds))
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in rounds)
    assert all(len(pairs) == count // 2 for pairs in rounds)


def test_patterns_of_four(tmp_path):
    links = FixedLinks(4)
    options = {"concurrent": True, "repeats": 1, "bytes": 4800}
    result, _ = measured((0, 1, 2, 3), links, tmp_path, **options)
    rows = result.tables["p2p_concurrent"]["rows"]
    assert [row["pattern"] for row in rows] == ["matching"] * 3 + ["one_to_all", "all_to_one"] * 4
    pairs = [[(copy["from"], copy["to"]) for copy in row["copies"]] for row in rows]
    assert pairs[0] == [(0, 3), (3, 0), (1, 2), (2, 1)]
    assert pairs[3] == [(0, 1), (0, 2), (0, 3)] and pairs[4] == [(1, 0), (2, 0), (3, 0)]
    # 5 × 4800 bytes in 25 ms at once (four copies), in 15 ms alone (a pair both ways).
    first = rows[0]["copies"][0]
    assert first["gb_per_s"] == pytest.approx(4800 / 5e6)
    assert first["alone_gb_per_s"] == pytest.approx(4800 / 3e6)
    assert rows[0]["total_gb_per_s"] == pytest.approx(4 * 4800 / 5e6)
    assert result.metrics["p2p/matching_share"] == pytest.approx(3 / 5)
    # All that write to one member at once have places of their own in its buffer.
    inward = [copies for copies, _ in links.timed if len({copy.source for copy in copies}) == 3]
    assert [copy.target_offset for copy in inward[0]] == [0, 1600, 3200]
    assert "round 0: total 0.0  0->3 0.0 (0.0)" in result.output
    assert "disjoint pairs at once" in result.output


def test_two_workers_measure_every_matrix(forked):
    (found, disabled), other = forked("p2p_two")
    table = found["tables"]["p2p"]
    assert list(table["matrices"]) == NAMES and table["access"] == {"0-1": True}
    assert table["words"] == {"enabled": "shared memory", "disabled": "gloo messages"}
    for name, repeats in table["samples"].items():
        assert len(repeats) == 2
        for a, b in itertools.product(range(2), repeat=2):
            both = [matrix[a][b] for matrix in repeats]
            assert min(both) > 0 and max(both) < math.inf
            assert table["matrices"][name][a][b] == pytest.approx(sum(both) / 2)
    assert found["checks"]["copies_wrong"] == {} and found["checks"]["copies_compared"] == 24
    assert {**found, "output": ""} == {**other[0], "output": ""}
    # Only what is asked is measured.
    names = [name for name in NAMES if name.endswith("_disabled")]
    assert list(disabled["tables"]["p2p"]["matrices"]) == names
    assert not any("enabled" in name or "spread" in name for name in disabled["metrics"])
    assert "P2P disabled: gloo messages" in disabled["output"]


def test_three_workers_copy_all_at_once(forked):
    (found,) = forked("p2p_three")[0]
    rows = found["tables"]["p2p_concurrent"]["rows"]
    assert len(rows) == 3 + 2 * 3 and all(len(row["copies"]) == 2 for row in rows)
    for copy in itertools.chain(*(row["copies"] for row in rows)):
        assert copy["gb_per_s"] > 0 and copy["alone_gb_per_s"] > 0
    names = {"p2p/matching_gb_per_s", "p2p/one_to_all_share", "p2p/all_to_one_share"}
    assert names <= found["metrics"].keys() and found["checks"]["copies_wrong"] == {}
    raw = read_lines(forked.folder / "p2p_three" / "ranks" / "0.jsonl")
    assert sum(line["kind"] == "p2p" for line in raw) == 6 + len(rows)
    assert "all others to one at once" in found["output"]


def test_shades():
    rates, times = (100, 400), (2, 20)
    assert shade(400, rates, "GB/s") == 0 == shade(2, times, "µs")  # the better end is dark
    assert shade(100, rates, "GB/s") == 1 == shade(20, times, "µs")
    assert shade(392, (390, 393), "GB/s") < 0.02  # noise is no contrast


def test_the_copy_kernel_compiles():
    from benchmarks.p2p.gpus import compiled

    assert compiled("sm_90").startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"^nvrtcCompileProgram for sm_1 \(.+\): NVRTC_ERROR"):
        compiled("sm_1")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("copy", ["engine", "sm"])
@pytest.mark.parametrize("enabled", [False, True])
def test_real_copies_arrive_and_peer_access_stays_as_it_was(copy, enabled):
    # In a process that ends: a CUDA context left here would be foreign load to later cells.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        own.submit(check_real_copies, copy, enabled).result()


def check_real_copies(copy, enabled):
    """Copy between two GPUs in every way, with peer access as it was before and after."""
    from cuda.bindings import runtime

    from benchmarks.p2p.gpus import Gpus

    already = runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    links = Gpus((0, 1), 16 << 20, copy)
    try:
        torch.cuda.set_device(0)
        runtime.cudaSetDevice(0)
        if links.can_access(0, 1):
            answer = runtime.cudaDeviceEnablePeerAccess(1, 0)[0]
            assert answer in (runtime.cudaError_t.cudaSuccess, already)
        for read in (False, True):
            how = CopyMethod(enabled, 16 << 20, 5, read)
            for pair in (Copy(0, 1), Copy(1, 0), Copy(1, 1)):
                assert links.wrong_elements(pair, how) == 0
                assert links.time([pair], how)[1] > 0
            each_ms, all_ms = links.time([Copy(0, 1), Copy(1, 0)], how)
            assert all_ms >= 0.99 * max(each_ms) > 0
        small = CopyMethod(enabled, 16, 100, read=True)
        assert all(0 < us < 1000 for us in links.latency(Copy(0, 1), small))
        if links.can_access(0, 1):
            assert runtime.cudaDeviceEnablePeerAccess(1, 0)[0] == already
            runtime.cudaGetLastError()
    finally:
        links.close()
    assert torch.ones(4, device="cuda:1").to("cuda:0").sum().item() == 4  # torch goes on as before
