"""`benchmark=p2p`: its requests, what it counts, two and three real CPU workers, its layout read back, records and heat maps.

The tests of GPUs at the end need some: `pytest -m multi_gpu tests/test_p2p_benchmark.py`.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from build import make_cell
from hydra import compose
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from analysis.__main__ import main
from analysis.errors import UnreadableInput
from analysis.native.p2p import parse_p2p
from analysis.report.heat_map import readable, shade
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
from benchmarks.request import Room, refuse
from conf.options import Refused
from conf.resolve import checked, resolve

DATA = Path(__file__).parent / "data"
NAMES = [
    "unidirectional_disabled", "unidirectional_enabled", "unidirectional_enabled_reads", "bidirectional_disabled",
    "bidirectional_enabled", "latency_cpu_disabled", "latency_cpu_enabled", "latency_cpu_enabled_reads",
]  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------------


def cell(device, *overrides, gpus=(0, 1)):
    config, _ = checked(OmegaConf.to_object(compose("config", ["benchmark=p2p", *overrides])))
    return resolve(config, gpus, device)


@pytest.mark.parametrize(
    ("device", "memory", "asked", "said"),
    [
        (
            "cuda",
            24 << 30,
            "bytes=40000000000",
            "bytes=40000000000: the buffers do not fit the smallest GPU's memory; ",
        ),
        ("cpu", None, "bytes=1000000000000", "bytes=1000000000000: the buffers do not fit "),
        ("cuda", None, "bytes=100", "bytes=100: accepted are multiples of 16"),
        ("cuda", None, "latency_bytes=20", "latency_bytes=20: accepted are multiples of 16"),
        ("cpu", None, "copy=sm", "copy=sm: needs a GPU; accepted on CPU workers is engine"),
    ],
)
def test_what_cannot_be_measured_is_refused(hydra, device, memory, asked, said):
    with pytest.raises(Refused) as refused:
        refuse(cell(device, f"benchmark.{asked}"), Room(memory, 8 << 30))
    assert str(refused.value).startswith(f"benchmark.{said}")


def test_without_shared_memory_no_buffer_of_a_cpu_worker_fits(hydra):
    with pytest.raises(Refused, match=r"the buffers do not fit /dev/shm; accepted are at most 0$"):
        refuse(cell("cpu"), Room(shared_bytes=0))


@pytest.mark.parametrize(
    "asked", ["p2p=on", "copy=dma", "direction=both", "iterations=0", "bytes=15"]
)
def test_unknown_words_and_numbers_are_refused(hydra, asked):
    with pytest.raises(Refused, match=f"^benchmark.{asked}: accepted"):
        cell("cuda", f"benchmark.{asked}")


@pytest.mark.parametrize("asked", ["direction=read", "copy=sm"])
def test_what_peer_access_alone_does_is_refused_without_it(hydra, asked):
    with pytest.raises(
        Refused, match=f"^benchmark.p2p=disabled: accepted without benchmark.{asked}$"
    ):
        cell("cuda", "benchmark.p2p=disabled", f"benchmark.{asked}")


def test_the_largest_buffers_that_fit_pass(hydra):
    asked = cell("cuda", f"benchmark.bytes={(22 << 30) // 2}")
    refuse(asked, Room(24 << 30))
    refuse(asked, Room())  # the driver did not say


# --- what is counted: wires whose times are known ---------------------------------------------------------------


class Known:
    """A copy within a member takes 1 ms, one to another 2 ms, and each further copy at once 1 ms more for all."""

    words = {"enabled": "known", "disabled": "known"}  # noqa: RUF012
    late, enqueued_by = 0, None

    def __init__(self, count, without=(), wrong=()):
        self.devices = [
            {"name": "NVIDIA H200", "bus_id": f"0000:0{one}:1a"} for one in range(count)
        ]
        self.without, self.wrong, self.asked = without, wrong, []

    def can_access(self, a, b):
        return (a, b) not in self.without

    def time(self, copies, how):
        self.asked.append((copies, how))
        ms = [(1 if copy.source == copy.target else 2) + len(copies) - 1 for copy in copies]
        return [one * how.iterations for one in ms], max(ms) * how.iterations

    def latency(self, copy, how):
        return 1.0 + copy.source, 5.0 + copy.target

    def wrong_elements(self, copy, how):
        return 7 if (copy.source, copy.target, how.enabled) in self.wrong else 0

    def close(self):
        self.closed = True


def known(ids, wires, tmp_path, **options):
    """(result, raw lines) of measuring wires whose times are known."""
    defaults = OmegaConf.to_container(OmegaConf.load(p2p_yaml()))
    defaults |= {"bytes": 1_000_000, "repeats": 2} | options
    folder = CellFolder(tmp_path)
    path = folder.rank_lines(0)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    result, reporter = Result(), Reporter(folder, 0)
    measure.measure(ids, wires, defaults, result, reporter)
    reporter.line("result", **dataclasses.asdict(result))
    lines = list(read_lines(path))
    derived = derive.derive({0: lines}, dataclasses.replace(make_cell(ids), benchmark=defaults))
    return SimpleNamespace(
        **derived.with_facts(dataclasses.asdict(result)), output=derived.output
    ), lines


def p2p_yaml():
    return Path(__file__).parent.parent / "conf" / "benchmark" / "p2p.yaml"


def test_the_counting_is_the_tools(tmp_path):
    result, lines = known((3, 5), Known(2), tmp_path, direction="read")
    matrices = result.tables["p2p"]["matrices"]
    assert list(matrices) == [
        "unidirectional_disabled", "unidirectional_enabled", "unidirectional_enabled_reads", "bidirectional_disabled",
        "bidirectional_enabled", "latency_gpu_disabled", "latency_cpu_disabled", "latency_gpu_enabled",
        "latency_cpu_enabled", "latency_gpu_enabled_reads", "latency_cpu_enabled_reads",
    ]  # fmt: skip
    # 1 MB in 2 ms; within one member it is read and written, in 1 ms.
    assert matrices["unidirectional_enabled"] == [[2.0, 0.5], [0.5, 2.0]]
    # 2 MB in 3 ms; within one member 4 MB in 2 ms.
    assert matrices["bidirectional_disabled"] == [
        [2.0, pytest.approx(2 / 3)],
        [pytest.approx(2 / 3), 2.0],
    ]
    assert matrices["latency_gpu_enabled"] == [[1.0, 1.0], [2.0, 2.0]]  # the row copies
    assert matrices["latency_gpu_enabled_reads"] == [
        [1.0, 2.0],
        [1.0, 2.0],
    ]  # … and fetches from the column
    measured = [line for line in lines if line["kind"] == "p2p"]
    assert len(measured) == 2 * len(matrices)  # every repeat of every matrix
    assert result.checks == {"copies_compared": 24, "copies_wrong": {}, "measured_late": 0}
    assert next(iter(result.metrics)) == "p2p/unidirectional_enabled_gb_per_s"
    assert result.metrics["p2p/latency_gpu_disabled_most_us"] == 2.0
    assert result.metrics["p2p/bandwidth_spread_share"] == 0


def test_both_directions_are_two_writes_and_a_read_is_made_by_its_target(tmp_path):
    wires = Known(2)
    known((0, 1), wires, tmp_path, direction="read", repeats=1, p2p="enabled")
    between = [(copies, how) for copies, how in wires.asked if copies[0].source != copies[0].target]
    assert [copies for copies, _ in between] == [
        [Copy(0, 1)], [Copy(1, 0)],
        [Copy(1, 0)], [Copy(0, 1)],
        [Copy(0, 1), Copy(1, 0)], [Copy(1, 0), Copy(0, 1)],
    ]  # fmt: skip
    assert [[how.runner(copy) for copy in copies] for copies, how in between] == [
        [0],
        [1],
        [0],
        [1],
        [0, 1],
        [1, 0],
    ]


def test_one_member_alone_has_a_diagonal(tmp_path):
    result, _ = known((4,), Known(1), tmp_path, concurrent=True)
    assert result.metrics["p2p/local_unidirectional_enabled_gb_per_s"] == 2.0
    assert "p2p_concurrent" not in result.tables
    assert result.output.splitlines()[-1].startswith("One member alone")


def test_a_required_pair_without_access_ends_the_cell_with_a_sentence(tmp_path):
    wires = Known(3, without=[(2, 0)])
    with pytest.raises(
        ValueError, match=r"^benchmark.p2p=required: no peer access between GPUs 1-9;"
    ):
        known((9, 4, 1), wires, tmp_path, p2p="required")
    assert not wires.asked
    assert known((9, 4, 1), wires, tmp_path)[0].tables["p2p"]["access"] == {
        "4-9": True,
        "1-9": False,
        "1-4": True,
    }


def test_elements_that_did_not_arrive_are_counted(tmp_path):
    result, _ = known((3, 5), Known(2, wrong=[(0, 1, True)]), tmp_path)
    assert result.checks["copies_wrong"] == {
        "3->5 enabled, 1000000 bytes": 7,
        "3->5 enabled, 16 bytes": 7,
    }


def test_a_pattern_belongs_to_one_pair():
    buffer = torch.empty(1 << 16, dtype=torch.int32)
    write_pattern(buffer, 1)
    assert differing(buffer, 1) == 0 and buffer.unique().numel() == buffer.numel()
    assert all(differing(buffer, other) == buffer.numel() for other in (2, 3, 9, 64))
    buffer[77] += 1
    assert differing(buffer, 1) == 1
    write_opposite(buffer, 1)
    assert differing(buffer, 1) == buffer.numel()


# --- many copies at once ----------------------------------------------------------------------------------------


@given(st.integers(1, 40))
def test_matchings_hold_every_pair_once_and_no_member_twice(count):
    rounds = matchings(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))
    assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in rounds)
    assert all(len(pairs) == count // 2 for pairs in rounds)


def test_patterns_of_four(tmp_path):
    wires = Known(4)
    result, _ = known((0, 1, 2, 3), wires, tmp_path, concurrent=True, repeats=1, bytes=4800)
    rows = result.tables["p2p_concurrent"]["rows"]
    assert [row["pattern"] for row in rows] == ["matching"] * 3 + ["one_to_all", "all_to_one"] * 4
    first, outward, inward = rows[0], rows[3], rows[4]
    assert [(copy["from"], copy["to"]) for copy in first["copies"]] == [
        (0, 3),
        (3, 0),
        (1, 2),
        (2, 1),
    ]
    # 5 × 4800 bytes in 25 ms at once (four copies), in 15 ms alone (a pair both ways).
    assert first["copies"][0]["gb_per_s"] == pytest.approx(4800 / 5e6)
    assert first["copies"][0]["alone_gb_per_s"] == pytest.approx(4800 / 3e6)
    assert first["total_gb_per_s"] == pytest.approx(4 * 4800 / 5e6)
    assert {(copy["from"], copy["to"]) for copy in outward["copies"]} == {(0, 1), (0, 2), (0, 3)}
    assert {(copy["from"], copy["to"]) for copy in inward["copies"]} == {(1, 0), (2, 0), (3, 0)}
    assert result.metrics["p2p/matching_share"] == pytest.approx(3 / 5)
    # All that write to one member at once have places of their own in its buffer.
    together = next(
        copies
        for copies, _ in wires.asked
        if len({copy.source for copy in copies}) == 3 == len(copies)
    )
    assert [copy.target_offset for copy in together] == [0, 1600, 3200]
    text = result.output
    assert "round 0: total 0.0  0->3 0.0 (0.0)" in text and "disjoint pairs at once" in text


# --- CPU workers ------------------------------------------------------------------------------------------------


def test_two_workers_measure_every_matrix(forked):
    one, other = forked("p2p_two")
    found, _ = one
    table = found["tables"]["p2p"]
    assert list(table["matrices"]) == NAMES
    assert table["words"] == {"enabled": "shared memory", "disabled": "gloo messages"} and table[
        "access"
    ] == {"0-1": True}
    assert all(
        0 < value < math.inf
        for square in table["matrices"].values()
        for row in square
        for value in row
    )
    for name, squares in table["samples"].items():
        for a, b in itertools.product(range(2), repeat=2):
            both = [square[a][b] for square in squares]
            assert len(both) == 2 and table["matrices"][name][a][b] == pytest.approx(sum(both) / 2)
    assert found["checks"]["copies_wrong"] == {} and found["checks"]["copies_compared"] == 24
    assert {**found, "output": ""} == {**other[0], "output": ""}


def test_only_what_is_asked_is_measured(forked):
    found = forked("p2p_two")[0][1]
    assert list(found["tables"]["p2p"]["matrices"]) == [
        name for name in NAMES if name.endswith("_disabled")
    ]
    assert not any("enabled" in name or "spread" in name for name in found["metrics"])
    assert "P2P disabled: gloo messages" in found["output"]


def test_three_workers_copy_all_at_once(forked):
    (found,) = forked("p2p_three")[0]
    rows = found["tables"]["p2p_concurrent"]["rows"]
    assert len(rows) == 3 + 2 * 3 and all(len(row["copies"]) == 2 for row in rows)
    assert all(
        copy[key] > 0
        for row in rows
        for copy in row["copies"]
        for key in ("gb_per_s", "alone_gb_per_s")
    )
    assert {"p2p/matching_gb_per_s", "p2p/one_to_all_share", "p2p/all_to_one_share"} <= set(
        found["metrics"]
    )
    assert found["checks"]["copies_wrong"] == {}
    raw = read_lines(forked.folder / "p2p_three" / "ranks" / "0.jsonl")
    assert sum(line["kind"] == "p2p" for line in raw) == 6 + len(rows)
    assert "all others to one at once" in found["output"]


# --- records ----------------------------------------------------------------------------------------------------


def a_record(tmp_path, ids=(0, 1, 2, 3)):
    """The part of a record that is read, as plain JSON."""
    result, _ = known(ids, Known(len(ids), [(0, 1)]), tmp_path)
    topology = (DATA / "topo_h200_x4.txt").read_text()
    return {"state": "finished", "name": "p2p · gpus 0,1,2,3", "environment": {"topology": topology},
            "tables": result.tables}  # fmt: skip


def test_a_record_is_read_as_the_tools_text_is(tmp_path, capsys):
    record = a_record(tmp_path)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    assert main(["p2p", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    table = record["tables"]["p2p"]
    assert {name: told[name] for name in ("devices", "access", "matrices")} == {
        name: table[name] for name in ("devices", "access", "matrices")
    }
    assert [one["matrices"]["latency_gpu_enabled"] for one in told["repeats"]] == table["samples"][
        "latency_gpu_enabled"
    ]
    table["words"] = {"enabled": "peer access", "disabled": "copies that the driver stages"}
    for can, words, said in (
        (False, table["words"], "no peer access: 0-1"),
        (
            True,
            {"enabled": "shared memory", "disabled": "gloo messages"},
            "every pair has shared memory",
        ),
    ):
        table["access"], table["words"] = {name: can for name in table["access"]}, words
        file.write_text(json.dumps(record))
        assert main(["p2p", str(file)]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "the document is cut or broken"),
        ('{"state": "failed", "tables": {}}', "the cell is failed"),
        ('{"state": "finished", "tables": {"host_link": {}}}', "it has no tables.p2p"),
        ('{"tables": {"p2p": {"matrices": {"a": 1}}}}', "tables.p2p is damaged"),
    ],
)
def test_other_json_is_refused_with_a_sentence(tmp_path, capsys, content, said):
    file = tmp_path / "record.json"
    file.write_text(content)
    assert main(["p2p", str(file)]) == 2
    assert f"accepted is a record.json of benchmark=p2p; {said}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    return json.dumps(a_record(tmp_path_factory.mktemp("known"), (0, 1)))


@settings(derandomize=True, max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_a_damaged_record_is_unreadable_or_has_numbers_of_its_own(undamaged, data):
    record = json.loads(undamaged)
    at, key = record, "tables"
    for _ in range(data.draw(st.integers(1, 6))):
        at = at[key]
        if not isinstance(at, dict | list) or not at:
            break
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    if isinstance(at, dict | list) and at:
        at[key] = data.draw(st.sampled_from([None, "x", -1, 1e400, [], {}, [[1]], {"0": 1}, True]))
    with contextlib.suppress(UnreadableInput):
        for one in parse_p2p(json.dumps(record)).repeats:
            json.dumps(one.to_json(), allow_nan=False)


# --- heat maps -----


def test_shades_and_inks():
    rates, times = (100, 400), (2, 20)
    assert shade(400, rates, "GB/s") == 0 == shade(2, times, "µs")  # the better end is dark
    assert shade(100, rates, "GB/s") == 1 == shade(20, times, "µs")
    assert shade(392, (390, 393), "GB/s") < 0.02  # noise is no contrast
    assert [readable(fill) for fill in ("#00224e", "#7d7c78", "#fee838")] == [
        "#ffffff",
        "#000000",
        "#000000",
    ]


# --- GPUs -------------------------------------------------------------------------------------------------------


def test_the_copy_kernel_compiles():
    from benchmarks.p2p.gpus import compiled

    assert compiled("sm_90").startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"^nvrtcCompileProgram for sm_1 \(.+\): NVRTC_ERROR"):
        compiled("sm_1")


class Driver:
    """Peer access as the CUDA runtime switches it, of as many GPUs as one likes."""

    def __init__(self, enabled):
        from cuda.bindings import runtime

        self.cudaError_t, self.enabled, self.current = runtime.cudaError_t, set(enabled), 0

    def cudaDeviceEnablePeerAccess(self, b, flags):
        before = (self.current, b) in self.enabled
        self.enabled.add((self.current, b))
        return (
            self.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
            if before
            else self.cudaError_t.cudaSuccess,
        )

    def cudaDeviceDisablePeerAccess(self, b):
        before = (self.current, b) in self.enabled
        self.enabled.discard((self.current, b))
        return (
            self.cudaError_t.cudaSuccess
            if before
            else self.cudaError_t.cudaErrorPeerAccessNotEnabled,
        )

    def cudaGetLastError(self):
        return (self.cudaError_t.cudaSuccess,)


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs without buffers, on a driver that only switches peer access; 0 and 2 have none. (gpus, driver)"""
    from benchmarks.p2p import gpus

    driver = Driver({(1, 0)})  # as torch may leave it
    monkeypatch.setattr(gpus, "runtime", driver)
    monkeypatch.setattr(
        gpus.Gpus, "_select", lambda self, number: setattr(driver, "current", number)
    )
    found = object.__new__(gpus.Gpus)
    found._names, found._own, found._waits, found.late = ["GPU 4", "GPU 2", "GPU 7"], 0, set(), 0
    found._access = {(a, b): {a, b} != {0, 2} for a in range(3) for b in range(3) if a != b}
    return found, driver


