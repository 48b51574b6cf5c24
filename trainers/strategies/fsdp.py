"""Weights, gradients and optimizer state sharded over the ranks: torch's FSDP2, block by block.

Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stage 3, or
with `reshard=false` stage 2. Groups of `shard_size` ranks share a copy (hybrid sharding, HSDP).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainers import reference_probes
from trainers.comm_hooks import ROUNDING, SENT
from trainers.kvstore import bucketed
from trainers.kvstore.bucketed import ring_bytes
from trainers.strategy import ExchangeAlone, ReferenceProbe, Strategy, local, trained

LISTS = (nn.Sequential, nn.ModuleList)
REPLICAS, SHARDS = "replicas", "shards"  # dimensions of the mesh


class Fsdp(Strategy):
    """FSDP2; the optimizer steps on each rank's shards with the kernels of all other strategies."""

    own_work_alone = True

    def __init__(
        self, reshard: bool, shard_size: str | int, reduce_dtype: str, prefetch: int
    ) -> None:
        self._reshard, self._shard_size, self._prefetch = reshard, shard_size, prefetch
        self._dtype: torch.dtype | None = None
        if reduce_dtype != "none":
            self._dtype = getattr(torch, SENT[reduce_dtype])
            self.rounding = ROUNDING[reduce_dtype]
        self._mesh: DeviceMesh | None = None
        self._parts: list[FSDPModule] = []  # the blocks, and last the model with the rest
        # Of each part the numbers of its parameters, and how often a step gathers them.
        self._units: list[tuple[list[int], int]] = []

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the ranks as (replicas, shards). Collective when called first."""
        if self._mesh is None:
            world_size = dist.get_world_size()
            shards, copies = self._sizes(world_size)
            ranks = torch.arange(world_size).view(copies, shards)
            self._mesh = DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICAS, SHARDS))
        return self._mesh

    def _sizes(self, world_size: int) -> tuple[int, int]:
        words = {"all": world_size, "host": len(self.hosts.ranks[0])}
        shards = words.get(str(self._shard_size)) or int(self._shard_size)
        return shards, world_size // shards

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Broadcast rank 0's weights, shard them, and give the optimizer its shards.

        Raises ValueError: the model has no blocks.
        """
        inside = blocks_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()  # FSDP takes no other layout
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, 0)
        self._units = self._units_of(model, inside)
        mesh = self.mesh(next(model.parameters()).device)
        if mesh.size(0) == 1:
            mesh = mesh[SHARDS]
        policy = MixedPrecisionPolicy(reduce_dtype=self._dtype)
        for block in inside:
            fully_shard(block, mesh=mesh, reshard_after_forward=self._reshard, mp_policy=policy)
        # Backward begins with what the model has outside its blocks.
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self._parts = [part for part in (*inside, model) if isinstance(part, FSDPModule)]
        for index, part in enumerate(self._parts[:-1] if self._prefetch else []):
            part.set_modules_to_forward_prefetch(self._parts[index + 1 : -1][: self._prefetch])
            before = self._parts[max(0, index - self._prefetch) : index]
            part.set_modules_to_backward_prefetch(before[::-1])
        self._take_over(model, optimizer)
        return model

    def _units_of(
        self, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> list[tuple[list[int], int]]:
        block_of: dict[nn.Parameter, int] = {}
        for number, block in enumerate(blocks):
            block_of |= dict.fromkeys(block.parameters(), number)
        units: list[tuple[list[int], int]] = [([], 1 + self._reshard) for _ in blocks]
        units.append(([], 1))
        for number, parameter in enumerate(trained(model)):
            units[block_of.get(parameter, len(blocks))][0].append(number)
        return [unit for unit in units if unit[0]]

    def _take_over(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's parameters, and its state of them, by the shards of this rank."""
        self._model, self._optimizer = model, optimizer
        state: dict[str, Any] = next(iter(optimizer.state.values()), {})
        optimizer.state.clear()
        self._sharded = trained(model)
        self._shards = []
        for parameter in self._sharded:
            shard = nn.Parameter(local(parameter.detach()))
            self._shards.append(shard)
            optimizer.state[shard] = {name: torch.zeros_like(shard) for name in state}
        optimizer.param_groups[0]["params"] = self._sharded

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on the shards as plain tensors: no fused SGD of torch takes its sharded ones."""
        group = self._optimizer.param_groups[0]
        if group["params"] is not self._sharded:  # those of a whole copy, without exchange
            optimizer.step()
            return
        for shard, parameter in zip(self._shards, self._sharded, strict=True):
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        group["params"] = self._shards
        optimizer.step()
        group["params"] = self._sharded

    def _choose(self, gathered: bool) -> None:
        """Gather all weights and let them stay, or shard them again; gradients likewise."""
        for part in self._parts:
            reshard = self._reshard and part is not self._parts[-1] and not gathered
            part.set_requires_gradient_sync(not gathered, recurse=False)
            part.set_reshard_after_forward(reshard, recurse=False)
            part.set_reshard_after_backward(not gathered, recurse=False)
            if gathered:
                part.unshard()
            else:
                part.reshard()

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Let every rank train a whole copy, which has no trace afterwards."""
        group = self._optimizer.param_groups[0]
        self._choose(gathered=True)
        whole = trained(self._model)
        group["params"] = whole
        try:
            yield
        finally:
            group["params"] = self._sharded
            for parameter in whole:
                parameter.grad = None
                self._optimizer.state.pop(parameter, None)
            self._choose(gathered=False)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Reduce nothing: whole gradients add up on every rank."""
        model = self._parts[-1]
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            model.set_is_last_backward(True)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return (n−1)/n of what is reduced and of each gather; copies all-reduce their shares."""
        sizes, share = [], 1.0
        for members, gathers in self._units:
            sizes.append((gathers, sum(self._sharded[member].nbytes for member in members)))
        whole = sum(size for _, size in sizes)
        times = sum(gathers * size for gathers, size in sizes) / whole if whole else 1.0
        if self._dtype is not None:
            share = self._dtype.itemsize / torch.float32.itemsize
        shards, copies = self._sizes(world_size)
        moved = gradient_bytes * (share + times) * (shards - 1) / shards
        return moved + ring_bytes(gradient_bytes * share / shards, copies)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone:
        """Reduce-scatter and gather each block; all weights in one piece where there are none."""
        units = self._units or [(list(range(len(parameters))), 1)]
        self._gradient_bytes = sum(parameter.nbytes for parameter in parameters)
        self._device = parameters[0].device
        return _ShardsAlone(parameters, units, self.mesh(self._device), self._dtype)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between neighbours, and the wire between hosts."""
        moved = self.bytes_moved(self._gradient_bytes, dist.get_world_size())
        ring = reference_probes.ring(self._device, moved)
        host_bytes = ring_bytes(self._gradient_bytes, len(self.hosts.ranks))
        return ring + reference_probes.between_hosts(self.hosts, self._device, host_bytes)

    def refuse(self, model: nn.Module) -> None:
        """Refuse a model without blocks, and a size that does not divide the ranks."""
        blocks_of(model)
        ranks = sum(map(len, self.hosts.ranks))
        if ranks % self._sizes(ranks)[0]:
            raise ValueError(
                f"strategy.shard_size={self._shard_size}: does not divide {ranks} ranks; expected "
                "all, host or a divisor"
            )


class _ShardsAlone(ExchangeAlone):
    """Of each unit a reduce-scatter, an all-reduce between copies, and its gathers."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        units: Sequence[tuple[list[int], int]],
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
    ) -> None:
        self._parameters, self._units = parameters, units
        self._group, self._copies = mesh.get_group(SHARDS), mesh.size(0)
        self._rail = mesh.get_group(REPLICAS)
        self._sent, self._gathered = [], []
        for members, _ in units:
            elements = sum(parameters[member].numel() for member in members)
            padded = -(-elements // mesh.size(1)) * mesh.size(1)
            weights = parameters[members[0]].new_zeros(padded)
            self._gathered.append(weights)
            self._sent.append(weights.to(dtype or weights.dtype, copy=True))
        rank = mesh.get_local_rank(SHARDS)
        self._own = bucketed.shares(self._gathered, rank, mesh.size(1))
        shares = bucketed.shares(self._sent, rank, mesh.size(1))
        self._means = [torch.empty_like(share) for share in shares]
        self.fill([torch.randn_like(parameter) for parameter in parameters])

    def fill(self, gradients: Sequence[Tensor]) -> None:
        for (members, _), sent in zip(self._units, self._sent, strict=True):
            flat = torch.cat([gradients[member].flatten() for member in members])
            sent[: len(flat)].copy_(flat)

    def __call__(self) -> None:
        works = []
        for mean, sent in zip(self._means, self._sent, strict=True):
            works.append(bucketed.start_mean(mean, sent, self._group))
        for index, (_, gathers) in enumerate(self._units):
            mean, own = self._means[index], self._own[index]
            bucketed.end_mean(works[index], mean, self._group)
            if self._copies > 1:
                dist.all_reduce(mean, group=self._rail)
                mean.div_(self._copies)
            own.copy_(mean)
            for _ in range(gathers):
                bucketed.all_shares([self._gathered[index]], [own], self._group)

    def result(self) -> list[Tensor]:
        means = list(self._parameters)
        for (members, _), gathered in zip(self._units, self._gathered, strict=True):
            sizes = [means[member].numel() for member in members]
            for member, part in zip(members, gathered[: sum(sizes)].split(sizes), strict=True):
                means[member] = part.view(means[member].shape).clone()
        return means


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model has in lists of such, or beside each other: its blocks.

    Raises ValueError: it has fewer than two.
    """
    blocks = list(_blocks(model))
    if len(blocks) < 2:
        raise ValueError(
            "strategy=fsdp: the model has no repeated blocks to shard by; choose one that has, "
            "such as model=resnet50"
        )
    return blocks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, LISTS) or any(map(_is_list_of_blocks, child.modules())):
            yield from _blocks(child)
        elif _has_parts(child) and trained(child):
            yield child


def _is_list_of_blocks(module: nn.Module) -> bool:
    return isinstance(module, LISTS) and sum(map(_has_parts, module.children())) > 1


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
