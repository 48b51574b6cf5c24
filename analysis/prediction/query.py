"""Which cell a forecast is asked for."""

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from analysis.prediction.link_model import ExchangeWire, requested_wire
from analysis.study.names import unit
from conf import groups
from conf.cell import Cell, Member
from conf.options import to_text

MIB = float(2**20)
HALVING_HOOKS = ("fp16", "bf16")  # gradients travel in 2 bytes
HALF_WEIGHTS = ("precision", "bf16_weights")  # gradients have 2 bytes without a hook
# Of a bucket, where its option says `auto` or nothing.
_DEFAULT_CAP_MIB, _STAGED_CAP_MIB = 25.0, 4.0
_MOST_BYTES = 1e13  # of gradients; a record that says more is damaged
_NOT_OF_THE_WORK = ("batch_size", "global_batch_size", "server_gpus", "server_hosts", "model.name")
# Of a strategy as texts, with its name, in order of their names.
Options: TypeAlias = tuple[tuple[str, str], ...]
_KINDS: dict[Hashable, int] = {}
_OF_OTHERS = ("strategy.", "nccl.", "benchmark.", "declared")


@dataclass(frozen=True)
class Workload:
    """What one rank computes, but for the images of a step."""

    model: str
    gradient_bytes: float
    rest: tuple[tuple[str, str], ...] = ()  # whatever else was asked of the step

    def __str__(self) -> str:
        optimize = self.requested("optimize", "eager")
        if optimize == "eager":
            return self.model
        return f"{self.model} {optimize}"

    def requested(self, name: str, default: str = "") -> str:
        """Return what was asked of the step under a name."""
        return dict(self.rest).get(name, default)


@dataclass(frozen=True)
class CellQuery:
    """A cell that a forecast is asked for."""

    workload: Workload
    batch_size: int  # images per rank
    options: Options
    wire: ExchangeWire
    gpus: int  # of each host
    hosts: int = 1
    members: tuple[Member, ...] = ()  # empty: GPUs that nobody named
    shares_gpu: bool = False  # a server keeps weights on the GPU of a rank
    machine: str = ""  # whose cells count first; empty: any
    sends: str = field(default="", compare=False)  # what the strategy's YAML declares

    @functools.cached_property
    def _options(self) -> dict[str, str]:
        return dict(self.options)

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the strategy."""
        return self._options.get(name, default)

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.option("name")

    @property
    def same_work(self) -> str:
        """The strategy, where servers that wait for all ranks are as those that do not."""
        return self.strategy.replace("_async", "_sync")

    @property
    def same_exchange(self) -> tuple[str, ...]:
        """The options that make another exchange of a strategy, and not only another size of it."""
        names = ("name", "staging", "reduce", "transport", "servers", "memory")
        return tuple(map(self.option, names))

    @property
    def servers(self) -> int:
        """The number of servers; 1 where the strategy has none."""
        return max(1, int(self.option("servers", "0")))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.gpus * self.hosts

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return self.ranks < 2

    @property
    def across_hosts(self) -> bool:
        """Whether ranks are on several hosts."""
        return self.hosts > 1

    @property
    def transport(self) -> str:
        """What the exchange passes: DIRECT, HOST_MEMORY or NETWORK."""
        return self.wire.transport

    @functools.cached_property
    def kind(self) -> int:
        """A number for all that makes cells unlike, but for their batch sizes."""
        unlike = (
            self.shares_gpu,
            self.wire,
            self.options,
            self.workload,
            self.gpus,
            self.hosts,
            self.machine,
        )
        return _KINDS.setdefault(unlike, len(_KINDS))

    @functools.cached_property
    def halves(self) -> bool:
        """Whether a hook halves what is sent."""
        halving = self.option("comm_hook") in HALVING_HOOKS
        return halving and HALF_WEIGHTS not in self.workload.rest

    @property
    def unit(self) -> str:
        """What a rank runs on: a GPU, or a CPU worker."""
        return unit(self.workload.requested("device", "cuda"))

    @property
    def sent_bytes(self) -> float:
        """The bytes of all gradients as they are sent."""
        if self.halves:
            return self.workload.gradient_bytes / 2
        return self.workload.gradient_bytes

    @functools.cached_property
    def caps_mib(self) -> tuple[float, ...]:
        """The gradients in MiB with which a bucket is full, of each; the last of further ones."""
        typed = self.option("bucket_cap_mb", str(_DEFAULT_CAP_MIB)).strip("[]").split(", ")
        caps = [float(text) for text in typed if text.replace(".", "", 1).isdecimal()]
        if caps and 0.01 <= min(caps) <= max(caps) <= 100_000:
            return tuple(caps)
        full = self.option("staging", "full") == "full"  # auto
        if full and self.option("transport", "shared") == "shared":
            return (_STAGED_CAP_MIB,)
        return (_DEFAULT_CAP_MIB,)

    @functools.cached_property
    def bucket_plan(self) -> tuple[object, ...]:
        """What makes buckets: gradients in their order up to a cap; several servers have others,
        and so has who sends weights at the end of a period."""
        plan = (self.workload.gradient_bytes, self.caps_mib)
        if self.servers > 1 or self.option("period"):
            return (*plan, *self.options)
        return plan

    @functools.cached_property
    def assumed_buckets(self) -> tuple[float, ...]:
        """The bytes of each bucket as sent, in order, if every one but the last is full."""
        gradient_bytes = rest = self.workload.gradient_bytes
        if gradient_bytes <= 0:  # nothing says how large the gradients are
            return (0.0,)
        *firsts, full = [cap_mib * MIB for cap_mib in self.caps_mib]
        sizes = []
        for first in firsts:
            sizes.append(min(first, rest))
            rest -= sizes[-1]
        count = max(1, round(rest / full))
        sizes += [full] * (count - 1) + [rest - full * (count - 1)]
        return tuple(size * self.sent_bytes / gradient_bytes for size in sizes if size)


def workload_of(request: Mapping[str, str], model: Mapping[str, float]) -> Workload:
    """Return the workload of a cell's request and of what its record says of its model."""
    rest = []
    for name, value in sorted(request.items()):
        if not name.startswith(_OF_OTHERS) and name not in _NOT_OF_THE_WORK:
            rest.append((name, value))
    gradient_bytes = model.get("gradient_bytes", 0.0)
    if not 0 < gradient_bytes <= _MOST_BYTES:
        gradient_bytes = 0.0
    return Workload(request["model.name"], float(gradient_bytes), tuple(rest))


def query_of(
    cell: Cell, workload: Workload, link_class: str | None = None, machine: str = ""
) -> CellQuery:
    """Return the query that a cell is; `link_class` is the farthest between its GPUs."""
    hosts = max(1, len(cell.hosts))
    same_hosts = set(cell.server_hosts) <= set(cell.hosts)
    options = []
    for name, value in sorted(cell.strategy.items()):
        if value is not None:
            options.append((name, to_text(value)))
    return CellQuery(
        workload=workload,
        batch_size=cell.batch_size,
        options=tuple(options),
        wire=requested_wire(cell.nccl, link_class, hosts),
        gpus=len(cell.gpus),
        hosts=hosts,
        members=cell.members,
        shares_gpu=same_hosts and not set(cell.gpus).isdisjoint(cell.server_gpus),
        machine=machine,
        sends=groups.sends(cell),
    )


@dataclass(frozen=True)
class Subset:
    """GPUs to forecast for: of one machine by number, or so many on each of several hosts."""

    gpus: int
    hosts: int = 1
    members: tuple[int, ...] = ()
