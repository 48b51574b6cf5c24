"""`benchmark=host_link` on one CPU worker in this process, what is derived, and its requests."""

import contextlib
import dataclasses

import pytest
from build import composed_cell, declared, make_cell
from derived_results import run_whole

from benchmarks.host_link import derive, measure
from benchmarks.record import CellFolder, read_lines

OPTIONS = {"name": "host_link", "bytes": 1 << 20, "iterations": 4, "pageable": True, "threads": 1}


def host_cell(gpus=(0, 1), device="cpu", **options):
    return dataclasses.replace(
        make_cell(gpus),
        device=device,
        benchmark=OPTIONS | options,
        declared=declared({"name": "none"}, OPTIONS),
    )


def test_a_cpu_worker_has_host_memory_and_no_link(alone, tmp_path):
    (tmp_path / "ranks").mkdir()
    result = run_whole(measure.run, host_cell((0,)), alone, CellFolder(tmp_path))
    rows = result["tables"]["host_link"]["rows"]
    lines = read_lines(tmp_path / "ranks" / "0.jsonl")
    blocks = [line for line in lines if line["kind"] == "block"]
    for row, block, name, arrays in zip(rows, blocks, ("copy", "add"), (2, 3), strict=True):
        assert (row["operation"], row["memory"], row["at_once"]) == (name, "host", 1)
        # STREAM counts the arrays.
        rate = arrays * (1 << 20) * 4 / sum(block["ms"]) / 1e6
        assert row["gb_per_s"] == pytest.approx([rate])
        assert result["metrics"][f"host_link/one_host_{name}_gb_per_s"] == row["gb_per_s"][0]
    printed = result["output"]
    assert "sum of two arrays" in printed and "no link between host and device" in printed


def test_gpus_have_the_reference_of_staging_first_and_clocks_are_compared():
    def window(operation, memory, at_once, *ms, host_ms=99.9, off=0.5):
        facts = {"operation": operation, "memory": memory, "at_once": at_once, "bytes": 10**6,
                 "counted_bytes": 10**6, "threads": 2, "kind": "block"}  # fmt: skip
        clocks = {"host_ms": host_ms, "device_ms": host_ms * (1 + off)}
        return [{**facts, **clocks, "ms": [own]} for own in ms]

    windows = [
        window("to_device", "pinned", 1, 0.5, 0.25, host_ms=100.0, off=0.001),
        window("both", "pinned", 1, 0.5, 0.5, host_ms=200.0, off=0.002),
        window("both", "pinned", 2, 1.0, 0.8),
        window("to_host", "pageable", 1, 2.0, 4.0),
    ]
    lines = {rank: [window[rank] for window in windows] for rank in (0, 1)}
    found = derive.derive(lines, host_cell(device="cuda"))
    assert list(found.metrics.items()) == [
        ("host_link/all_both_gb_per_s", 2.0),
        ("host_link/one_to_device_gb_per_s", 2.0),
        ("host_link/one_both_gb_per_s", 2.0),
        ("host_link/one_pageable_to_host_gb_per_s", 0.25),
    ]
    assert found.checks == {"clock_disagreement": pytest.approx(0.002)}
    assert derive.derive({0: lines[0][2:], 1: lines[1][2:]}, host_cell(device="cuda")).checks == {}


def test_both_ways_start_before_either_is_waited_for(monkeypatch):
    events = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, stream):
            events.append(f"{self.name} after {stream.name}")

    class Buffer(list):
        device, name = "cuda", "up"

        def copy_(self, source, non_blocking):
            events.append(f"copy {self.name}")

    class Down(Buffer):
        name = "down"

    names = iter(("up", "down"))
    monkeypatch.setattr(measure.torch.cuda, "Stream", lambda device: Stream(next(names)))
    monkeypatch.setattr(measure.torch.cuda, "current_stream", lambda device: Stream("timed"))
    monkeypatch.setattr(measure.torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(measure, "_filled", lambda size, pinned: Down())
    *_, both = measure._copies(Buffer([0]), Buffer([0]), "pinned")
    both.run()
    assert (both.name, events) == (
        "both",
        ["up after timed", "down after timed", "copy up", "copy down", "timed after up", "timed after down"],
    )  # fmt: skip


def test_a_cell_without_training_has_no_model_and_no_strategy(hydra):
    def cell(*overrides):
        return composed_cell("benchmark=host_link", *overrides, device="cpu")

    plain, threads = cell(), cell("benchmark.threads=3")
    assert not plain.trains and plain.name == "host_link · gpus 0,1"
    assert plain.folder.startswith("host_link-gpus0-1-")
    assert cell("model=vgg16", "strategy=none", "batch_size=7", "precision=bf16").key == plain.key
    assert threads.key != plain.key and threads.name.endswith("threads=3")


def test_what_has_no_effect_is_said(launch):
    given = ["gpus=0", "benchmark=host_link", "model=vgg16", "strategy.bucket_cap_mb=3"]
    status, printed, _ = launch(*given, "dry_run=true")
    assert status == 0
    sentence = "trains nothing: model=vgg16, strategy.bucket_cap_mb=3 changes nothing in it"
    assert f"benchmark=host_link {sentence}" in printed
