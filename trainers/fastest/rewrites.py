"""Changes to what torch.compile has traced, forward and backward in one graph, before it is split and becomes kernels.

They change what kernels read and reckon, not what comes out. They are found by operator, so they serve every model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten


class Rewrites(CustomGraphPass):
    """The changes, in the form that inductor takes and that its caches know by `uuid`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        variances_from_sums(graph)
        graph.lint()

    def uuid(self) -> Any:
        """Return what differs when this file does."""
        return get_hash_for_files((__file__,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rewrites)  # a model that is built anew finds the graphs of an equal one

    def __hash__(self) -> int:
        return hash(Rewrites)


def variances_from_sums(graph: fx.Graph) -> int:
    """Let means and variances be made from sums of x and of x². Return how many were changed.

    inductor updates mean and variance with each element (Welford), with a division each time, and then waits for arithmetic, not
    for memory. Both sums are float32 ones, as a batch norm's are.
    """
    changed = 0
    for node in _calls(graph, aten.var_mean.correction):
        values, *dimensions = node.args
        keep = node.kwargs.get("keepdim", False)
        assert isinstance(values, fx.Node)
        if node.kwargs.get("correction") != 0 or not dimensions or values.meta["val"].dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            mean = _call(graph, node, aten.mean.dim, values, *dimensions, keep)
            square = _call(graph, node, aten.mul.Tensor, values, values)
            of_squares = _call(graph, node, aten.mean.dim, square, *dimensions, keep)
            of_mean = _call(graph, node, aten.mul.Tensor, mean, mean)
            difference = _call(graph, node, aten.sub.Tensor, of_squares, of_mean)
            variance = _call(graph, node, aten.clamp_min.default, difference, 0.0)
        for user in list(node.users):
            user.replace_all_uses_with(variance if user.args[1] == 0 else mean)
            graph.erase_node(user)
        graph.erase_node(node)
        changed += 1
    return changed


def _calls(graph: fx.Graph, operator: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=operator)


def _call(graph: fx.Graph, instead_of: fx.Node, operator: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Add a call, and tell what it returns, as every node of the graph does."""
    node = graph.call_function(operator, arguments)
    node.meta = {name: value for name, value in instead_of.meta.items() if name not in ("val", "tensor_meta")}
    examples = fx.map_arg(arguments, lambda one: one.meta["val"])
    with instead_of.meta["val"][0].fake_mode:
        node.meta["val"] = operator(*examples)
    return node
