"""How a model is compiled where only the rate of its steps counts (optimize=max).

Changes to what torch.compile has traced, before it becomes kernels, change what kernels read, write
and compute, not what comes out. They are found by operator, so they serve every model. Those of
`JOINT` are made to forward and backward in one graph, before it is split; those of `SPLIT` to both
parts after it. RESULTS.md tells what is known of each part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.nn import functional

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
# What is cheap to compute again from what a kernel reads in any case.
CHEAP = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.unsqueeze.default, CONVERT}
FEW_INPUTS = 4  # of a first layer: its colours
MULTIPLE = 8  # cuDNN's tensor core kernels take so many inputs at a time


class Rewrites(CustomGraphPass):
    """Changes, in the form that inductor takes and that its caches know by `uuid`."""

    def __init__(self, *changes: Callable[[fx.Graph], int]) -> None:
        self.changes = changes

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        for change in self.changes:
            change(graph)
        graph.lint()

    def uuid(self) -> Any:
        """Return what differs when this file does, or the changes."""
        names = " ".join(change.__name__ for change in self.changes)
        return get_hash_for_files((__file__,), names)

    def __eq__(self, other: object) -> bool:
        # A model that is built anew finds the graphs of an equal one.
        return isinstance(other, Rewrites) and other.changes == self.changes

    def __hash__(self) -> int:
        return hash(self.changes)


def variances_from_sums(graph: fx.Graph) -> int:
    """Make means and variances from sums of x and of x². Return how many were changed.

    inductor updates mean and variance with each element (Welford), with a division each time, and
    then waits for arithmetic, not for memory. Both sums are float32 ones, as a batch norm's are.
    """
    changed = 0
    for node in _calls(graph, aten.var_mean.correction):
        values, *dimensions = node.args
        keep = node.kwargs.get("keepdim", False)
        assert isinstance(values, fx.Node)
        is_float32 = values.meta["val"].dtype == torch.float32
        if node.kwargs.get("correction") != 0 or not dimensions or not is_float32:
            continue
        with graph.inserting_before(node):
            mean = _call(graph, node, aten.mean.dim, values, *dimensions, keep)
            square = _call(graph, node, aten.mul.Tensor, values, values)
            mean_of_squares = _call(graph, node, aten.mean.dim, square, *dimensions, keep)
            square_of_mean = _call(graph, node, aten.mul.Tensor, mean, mean)
            difference = _call(graph, node, aten.sub.Tensor, mean_of_squares, square_of_mean)
            variance = _call(graph, node, aten.clamp_min.default, difference, 0.0)
        for user in list(node.users):
            user.replace_all_uses_with(variance if user.args[1] == 0 else mean)
            graph.erase_node(user)
        graph.erase_node(node)
        changed += 1
    return changed


def masks_from_inputs(graph: fx.Graph) -> int:
    """Let the backward of a ReLU ask its input, not its output. Return how many were changed.

    Only after a batch norm without a sum: its backward reads the batch norm's input in any case,
    and the output no more.
    """
    changed = 0
    for node in _calls(graph, aten.le.Scalar):
        output, bound = node.args
        if bound == 0 and _is_call(output, aten.relu.default) and _is_affine(output.args[0]):
            node.replace_input_with(output, output.args[0])
            changed += 1
    return changed


def masks_for_each_reader(graph: fx.Graph) -> int:
    """Let each reader of such a masked gradient mask it itself. Return how many copies there are.

    inductor would write what several kernels read and what takes several reads to make; here they
    read gradient and input anyway.
    """
    copies = 0
    for node in _calls(graph, aten.where.self):
        mask = node.args[0]
        if _is_call(mask, aten.le.Scalar) and mask.args[0].target in CHEAP:
            for user in list(node.users):
                with graph.inserting_before(user):
                    own_mask = _copy(graph, mask, {})
                    own = graph.node_copy(node)
                own.replace_input_with(mask, own_mask)
                user.replace_input_with(node, own)
                copies += 1
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return copies


def widened_by_each_reader(graph: fx.Graph) -> int:
    """Let each reader of a bfloat16 value widen it itself. Return how many copies there are.

    What inductor writes for several kernels is then the narrow value, as in eager mode, not twice
    as many bytes of the wide one.
    """
    copies = 0
    for node in _calls(graph, CONVERT):
        source, dtype = node.args
        if dtype == torch.float32 and source.meta["val"].dtype == torch.bfloat16:
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
                copies += 1
    return copies


def sums_written_once(graph: fx.Graph) -> int:
    """Let a masked sum of gradients that several kernels read be made once. Return how many.

    inductor would let each of the kernels read all of its parts.
    """
    written: set[fx.Node] = set()
    for masked in _calls(graph, aten.where.self):
        total = masked.args[2]
        while _is_call(total, aten.slice.Tensor):
            total = total.args[0]
        if _is_call(total, aten.add.Tensor):
            written |= {node for node in (masked, total) if len(node.users) > 1}
    for node in written:
        node.meta["inductor_realize_to_strides"] = True
    return len(written)


JOINT = Rewrites(variances_from_sums, masks_from_inputs)
SPLIT = Rewrites(widened_by_each_reader, masks_for_each_reader, sums_written_once)


def compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model that torch.compile compiles, with our rewrites, when it is first called."""
    options: dict[str, Any] = {"joint_custom_post_pass": JOINT, "post_grad_custom_post_pass": SPLIT}
    return torch.compile(model, options=options)


