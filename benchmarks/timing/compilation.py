"""What torch.compile did for a cell: its graphs, where their code came from, and what really ran.

torch counts in `torch._dynamo.utils.counters`, for the whole process; a cell's are what is new
since it began.
"""

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
    """Counts what torch.compile did since the last look; nothing where nothing compiles."""

    def __init__(self, compiles: bool) -> None:
        self._compiles = compiles
        if compiles:
            self._begin = self._before = _counts()
            self._seconds_before = _seconds()

    def since(self) -> dict[str, int]:
        """Return the graphs and graph breaks since the last call, by name."""
        if not self._compiles:
            return {}
        now, before = _counts(), self._before
        self._before = now
        graph_breaks = now["graph_breaks"] - before["graph_breaks"]
        return {"graphs": now["graphs"] - before["graphs"], "graph_breaks": graph_breaks}

    def facts(self, ranks: Ranks) -> dict[str, Any]:
        """Return the graphs and graph breaks since the beginning, and where their code came from.

        `from_cache` and `newly_made` count graphs as inductor has them: forward and backward of
        each part, on every rank. Collective.
        """
        if not self._compiles:
            return {}
        self.since()
        own = _counts()
        for name, count in self._begin.items():
            own[name] -= count
        of_ranks = ranks.gather([own["graphs"], own["from_cache"], own["newly_made"]])
        graphs, cached, new = (int(sum(column)) for column in zip(*of_ranks, strict=True))
        if not graphs:
            return {"graphs": own["graphs"], "code_from": NOWHERE}
        code_from = NEW
        if cached and new:
            code_from = PARTLY
        elif cached:
            code_from = CACHE
        return {
            "graphs": own["graphs"],
            "graph_breaks": own["graph_breaks"],
            "code_from": code_from,
            "from_cache": cached,
            "newly_made": new,
        }

    def seconds(self) -> list[dict[str, Any]]:
        """Return where this rank's seconds of compiling went, by torch's names, the longest first.

        One contains another.
        """
        if not self._compiles:
            return []
        rows: list[dict[str, Any]] = []
        for name, total in _seconds().items():
            spent = total - self._seconds_before.get(name, 0.0)
            if spent >= LEAST_SECONDS:
                rows.append({"part": name, "seconds": spent})
        return sorted(rows, key=lambda row: -row["seconds"])[:MOST_ROWS]


def _counts() -> dict[str, int]:
    from torch._dynamo.utils import counters  # takes a second where nothing compiles

    inductor = counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "from_cache": inductor["fxgraph_cache_hit"],
        "newly_made": inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    }


def _seconds() -> dict[str, float]:
    from torch._dynamo import utils

    times: dict[str, list[float]] = getattr(utils, "compilation_time_metrics", {})
    return {name: sum(values) for name, values in times.items()}


def parts(outputs: Any) -> int:
    """Return how many compiled parts forward went through to make these outputs."""
    waiting: list[Any] = []
    for leaf in torch.utils._pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            waiting.append(leaf.grad_fn)
    seen: set[Any] = set()
    compiled = 0
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            compiled += node.name() == COMPILED
            waiting += [following for following, _ in node.next_functions]
    return compiled
