"""`benchmark=host_link` on one CPU worker in this process, and its requests. Two ranks run in test_links' launch."""

import contextlib
import dataclasses

import pytest
import torch.distributed as dist
from build import declared, make_cell
from derived_results import run_whole
from hydra import compose
from omegaconf import OmegaConf

from benchmarks.host_link import derive, measure
from benchmarks.rank.ranks import Ranks
from benchmarks.record import CellFolder, read_lines
from benchmarks.request import Room, refuse
from conf.options import Refused
from conf.resolve import checked, resolve

OPTIONS = {"name": "host_link", "bytes": 1 << 20, "iterations": 4, "pageable": True, "threads": 1}


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    import torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (tmp_path / "ranks").mkdir()
    yield Ranks(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def test_a_cpu_worker_has_host_memory_and_no_link(alone, tmp_path):
    cell = dataclasses.replace(
        make_cell((0,)), benchmark=OPTIONS, declared=declared({"name": "none"}, OPTIONS)
    )
    result = run_whole(measure.run, cell, alone, CellFolder(tmp_path))
    rows = result["tables"]["host_link"]["rows"]
    assert [(row["operation"], row["memory"], row["at_once"], row["threads"]) for row in rows] == [
        ("copy", "host", 1, 1),
        ("add", "host", 1, 1),
    ]
    blocks = [
        line for line in read_lines(tmp_path / "ranks" / "0.jsonl") if line["kind"] == "block"
    ]
    for row, block, arrays in zip(rows, blocks, (2, 3), strict=True):
        seconds = sum(block["ms"]) / 1e3
        assert row["gb_per_s"] == pytest.approx(
            [arrays * (1 << 20) * 4 / seconds / 1e9]
        )  # STREAM counts the arrays
    assert result["metrics"] == {
        "host_link/one_host_copy_gb_per_s": rows[0]["gb_per_s"][0],
        "host_link/one_host_add_gb_per_s": rows[1]["gb_per_s"][0],
    }
    printed = result["output"]
    assert "sum of two arrays" in printed and "no link between host and device" in printed


def test_rows_of_gpus_become_metrics_with_the_limit_of_staging_first():
    def row(operation, memory, rates, total=None):
        return {"operation": operation, "memory": memory, "at_once": 1 if total is None else 2, "gb_per_s": rates,
                "sum_gb_per_s": total}  # fmt: skip

    rows = [row("to_device", "pinned", [55.0, 54.0]), row("both", "pinned", [50.0, 51.0]),
            row("both", "pinned", [30.0, 31.0], 60.0), row("to_host", "pageable", [9.0, 8.0])]  # fmt: skip
    assert list(derive.metrics(rows).items()) == [
        ("host_link/all_both_gb_per_s", 60.0),
        ("host_link/one_to_device_gb_per_s", 54.0),
        ("host_link/one_both_gb_per_s", 50.0),
        ("host_link/one_pageable_to_host_gb_per_s", 8.0),
    ]


def test_both_ways_start_before_either_is_waited_for(monkeypatch):
    said = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            said.append(f"{self.name} after {other.name}")

    monkeypatch.setattr(measure.torch.cuda, "stream", contextlib.nullcontext)
    timed, up, down = map(Stream, ("timed", "up", "down"))
    measure._at_once(
        timed, [(up, lambda: said.append("copy up")), (down, lambda: said.append("copy down"))]
    )
    assert said == [
        "up after timed",
        "down after timed",
        "copy up",
        "copy down",
        "timed after up",
        "timed after down",
    ]


def test_clocks_are_compared_over_windows_that_are_long_enough():
    def window(*clocks):
        return [
            {"host_ms": host_ms, "device_ms": host_ms * (1 + share)} for host_ms, share in clocks
        ]

    assert derive.disagreement(
        window((99.9, 0.5), (100.0, 0.001), (200.0, 0.002))
    ) == pytest.approx(0.002)
    assert derive.disagreement(window((99.9, 0.0))) is None


@pytest.mark.parametrize(
    ("device", "memory", "size", "where"),
    [
        ("cuda", 1 << 30, (1 << 29) + 4, "the smallest GPU's memory"),
        ("cpu", None, 1 << 40, "the host's free memory"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(device, memory, size, where):
    cell = dataclasses.replace(
        make_cell((0, 1)), device=device, benchmark=OPTIONS | {"bytes": size}
    )
    with pytest.raises(
        Refused, match=f"benchmark.bytes={size}: the buffers of 2 ranks do not fit {where}"
    ):
        refuse(cell, Room(memory, 8 << 30))


def test_arrays_of_whole_elements_only(hydra):
    cell = dataclasses.replace(make_cell((0, 1)), benchmark=OPTIONS | {"bytes": (1 << 20) + 2})
    with pytest.raises(Refused, match=r"^benchmark.bytes=1048578: accepted are multiples of 4$"):
        refuse(cell, Room())


def test_a_cell_without_training_has_no_model_and_no_strategy(hydra, launch):
    def cell(*overrides):
        config, _ = checked(
            OmegaConf.to_object(compose("config", ["benchmark=host_link", *overrides]))
        )
        return resolve(config, (0, 1), "cpu")

    plain = cell()
    assert (
        not plain.trains
        and plain.name == "host_link · gpus 0,1"
        and plain.folder.startswith("host_link-gpus0-1-")
    )
    assert cell("model=vgg16", "strategy=none", "batch_size=7", "precision=bf16").key == plain.key
    assert cell("benchmark.threads=3").key != plain.key and cell(
        "benchmark.threads=3"
    ).name.endswith("threads=3")


def test_what_has_no_effect_is_said(launch):
    status, said, _ = launch(
        "gpus=0", "benchmark=host_link", "model=vgg16", "strategy.bucket_cap_mb=3", "dry_run=true"
    )
    assert status == 0
    assert (
        "benchmark=host_link trains nothing: model=vgg16, strategy.bucket_cap_mb=3 changes nothing in it"
        in said
    )