def _is_affine(node: Any) -> bool:
    """Return whether a value is made by cheap steps from one tensor of its size, per channel."""
    size, sources, steps = node.meta["val"].numel(), set(), [node]
    while steps:
        step = steps.pop()
        if step.meta["val"].numel() == size:
            if step.target in CHEAP:
                steps += step.all_input_nodes
            else:
                sources.add(step)
    return len(sources) == 1 and node not in sources


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of a node and of the cheap ones that it is made from."""
    if node.target not in CHEAP and node.target != aten.le.Scalar:
        return node
    if node not in copies:
        inputs = {source: _copy(graph, source, copies) for source in node.all_input_nodes}
        copies[node] = graph.node_copy(node, inputs.__getitem__)
    return copies[node]


def _calls(graph: fx.Graph, operator: Any) -> list[Any]:
    """Return the nodes that call an operator; Any: the type of a node's arguments has no end."""
    return list(graph.find_nodes(op="call_function", target=operator))


def _is_call(node: Any, operator: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target == operator


def _call(
    graph: fx.Graph, instead_of: fx.Node, operator: Callable[..., Any], *arguments: Any
) -> fx.Node:
    """Add a call, with an example of what it returns, as every node of the graph has."""
    node = graph.call_function(operator, arguments)
    node.meta = dict(instead_of.meta)
    node.meta.pop("tensor_meta", None)
    examples = fx.map_arg(arguments, lambda source: source.meta["val"])
    with instead_of.meta["val"][0].fake_mode:
        node.meta["val"] = operator(*examples)
    return node


def in_faster_forms(model: nn.Module) -> nn.Module:
    """Let every first convolution of a model take its faster form, in place.

    Parameters and their names stay.
    """
    for module in model.modules():
        if type(module) is nn.Conv2d and _is_first(module):
            module.__class__ = StrideFreeConvolution
    return model


def _is_first(module: nn.Conv2d) -> bool:
    return (
        module.in_channels <= FEW_INPUTS
        and module.stride[0] == module.stride[1] > 1
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.bias is None
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


class StrideFreeConvolution(nn.Conv2d):
    """A convolution with a stride, as one without, over squares of `stride` × `stride` pixels.

    The 7 × 7 window of ResNet with stride 2 on 3 colours becomes one of 4 × 4 on 12, and 4 inputs
    of zeros, and gives the same numbers. cuDNN has no fast kernel for 3 inputs: on an H200 the form
    takes 2.2 ms instead of 5.8 of a step of 512 images.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, outputs, height, width) for images (batch, inputs, height, width)."""
        stride, (high, wide) = self.stride[0], self.kernel_size
        rows, columns = -(-high // stride), -(-wide // stride)  # of a window, in squares
        above, left = (int(pad) for pad in self.padding)
        height = (images.shape[2] + 2 * above - high) // stride + rows
        width = (images.shape[3] + 2 * left - wide) // stride + columns
        # What the windows see, and no more: a negative frame cuts off.
        below = stride * height - images.shape[2] - above
        right = stride * width - images.shape[3] - left
        framed = functional.pad(images, (left, right, above, below))
        zeros = -(self.in_channels * stride * stride) % MULTIPLE
        squares = functional.pad(functional.pixel_unshuffle(framed, stride), (0, 0, 0, 0, 0, zeros))
        window = functional.pad(self.weight, (0, columns * stride - wide, 0, rows * stride - high))
        weight = functional.pad(functional.pixel_unshuffle(window, stride), (0, 0, 0, 0, 0, zeros))
        return functional.conv2d(
            squares.contiguous(memory_format=torch.channels_last), weight.contiguous()
        )
