"""A data loader of the user's own: the form of its batches, and whether it limits the rate."""

import dataclasses
import gc
import time

import pytest
import torch
from build import make_cell
from derived_results import run_whole, write_record
from torch import nn

from benchmarks.record import CellFolder
from benchmarks.training import request, throughput
from conf.cell import Cell, Network
from trainers.batches import LoadedBatches, OwnModel

CPU = torch.device("cpu")
STEP_SECONDS = 0.01


class Steady(OwnModel):
    """A model whose step takes 10 ms, whatever else the machine does: a loader's cost is known."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def batch(self, samples, generator):
        return torch.randn(samples, 3, generator=generator), torch.zeros(samples)

    def forward(self, values):
        time.sleep(STEP_SECONDS)
        return self.layer(values).flatten()

    def loss(self, outputs, targets):
        return (outputs - targets).square().mean()


class Batches:
    """Batches that are at hand, each after a pause."""

    def __init__(self, batch_size, seconds=0.0):
        self.seconds = seconds
        self.batches = [(torch.randn(batch_size, 3), torch.zeros(batch_size)) for _ in range(4)]

    def __iter__(self):
        for batch in self.batches:
            time.sleep(self.seconds)
            yield batch


def loader(batch_size, rank, world_size, seed, kind="steady", seconds=0.0, pixels=28):
    if kind == "pictures":
        images = torch.zeros(batch_size, 1, pixels, pixels, dtype=torch.uint8)
        return [(images, torch.zeros(batch_size, dtype=torch.int64))]
    return {
        "steady": Batches(batch_size, seconds),
        "empty": [],
        "ends": iter(Batches(batch_size)),
        "too_small": Batches(batch_size - 1),
        "no_targets": [[torch.zeros(batch_size, 3)]],
        "no_loader": 3,
    }[kind]


def data(**options):
    return {"name": "mine", "loader": f"{__name__}:loader", "options": options}


def cell_of(**options):
    """A cell of one rank whose batches come from the loader of this file."""
    network = Network("steady", "python", f"{__name__}:Steady", 0, 0, 0, 0.0, {}, "samples")
    return make_cell((0,), {"name": "none"}, 4, model=network, data=data(**options))


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_loader_that_sleeps_is_told_as_input_bound_with_its_share_and_a_fast_one_is_not(
    alone, tmp_path, monkeypatch, seconds
):
    monkeypatch.setattr(request, "MOST_PER_ABBA_WINDOW", 5)
    # Before each of 30 windows, of a process with thousands of tests.
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    cell, folder = cell_of(seconds=seconds), CellFolder(tmp_path).make()
    run_whole(throughput.run, cell, alone, folder)
    record = write_record(CellFolder(tmp_path / "cells" / cell.key), 1)
    share, wait_ms = record.metrics["data/cost_share"], record.metrics["data/wait_ms"]
    if seconds:
        assert 0.5 < share < 0.85, "two thirds, on an idle machine"
        assert record.metrics["data/cost_ms"] > 15 and wait_ms > 20
        assert f"({100 * share:.1f} % of a step" in record.validity.codes["input_bound"]
    else:  # its share is noise, which on a loaded machine may be above the limit of the check
        assert ("input_bound" in record.validity.codes) <= (share > 0.02)
        assert abs(share) < 0.5 and wait_ms < 5


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("empty", "gave no batch; expected what can be read again and again, such as torch's"),
        ("ends", "ended after 4 batches and did not begin again; expected what can be read "),
        ("too_small", r"gave a batch of a tensor \[3, 3\]; expected batch_size=4 samples"),
        ("no_targets", r"gave list of a tensor \[4, 3\]; expected a tuple of tensors"),
        ("no_loader", "returned int; expected an iterable, such as torch's DataLoader"),
    ],
)
def test_a_loader_of_another_form_is_one_sentence(kind, sentence):
    def draw():
        batches = LoadedBatches(cell_of(kind=kind), CPU, 0)
        return [next(batches) for _ in range(5)]

    with pytest.raises((ValueError, TypeError), match=f"^data.loader={__name__}:loader {sentence}"):
        draw()


def test_images_of_a_loader_come_as_the_first_layer_computes_and_in_their_size():
    def batches(**options):
        cell = make_cell((0,), batch_size=4, precision="bf16")
        changes = {"channels_last": True, "data": data(kind="pictures", **options)}
        return LoadedBatches(dataclasses.replace(cell, **changes), CPU, 0)

    loaded = batches()
    images, labels = next(loaded)
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last) and len(loaded.waited_ms) == 1
    with pytest.raises(ValueError, match=r"expected images \[4, 1, 28, 28\] and labels"):
        next(batches(pixels=32))


def test_a_cell_with_a_loader_has_another_key_and_is_read_back():
    cell = cell_of(seconds=1)
    assert Cell.from_dict(cell.to_dict()) == cell
    changed = [cell, cell_of(seconds=2), dataclasses.replace(cell, data={})]
    assert len({cell.key for cell in changed}) == 3