@pytest.mark.parametrize(
    ("wanted", "inside"),
    [(True, {(0, 1), (1, 0), (1, 2), (2, 1)}), (False, set())],
    ids=["enabled", "disabled"],
)
def test_peer_access_is_as_it_was_afterwards(gpus, wanted, inside):
    found, driver = gpus
    copies = [Copy(0, 1), Copy(2, 1), Copy(0, 2), Copy(1, 1)]
    with found._peers(copies, wanted):
        assert driver.enabled == inside
    assert driver.enabled == {(1, 0)} and driver.current == 0
    with pytest.raises(KeyError), found._peers(copies, wanted):
        raise KeyError
    assert driver.enabled == {(1, 0)}


def test_a_hold_that_ends_early_is_made_longer_but_not_for_ever(gpus, monkeypatch):
    found, _ = gpus
    holds, lasting = [], [40_000_000, math.inf]

    def held(copies, how, cycles):
        holds.append(cycles)
        return ([1.0], 1.0), cycles / 1e9, cycles >= lasting[0]

    monkeypatch.setattr(found, "_held", held)
    small, large = CopyMethod(True, 16, 100), CopyMethod(False, 1 << 20, 5)
    found._timed([Copy(0, 1)], small)
    assert holds == [10_000_000, 40_000_000] and found.late == 0
    del lasting[0]
    assert (
        found._timed([Copy(0, 1)], large)[1] == 0.01
    )  # the first try: longer holds are waited for
    found._timed([Copy(0, 1)], large)  # the driver waits: one hold is enough to know
    assert holds[2:] == [10_000_000, 40_000_000, 160_000_000, 10_000_000] and found.late == 2


