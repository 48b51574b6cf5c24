"""Models of the user's own that make their own batches: their form, and what they are refused."""

import dataclasses

import pytest
import torch
from build import make_cell
from torch import nn

from benchmarks.training.correctness import checksum
from conf.cell import Cell, Network
from trainers import models
from trainers.batches import DISTINCT, OwnModel, synthetic
from trainers.step import Training

CPU = torch.device("cpu")


class Tokens(OwnModel):
    """The smallest model of tokens: it predicts the next of few tokens from the one before."""

    def __init__(self, length=3, batch=lambda inputs, targets: (inputs, targets)):
        super().__init__()
        self.length, self.scores, self.given = length, nn.Embedding(5, 5), batch

    def batch(self, samples, generator):
        size = (samples, self.length + 1)
        text = torch.randint(5, size, generator=generator, device=generator.device)
        return self.given(text[:, :-1], text[:, 1:])

    def forward(self, tokens):
        return self.scores(tokens)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def tokens(self, tokens, targets):
        return tokens.numel()


def too_many():
    return Tokens(batch=lambda inputs, targets: (torch.cat([inputs, inputs[:1]]), targets))


def no_targets():
    return Tokens(batch=lambda inputs, targets: (inputs,))


def one_tensor():
    return Tokens(batch=lambda inputs, targets: inputs)


def plain(length=3):
    return nn.Linear(length, 1)


def cell_of(builder, **options):
    """A cell of one rank with a model of this file."""
    network = Network("mine", "python", f"{__name__}:{builder}", 0, 0, 0, 0.0, options, "samples")
    return make_cell((0,), {"name": "none"}, 4, model=network)


def test_samples_differ_between_ranks_and_steps_and_are_equal_for_equal_seeds():
    def drawn(rank, **changes):
        cell = dataclasses.replace(cell_of("Tokens"), **changes)
        batches = synthetic(cell, CPU, rank, models.build(cell.model))
        return [next(batches)[0] for _ in range(DISTINCT)]

    first, second = drawn(0)
    assert first.shape == (4, 3) and first.dtype == torch.int64 and not torch.equal(first, second)
    assert torch.equal(first, drawn(0)[0]) and not torch.equal(first, drawn(1)[0])
    assert not torch.equal(first, drawn(0, seed=1)[0])


def test_a_step_counts_samples_and_tokens_and_learns():
    training = Training(cell_of("Tokens"), CPU, 0)
    losses = []
    for _ in range(20):
        training.step()
        losses.append(training.loss.item())
    assert (training.images, training.tokens) == (20 * 4, 20 * 4 * 3)
    assert losses[-2] < losses[0] and losses[-1] < losses[1], "two batches take turns"


def test_few_tokens_with_one_sum_are_different_batches():
    """Their bits add up to the same; the record would have called such ranks equal."""
    tokens, swapped = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
    assert checksum([tokens]) == checksum([tokens.clone()]) != checksum([swapped])


def test_the_record_keeps_a_cell_of_samples():
    cell = cell_of("Tokens", length=7)
    assert Cell.from_dict(cell.to_dict()) == cell
    images = dataclasses.replace(cell, model=dataclasses.replace(cell.model, inputs="images"))
    assert images.key != cell.key


@pytest.mark.parametrize(
    ("builder", "error", "sentence"),
    [
        ("too_many", ValueError, r"\.batch gave a batch of a tensor \[5, 3\]; .* batch_size=4 sam"),
        ("no_targets", ValueError, r"\.batch gave tuple of a tensor \[4, 3\]; expected a tuple"),
        ("one_tensor", ValueError, r"\.batch gave a tensor \[4, 3\]; expected a tuple of tens"),
        ("plain", TypeError, r": returned Linear; expected a trainers\.batches\.OwnModel"),
    ],
)
def test_a_batch_or_a_module_of_another_form_is_one_sentence(builder, error, sentence):
    with pytest.raises(error, match=f":{builder}{sentence}"):
        Training(cell_of(builder), CPU, 0)


@pytest.mark.needs("timm")
def test_a_model_of_timm_is_built_with_its_channels_and_classes():
    network = Network("vit_tiny", "timm", "vit_tiny_patch16_224", 3, 10, 224, 0.0, {})
    with torch.device("meta"):
        model = models.build(network)
        scores = model(torch.zeros(2, 3, 224, 224))
    assert (model.training, scores.shape) == (True, (2, 10))
