"""What torch.compile did for a cell: the graphs it made, where their code came from, and the compiled parts that really ran.

torch counts in `torch._dynamo.utils.counters`, for the whole process; a cell is what is new since it began.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.rank.ranks import Ranks

# The autograd node that torch's AOTAutograd leaves behind a compiled part of forward: one for each.
COMPILED = "CompiledFunctionBackward"
# Where the code of a cell's graphs came from (METHOD.md).
NEW, CACHE, PARTLY, NOWHERE = "new", "cache", "partly cache", "nowhere"
MOST_ROWS, LEAST_SECONDS = 12, 0.05  # of the table of where the seconds went


class Compilation:
    """Counts what torch.compile did since the last look; does nothing in a cell that does not compile."""

    def __init__(self, compiles: bool) -> None:
        self._compiles = compiles
        self._begun = self._before = self._counted()
        self._seconds_before = self._seconds()

    def since(self) -> dict[str, int]:
        """Return the graphs and graph breaks since the last call, by name; nothing in a cell that does not compile."""
        now, before = self._counted(), self._before
        self._before = now
        return (
            {name: now[name] - before[name] for name in ("graphs", "graph_breaks")}
            if self._compiles
            else {}
        )

    def found(self, ranks: Ranks) -> dict[str, Any]:
        """Return the graphs and graph breaks since the beginning, and where their code came from, on all ranks. Collective.

        `from_cache` and `newly_made` count graphs as inductor has them: forward and backward of each part, on every rank.
        """
        if not self._compiles:
            return {}
        self.since()
        now = self._counted()
        names = ("graphs", "from_cache", "newly_made")
        every = ranks.gather([now[name] - self._begun[name] for name in names])
        graphs, cached, made = (int(sum(column)) for column in zip(*every, strict=True))
        facts = {"graphs": now["graphs"] - self._begun["graphs"]}
        if not graphs:
            return facts | {"code_from": NOWHERE}
        facts |= {"graph_breaks": now["graph_breaks"] - self._begun["graph_breaks"]}
        code_from = NEW if not cached else PARTLY if made else CACHE
        return facts | {"code_from": code_from, "from_cache": cached, "newly_made": made}

    def seconds(self) -> list[dict[str, Any]]:
        """Return where this rank's seconds of compiling went, by torch's names, the longest first. One contains another."""
        spent = {
            name: total - self._seconds_before.get(name, 0.0)
            for name, total in self._seconds().items()
        }
        longest = sorted(spent, key=lambda name: -spent[name])[:MOST_ROWS]
        return [
            {"part": name, "seconds": spent[name]}
            for name in longest
            if spent[name] >= LEAST_SECONDS
        ]

    def _counted(self) -> dict[str, int]:
        if not self._compiles:
            return {}
        from torch._dynamo.utils import counters  # takes a second where nothing compiles

        inductor = counters["inductor"]
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "from_cache": inductor["fxgraph_cache_hit"],
            "newly_made": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
        }

    def _seconds(self) -> dict[str, float]:
        if not self._compiles:
            return {}
        from torch._dynamo import utils

        times: dict[str, list[float]] = getattr(utils, "compilation_time_metrics", {})
        return {name: sum(values) for name, values in times.items()}


def parts(outputs: Any) -> int:
    """Return how many compiled parts forward went through to make these outputs: 0 where nothing compiled ran."""
    waiting = [tensor.grad_fn for tensor in _tensors(outputs)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return sum(node.name() == COMPILED for node in seen)


def _tensors(outputs: Any) -> Iterable[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))