def test_the_loop_in_c_makes_every_copy_with_its_own_addresses(gpus):
    found, _ = gpus
    made = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * 8)
    def function(*given):
        made.append(given[:6])
        return 0

    found._copy_address, found._kernels = ctypes.cast(function, ctypes.c_void_p).value, []
    found._buffers = [
        tuple(SimpleNamespace(address=100 * gpu + side) for side in (10, 50)) for gpu in range(3)
    ]
    lane = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7))
    seconds = found._enqueuer(lane, Copy(0, 2, target_offset=4), CopyMethod(False, 16, 3))()
    assert made == [(254, 2, 10, 0, 16, 7)] * 3 and 0 < seconds < 1


@pytest.mark.multi_gpu
@pytest.mark.parametrize("copy", ["engine", "sm"])
@pytest.mark.parametrize("enabled", [False, True])
def test_real_copies_arrive_and_peer_access_stays_as_it_was(copy, enabled):
    # In a process that ends: a CUDA context left here would be foreign load to the cells of later tests.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        own.submit(check_real_copies, copy, enabled).result()


def check_real_copies(copy, enabled):
    """Copy between two GPUs in every way, with peer access as it was before and after."""
    from cuda.bindings import runtime

    from benchmarks.p2p.gpus import Gpus

    already = runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    wires = Gpus((0, 1), 16 << 20, copy)
    try:
        torch.cuda.set_device(0)
        runtime.cudaSetDevice(0)
        if wires.can_access(0, 1):
            assert runtime.cudaDeviceEnablePeerAccess(1, 0)[0] in (
                runtime.cudaError_t.cudaSuccess,
                already,
            )
        for read in (False, True):
            how = CopyMethod(enabled, 16 << 20, 5, read)
            for one in (Copy(0, 1), Copy(1, 0), Copy(1, 1)):
                assert wires.wrong_elements(one, how) == 0
                assert wires.time([one], how).all_ms > 0
            both = wires.time([Copy(0, 1), Copy(1, 0)], how)
            assert both.all_ms >= 0.99 * max(both.each_ms) > 0
        latency = wires.latency(Copy(0, 1), dataclasses.replace(how, size_bytes=16, iterations=100))
        assert 0 < latency.gpu_us < 1000 and 0 < latency.cpu_us < 1000
        if wires.can_access(0, 1):
            assert runtime.cudaDeviceEnablePeerAccess(1, 0)[0] == already
            runtime.cudaGetLastError()
    finally:
        wires.close()
    assert torch.ones(4, device="cuda:1").to("cuda:0").sum().item() == 4  # torch goes on as before
