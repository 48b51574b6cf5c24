"""How often `analysis compare` finds a difference between two studies of equal cells, and a planted one: by simulation.

Both studies go through the product: noise floors, matching of cells, verdicts. A change of the machine between the studies
cannot be told from a change of the software; the last columns show what it does.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from simulate import STRATEGY, Simulator, Truth

from analysis.findings.between_studies import FASTER, SLOWER, differences
from analysis.findings.study_inputs import StudyInput
from analysis.study.study import Study

STUDIES = 200
REPEATS = (2, 3, 5)
NOISE = 0.002  # standard deviation between runs, as a share
SUBSETS, STRATEGIES = ((0,), (1,), (0, 1)), ("none", STRATEGY)


def side(seed, repeats, factor=1.0, noise=NOISE):
    """One study of six cells in turns; every rate times `factor`."""
    simulator = Simulator(Truth(noise=noise), seed)
    made = [
        simulator.record(gpus, strategy, repeat, factor=factor)
        for repeat in range(repeats) for gpus in SUBSETS for strategy in STRATEGIES
    ]  # fmt: skip
    return StudyInput(str(seed), Path(), Study.of(made))


def compared(seed, repeats, factor=1.0, change=0.0):
    """The cells of two studies; `factor` is planted in the second, `change` is the deviation of the machine between them."""
    moved = math.exp(np.random.default_rng(seed).normal(0, change)) if change else 1.0
    return differences(
        [side(2 * seed, repeats)], [side(2 * seed + 1, repeats, factor * moved)]
    ).cells


def outcome(repeats, studies=STUDIES, factor=1.0, change=0.0):
    """(share of pairs of studies with a verdict, share of cells called slower, share of intervals that hold the truth)."""
    pairs = [compared(seed, repeats, factor, change) for seed in range(studies)]
    cells = [cell for pair in pairs for cell in pair]
    told = np.mean([any(cell.verdict in (FASTER, SLOWER) for cell in pair) for pair in pairs])
    slower = np.mean([cell.verdict == SLOWER for cell in cells])
    held = np.mean([cell.change.low <= factor - 1 <= cell.change.high for cell in cells])
    return float(told), float(slower), float(held)


def tables(studies: int = STUDIES) -> Iterator[str]:
    """Yield the table, line by line."""
    yield f"Two studies of six cells, {studies} pairs of each; runs scatter by {NOISE:.1%}"
    heads = (
        "equal: a verdict",
        "intervals hold 0",
        "1 % slower: seen",
        "machine changed 0.2 %: a verdict",
    )
    yield f"{'repeats':>8}" + "".join(f"{name:>{len(name) + 3}}" for name in heads)
    for repeats in REPEATS:
        told, _, held = outcome(repeats, studies)
        _, seen, _ = outcome(repeats, studies, 0.99)
        changed, _, _ = outcome(repeats, studies, change=0.002)
        values = zip((told, held, seen, changed), heads, strict=True)
        yield f"{repeats:>8}" + "".join(f"{value:>{len(name) + 3}.1%}" for value, name in values)
