"""What a rank can tell of the fast paths that were asked for; analysis.validity.fast_paths judges.

One update of the weights is watched, at the level of torch's operators: what enters kernels, what
is reduced, how batches reach the device. It is slow, so it is never timed. Scripts load this file
by its path: nothing of ours is imported here.
"""

import gc
import re
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# Operators by torch's names. The second argument of each product is one of its factors.
PRODUCTS = {"aten::convolution", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# comm_hook=fp8 sums what an all-to-all brings.
SUMS = re.compile(r"_?c10d(_functional)?::_?(all_?reduce|reduce|alltoall)")
COPIES = {"aten::_to_copy": 0, "aten::copy_": 1}  # the position of what is copied
DDP_FACTS = ("bucket_cap_bytes", "total_parameter_size_bytes", "has_rebuilt_buckets",
             "static_graph", "gradient_as_bucket_view")  # fmt: skip
JUST_OVER_1 = 1 + 2.0**-12  # a float32, which TF32 rounds to 1


class Operators(TorchDispatchMode):
    """Sees the operators of a thread and of its backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.facts: dict[str, Any] = {
            "products": Counter(),  # convolutions and matrix products by the dtype that enters
            "reduced": Counter(),  # bytes by dtype
            "copied": Counter(),  # bytes to a GPU, by the kind of copy
            "autocast": [],  # the dtypes that it had
            "reductions": 0,
            "reduced_elements": 0,
            "fused_updates": 0,
        }  # and `layout`, of what enters the first convolution

    def look_at_autocast(self) -> None:
        """Note the dtype of autocast where it is on."""
        for device in ("cuda", "cpu"):
            dtype = _name(torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device) and dtype not in self.facts["autocast"]:
                self.facts["autocast"].append(dtype)

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name, options, facts = operation._schema.name, options or {}, self.facts
        self.look_at_autocast()
        if name in PRODUCTS:
            facts["products"][_name(arguments[1].dtype)] += 1
            if name == "aten::convolution":
                facts.setdefault("layout", layout(arguments[0]))
        elif SUMS.match(name):
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            if "reduce_scatter" in name:  # what goes in, of which a part comes out
                tensors = [max(tensors, key=Tensor.numel)]
            facts["reductions"] += 1
            for tensor in tensors:
                facts["reduced"][_name(tensor.dtype)] += tensor.nbytes
                facts["reduced_elements"] += tensor.numel()
        elif name.startswith("aten::_fused_"):
            facts["fused_updates"] += 1
        outputs = operation(*arguments, **options)
        if name in COPIES and outputs.is_cuda:
            source = arguments[COPIES[name]]
            if source.device.type == "cpu":
                is_free = options.get("non_blocking") or arguments[2:3] == (True,)
                memory = "pinned" if source.is_pinned() else "pageable"
                facts["copied"][f"{memory}, {'free' if is_free else 'waits'}"] += source.nbytes
        return outputs


class WatchedUpdate:
    """One update of the weights by a model, which is called for it, and its optimizer.

    Of a compiled step operators are not watched: it would be compiled again.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to watch."""
        self._model, self._optimizer = model, optimizer
        self._passes = self._replays = self._steps = 0
        self._prefetches = self._ahead = 0  # of FSDP: modules that ask, gathers that had begun
        iterators = _live(_MultiProcessingDataLoaderIter)
        self._received = [(iterator, iterator._rcvd_idx) for iterator in iterators]
        self._compiled = _compiled()
        self._hooks = [
            model.register_forward_pre_hook(self._forward),
            optimizer.register_step_post_hook(self._step),
            *self._prefetch_hooks(),
        ]
        usual = torch.cuda.CUDAGraph.replay
        self._usual_replay = usual

        def replay(graph: Any) -> None:
            self._replays += 1
            usual(graph)

        torch.cuda.CUDAGraph.replay = replay  # type: ignore[assignment,method-assign]
        self._operators: Operators | None = None
        if not self._compiled.get("compiled") and _get_current_dispatch_mode() is None:
            self._operators = Operators()
            self._operators.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> dict[str, Any]:
        """End it; return the facts, as JSON has them. What could not be seen is absent."""
        seen = self._operators
        if seen is not None and _get_current_dispatch_mode() is seen:
            seen.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        torch.cuda.CUDAGraph.replay = self._usual_replay  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        parameters = [each for each in self._model.parameters() if each.requires_grad]
        device, groups = parameters[0].device, self._optimizer.param_groups
        layouts = [layout(each) for each in parameters]
        facts: dict[str, Any] = {
            "passes": self._passes,
            "elements": sum(map(Tensor.numel, parameters)),
            "weights": next((each for each in layouts if each != "either"), "either"),
            "prefetches": self._prefetches,
            "ahead": self._ahead,
            "fused": self._steps and any(group.get("fused") for group in groups),
            "captured": len(_live(torch.cuda.CUDAGraph)),
            "replays": self._replays,
            **self._compiled,
            **self._loader_facts(),
            **self._ddp_facts(parameters),
        }
        if device.type == "cuda":
            facts["tf32_asked"] = torch.get_float32_matmul_precision() != "highest"
            facts["tf32_used"] = _rounds_as_tf32(device)
        if seen is not None and seen.facts["products"]:  # the replay of a graph has none
            facts |= seen.facts
        return facts

    def _forward(self, module: nn.Module, inputs: object) -> None:
        self._passes += module.training and torch.is_grad_enabled()
        if self._operators is not None:
            self._operators.look_at_autocast()

    def _step(self, *_: object) -> None:
        self._steps += 1

    def _prefetch_hooks(self) -> list[Any]:
        """Return hooks that look whether FSDP2 has begun to gather weights before their turn."""
        hooks = []
        for module in self._model.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            group = getattr(state, "_fsdp_param_group", None)
            self._prefetches += bool(getattr(state, "_states_to_forward_prefetch", ()))

            def look(module: nn.Module, inputs: object, group: Any = group) -> None:
                self._ahead += group._all_gather_result is not None

            if group is not None:
                hooks.append(module.register_forward_pre_hook(look, prepend=True))
        return hooks

    def _ddp_facts(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        logged: dict[str, Any] = {}
        for wrapper in _live(DistributedDataParallel):
            is_own = any(each is parameters[0] for each in wrapper.parameters())
            if is_own and wrapper.require_backward_grad_sync:  # not of local SGD
                logged = wrapper._get_ddp_logging_data()
        if logged.get("world_size", 1) < 2:
            return {}
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes", "")
        facts = {name: logged.get(name) or 0 for name in DDP_FACTS}
        facts["comm_hook"] = logged.get("comm_hook", "")
        gradients = [each.grad for each in parameters if each.grad is not None]
        facts["buckets"], facts["gradients"] = len(sizes.split(",")), len(gradients)
        facts["views"] = sum(each.untyped_storage().nbytes() > each.nbytes for each in gradients)
        return facts

    def _loader_facts(self) -> dict[str, Any]:
        workers = [loader.num_workers for loader in _live(DataLoader)]
        workers += [iterator._num_workers for iterator, _ in self._received]
        facts: dict[str, Any] = {"workers": max(workers, default=0)}
        for iterator, before in self._received:
            if iterator._rcvd_idx > before:  # its batches were taken in this update
                facts["working"] = f"{sum(iterator._workers_status)} of {iterator._num_workers}"
        return facts


def layout(tensor: Tensor) -> str:
    """Return `channels_last`, `contiguous`, or `either` where one channel or pixel fits both."""
    if tensor.dim() != 4:
        return "either"
    is_last = tensor.is_contiguous(memory_format=torch.channels_last)
    if is_last and tensor.is_contiguous():
        return "either"
    return "channels_last" if is_last else "contiguous"


def _live(kind: type) -> list[Any]:
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


def _compiled() -> dict[str, Any]:
    """Return what torch.compile has done so far in this process; empty where it did not begin."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {}
    counters = dynamo.counters
    breaks = counters["graph_break"]
    return {
        "compiled": counters["frames"]["total"] > 0,
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(breaks.values()),
        "first_break": next(iter(breaks), "").partition("\n")[0][:200],
        "graphs_skipped": counters["inductor"]["cudagraph_skips"],
    }


def _rounds_as_tf32(device: torch.device) -> bool:
    """Return whether a product of float32 matrices loses what TF32 loses."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        values = torch.full((256, 256), JUST_OVER_1, device=device)
        return not torch.equal(values @ torch.eye(256, device=device), values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
