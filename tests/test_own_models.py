"""Models of the user's own that make their own batches: their form, what they may ask for, and what they are refused."""

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

    def __init__(self, length=3):
        super().__init__()
        self.length, self.scores = length, nn.Embedding(5, 5)

    def batch(self, samples, generator):
        text = torch.randint(
            5, (samples, self.length + 1), generator=generator, device=generator.device
        )
        return text[:, :-1], text[:, 1:]

    def forward(self, tokens):
        return self.scores(tokens)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def tokens(self, tokens, targets):
        return tokens.numel()


def cell_of(builder, **options):
    """A cell of one rank with a model of this file."""
    network = Network("mine", "python", f"{__name__}:{builder}", 0, 0, 0, 0.0, options, "samples")
    return dataclasses.replace(
        make_cell((0,), batch_size=4, strategy={"name": "none"}), model=network
    )


def drawn(rank, **changed):
    cell = dataclasses.replace(cell_of("Tokens"), **changed)
    batches = synthetic(cell, CPU, rank, models.build(cell.model))
    return [next(batches)[0] for _ in range(DISTINCT)]


def test_samples_differ_between_ranks_and_steps_and_are_equal_for_equal_seeds():
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
    one, other = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
    assert checksum([one]) == checksum([one.clone()]) != checksum([other])


def test_the_record_keeps_a_cell_of_samples():
    cell = cell_of("Tokens", length=7)
    assert Cell.from_dict(cell.to_dict()) == cell
    images = dataclasses.replace(cell, model=dataclasses.replace(cell.model, inputs="images"))
    assert images.key != cell.key


class TooMany(Tokens):
    def batch(self, samples, generator):
        return super().batch(samples + 1, generator)


class NoTargets(Tokens):
    def batch(self, samples, generator):
        return super().batch(samples, generator)[:1]


class OneTensor(Tokens):
    def batch(self, samples, generator):
        return super().batch(samples, generator)[0]


@pytest.mark.parametrize(
    ("builder", "sentence"),
    [
        (
            "TooMany",
            r":TooMany\.batch gave a batch of a tensor \[5, 3\]; accepted are batch_size=4 samples",
        ),
        (
            "NoTargets",
            r":NoTargets\.batch gave tuple of a tensor \[4, 3\]; accepted is a tuple of tensors: what forward takes",
        ),
        ("OneTensor", r":OneTensor\.batch gave a tensor \[4, 3\]; accepted is a tuple of tensors"),
    ],
)
def test_a_batch_of_another_form_is_one_sentence(builder, sentence):
    with pytest.raises(ValueError, match=sentence):
        Training(cell_of(builder), CPU, 0)


def plain(length=3):
    return nn.Linear(length, 1)


def test_a_builder_of_samples_that_returns_another_module_is_named():
    with pytest.raises(
        TypeError, match=r":plain: returned Linear; accepted is a trainers\.batches\.OwnModel"
    ):
        models.build(cell_of("plain").model)


@pytest.mark.needs("timm")
def test_a_model_of_timm_is_built_with_its_channels_and_classes():
    network = Network("vit_tiny", "timm", "vit_tiny_patch16_224", 3, 10, 224, 0.0, {})
    with torch.device("meta"):
        model = models.build(network)
        scores = model(torch.zeros(2, 3, 224, 224))
    assert (model.training, scores.shape) == (True, (2, 10))


SAMPLES = ("model.library=python", f"model.builder={__name__}:Tokens", "model.inputs=samples")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["model.inputs=samples"],
            "model.inputs=samples: accepted with model.library=python, a model of your own",
        ),
        ([*SAMPLES, "image_size=64"], "image_size=64: accepted with model.inputs=images only"),
        ([*SAMPLES, "model.classes=7"], "model.classes=7: accepted with model.inputs=images only"),
        (["model.inputs=tokens"], "model.inputs=tokens: accepted are images or samples"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_samples_do_not_have_is_one_sentence(launch, arguments, sentence):
    code, out, err = launch(*arguments, "device=cpu", "dry_run=true")
    assert (code, out) == (2, "") and err.startswith("launch.py: ") and err.count("\n") == 1
    assert sentence in err
