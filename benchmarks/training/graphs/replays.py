"""Facts about the CUDA graphs of a cell: whether a replay does what the step does without a graph, and how often each ran.

A gradient that the graph lacks, a batch that is not copied to where the graph reads it, an update that is left out: each gives
other gradients or other weights than the same step that is launched kernel by kernel, from the same state on the same batch.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.rank.group import Ranks
from benchmarks.training.correctness import RUNS, ComparedElements, gathered, worst
from benchmarks.training.kept import Kept
from trainers.own_model import Batch
from trainers.step import Training

# What is compared of a step: gradients as it leaves them, and how far it moves the weights.
COMPARED = ("gradient", "weights")
UNITS = 2  # in the last place of a weight, by which two steps may move it differently


def differences(training: Training, drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return facts about the array by which a replay differs most from the same step without a graph, of its tolerance.

    Steps with and without exchange are graphs of their own, and each is replayed on another batch than the one that its graph
    holds. `error` is Σ|replayed − not| ÷ Σ|not|, `tolerance` what runs without a graph differ by, MARGIN times, and
    what is rounded. Empty without graphs, and where a rank has no room for a second copy of its state. Collective; leaves the
    state as it was.
    """
    kept = Kept.of(training, ranks, whole=True)
    if kept is None or training.graphs is None:
        return {}
    sample = ComparedElements.of(training)
    found = []
    for exchanges in (True, False) if training.strategy.synchronous else (True,):
        with nullcontext() if exchanges else training.without_exchange():
            with kept.unchanged():
                training.step(drawn[0])  # captures
            other = next((batch for batch in drawn if not training.graphs.holds(batch)), drawn[0])
            for name, facts in _compared(training, kept, sample, other, ranks).items():
                found.append({"what": name, "exchange": exchanges, **facts})
    return {"replay": max(found, key=lambda one: _share(one["error"], one["tolerance"]))}


def counted(training: Training, ranks: Ranks) -> dict[str, Any]:
    """Return the replays that each rank asked for, and those that its device counted. Collective."""
    if training.graphs is None:
        return {}
    of_ranks = ranks.gather([training.graphs.asked, training.graphs.done])
    return {"replays": [[int(asked), int(done)] for asked, done in of_ranks]}


def _compared(
    training: Training, kept: Kept, sample: ComparedElements, batch: Batch, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Return the worst array of everything that is compared, by its name. Collective."""

    def stepped(step: Callable[[Batch], object]) -> Tensor:
        with kept.unchanged():
            torch.manual_seed(training.cell.seed)
            before = sample.values(training.parameters)
            step(batch)
            return torch.stack([sample.gradient(training), sample.values(training.parameters) - before])

    runs = [stepped(training.uncaptured_step) for _ in range(RUNS)]
    difference = stepped(training.step) - runs[0]
    pairs = [one - other for one, other in itertools.combinations(runs, 2)]
    rounding = torch.tensor([torch.finfo(one.dtype).eps for one in training.parameters], dtype=torch.float64)
    weights = gathered(ranks, sample.by_array(sample.values(training.parameters))).amax(0)
    facts = {}
    for place, name in enumerate(COMPARED):
        repeats = torch.stack([sample.by_array(pair[place]) for pair in pairs]).amax(0)
        here = torch.stack([sample.by_array(difference[place]), repeats, sample.by_array(runs[0][place])])
        wrong, repeats, sizes = gathered(ranks, here).amax(0)  # the largest of all ranks
        smallest = UNITS * rounding * weights if name == "weights" else torch.zeros_like(weights)
        found = worst(wrong, repeats, sizes, ranks.world_size * rounding, smallest)
        facts[name] = found | {"array": training.names[found["array"]]}
    return facts


def _share(error: float, tolerance: float) -> float:
    """Return the error as a share of what is allowed; more than any number where it is none."""
    return 0.0 if error == 0 else error / tolerance if tolerance and error == error else float("inf")
