"""Name what sticks out of a matrix of p2p: a GPU whose copies are slower than those of the others, and single pairs.

The rule. Entries are compared with their like: pairs with the same link class where a topology is known, otherwise pairs of one
level (levels are 1.2 times apart or more, and both directions of a pair have the same one).
- A row (the copies that one GPU runs) or a column (the copies to one GPU) sticks out if the median of its ratios to its like
  differs from those of the other GPUs by more than LINE, and by more than 6 robust standard deviations (1.4826 × the median
  absolute deviation). Fewer than 4 GPUs have no majority.
- A pair sticks out by PAIR and the same 6 deviations, once what its row and its column have in common is taken off.
Latencies are judged by LATENCY alone. Those of the CPU's clock are not judged: they are bimodal.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from analysis.p2p.matrices import Matrices
from analysis.topology.model import Topology

LINE, PAIR, LATENCY = 0.04, 0.08, 0.5
FEWEST_GPUS = 4
LEVELS_APART = 1.2
DEVIATIONS = 6 * 1.4826
MOST_PAIRS = 6  # that are named of one matrix
Pair = tuple[int, int]
Logs = Mapping[Pair, float]


def outliers(matrices: Matrices, topology: Topology | None = None) -> list[str]:
    """Return a sentence for each row, column or pair that sticks out of its matrix."""
    return [
        sentence
        for name, entries in matrices.entries.items()
        if not name.startswith("latency_cpu")
        for sentence in _of_matrix(name, entries, topology)
    ]


def _of_matrix(
    name: str, entries: Mapping[Pair, float], topology: Topology | None
) -> Iterator[str]:
    logs = {(a, b): math.log(value) for (a, b), value in entries.items() if a != b and value > 0}
    if len({a for a, _ in logs}) < FEWEST_GPUS:
        return
    unit, is_latency = ("µs", True) if name.startswith("latency") else ("GB/s", False)
    like = _medians(logs, _link_class(logs, topology) or _level(logs))
    rest = {pair: value - like[pair] for pair, value in logs.items()}
    for place, word in ((0, "row"), (1, "column")):
        for gpu, off in _lines(rest, place, LATENCY if is_latency else LINE):
            pairs = [pair for pair in logs if pair[place] == gpu]
            what = f"copies that GPU {gpu} runs" if place == 0 else f"copies to GPU {gpu}"
            usual = math.exp(median(like[pair] for pair in pairs))
            far_off = _far_off([rest[pair] for pair in pairs], is_latency)
            yield f"{name}, {word} {gpu}: {what} are {far_off} than the others, whose median is {usual:.4g} {unit}"
            rest |= {pair: rest[pair] - off for pair in pairs}
    limit = max(math.log1p(LATENCY if is_latency else PAIR), DEVIATIONS * _scatter(rest.values()))
    far = sorted(
        (pair for pair in rest if abs(rest[pair]) > limit), key=lambda pair: -abs(rest[pair])
    )
    for a, b in far[:MOST_PAIRS]:
        usual = math.exp(logs[a, b] - rest[a, b])
        far_off = _far_off([rest[a, b]], is_latency)
        yield f"{name}, {a}->{b}: {entries[a, b]:.4g} {unit} is {far_off} than pairs like it, whose median is {usual:.4g} {unit}"
    if len(far) > MOST_PAIRS:
        yield f"{name}: {len(far) - MOST_PAIRS} more pairs stick out"


def _far_off(offs: Sequence[float], is_latency: bool) -> str:
    """Return `4 to 8 % slower` for the logarithms of ratios to what is usual; of mixed signs the most common one counts."""
    slower = (median(offs) < 0) != is_latency
    shares = sorted(100 * abs(math.expm1(off)) for off in offs if (off < 0) == (median(offs) < 0))
    ends = dict.fromkeys(f"{share:.0f}" for share in (shares[0], shares[-1]))
    return f"{' to '.join(ends)} % {'slower' if slower else 'faster'}"


def _lines(rest: Logs, place: int, least: float) -> list[tuple[int, float]]:
    """Return (GPU, how far off) for the rows (place 0) or columns (1) that stick out."""
    medians = {
        gpu: median(value for pair, value in rest.items() if pair[place] == gpu)
        for gpu in sorted({pair[place] for pair in rest})
    }
    middle = median(medians.values())
    limit = max(math.log1p(least), DEVIATIONS * _scatter(medians.values()))
    return [(gpu, value - middle) for gpu, value in medians.items() if abs(value - middle) > limit]


def _scatter(values: Iterable[float]) -> float:
    """Return the median absolute deviation."""
    known = [*values]
    middle = median(known)
    return median(abs(value - middle) for value in known)


def _medians(logs: Logs, kind: Callable[[Pair], object]) -> dict[Pair, float]:
    """Return for every pair the median of the pairs of its kind."""
    kinds: dict[object, list[float]] = {}
    for pair, value in logs.items():
        kinds.setdefault(kind(pair), []).append(value)
    return {pair: median(kinds[kind(pair)]) for pair in logs}


def _link_class(logs: Logs, topology: Topology | None) -> Callable[[Pair], object] | None:
    """Return the link class of a pair; None where the topology does not have every GPU."""
    if topology is None or not {gpu for pair in logs for gpu in pair} <= {*topology.gpus}:
        return None
    return lambda pair: topology.link_between(*pair)


def _level(logs: Logs) -> Callable[[Pair], object]:
    """Return the level of a pair, by the faster of its directions.

    Pairs of a level that all have one GPU in common are put to the nearest other level: such a GPU may be what is slow.
    """
    best = {pair: max(value, logs.get(pair[::-1], value)) for pair, value in logs.items()}
    levels: list[list[Pair]] = []
    for pair in sorted(best, key=best.__getitem__):
        if not levels or best[pair] - best[levels[-1][-1]] > math.log(LEVELS_APART):
            levels.append([])
        levels[-1].append(pair)
    real = [
        number
        for number, level in enumerate(levels)
        if not set.intersection(*({*pair} for pair in level))
    ]
    of = {
        pair: min(real, key=lambda one: abs(one - number), default=0)
        for number, level in enumerate(levels)
        for pair in level
    }
    return of.__getitem__
