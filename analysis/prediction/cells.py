"""What a forecast is asked for, and what was measured of a cell: the same words for both."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.prediction.draws import Values, best
from analysis.prediction.links.model import ExchangeWire
from analysis.prediction.links.network import HostNetwork
from analysis.prediction.links.wires import asked_wire
from analysis.study.estimates import Member
from analysis.study.names import unit
from conf.cell import COMPILED, Cell
from conf.options import canonical

MIB = float(2**20)
# Hooks that send gradients in 2 bytes, and one that sends two matrices of low rank in place of each.
HALVING, LOW_RANK = ("fp16", "bf16"), "powersgd"
IN_2_BYTES = (
    "precision",
    "bf16_weights",
)  # gradients are so without a hook, but for those of batch norm
_CAP_WITHOUT_OPTION = 25.0  # MiB, of every strategy but those through host memory
_MOST_BYTES = 1e13  # of gradients; a record that says more is damaged
_CAPS = (0.01, 100_000.0)  # MiB, that the YAML files of the strategies accept
_SMALL_CAP = 4.0  # MiB, what `auto` becomes for full staging (conf/strategy/cpu_staged.yaml)


@dataclass(frozen=True)
class Workload:
    """What one rank computes, but for the images of a step."""

    model: str
    gradient_bytes: float
    arrays: int
    rest: tuple[tuple[str, str], ...] = ()  # whatever else was asked of the step

    def __str__(self) -> str:
        words = dict(self.rest)
        return " ".join(
            [
                self.model,
                *(words[name] for name in ("optimize",) if words.get(name, "eager") != "eager"),
            ]
        )


@dataclass(frozen=True)
class Question:
    """A cell that a forecast is asked for."""

    workload: Workload
    batch_size: int  # images per rank
    options: tuple[tuple[str, str], ...]  # of the strategy, with its name
    wire: ExchangeWire
    gpus: int  # of each host
    hosts: int = 1
    members: tuple[Member, ...] = ()  # empty: GPUs that nobody named
    shares_gpu: bool = False  # a server keeps weights on the GPU of a rank
    network: HostNetwork | None = None  # between hosts that were not measured
    machine: str = ""  # whose cells count first; empty: any
    gpu_spread: float | None = (
        None  # standard deviation of GPUs as a share of a step; None: as the study shows
    )
    back: float = field(
        default=1.0, compare=False
    )  # bytes that come back, of those sent (strategies.as_in_a_step)
    exchange: str = field(
        default="", compare=False
    )  # dotted name that the record has; empty: that of the strategy's YAML

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.gpus * self.hosts

    @functools.cached_property
    def _options(self) -> dict[str, str]:
        return dict(self.options)

    @functools.cached_property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.option("name")

    def option(self, name: str, otherwise: str = "") -> str:
        """Return an option of the strategy."""
        return self._options.get(name, otherwise)

    @property
    def sent_bytes(self) -> float:
        """The bytes of a gradient as it is sent."""
        return self.workload.gradient_bytes / (2 if self.halves else 1)

    @functools.cached_property
    def halves(self) -> bool:
        """Whether a hook halves what is sent."""
        return self.option("comm_hook") in HALVING and IN_2_BYTES not in self.workload.rest

    @functools.cached_property
    def low_rank(self) -> bool:
        """Whether PowerSGD sends rank × (rows + columns) numbers of each layer's matrix, whose size no record holds."""
        return self.option("comm_hook") == LOW_RANK

    @property
    def compiled(self) -> bool:
        """Whether backward is one graph, at whose end all gradients arrive."""
        return dict(self.workload.rest).get("optimize") in COMPILED

    @property
    def unit(self) -> str:
        """What a rank runs on: a GPU, or a CPU worker."""
        return unit(dict(self.workload.rest).get("device", "cuda"))

    @property
    def servers(self) -> int:
        """The number of servers."""
        return int(self.option("servers", "0"))

    @functools.cached_property
    def cap_mib(self) -> float:
        """The gradients in MiB with which a bucket is full."""
        try:
            cap = float(self.option("bucket_cap_mb", str(_CAP_WITHOUT_OPTION)))
        except ValueError:  # auto
            cap = 0.0
        if _CAPS[0] <= cap <= _CAPS[1]:
            return cap
        small = (
            self.option("staging", "full") == "full"
            and self.option("transport", "shared") == "shared"
        )
        return _SMALL_CAP if small else _CAP_WITHOUT_OPTION

    def fills_alike(self, other: "Question") -> bool:
        """Tell whether another cell fills its buckets with the same gradients: in the order of their arrival, up to a cap.

        Torch's DDP and all strategies of Ringside do so. Several servers have buckets of their own.
        """
        here, there = ((one.gradient_bytes, one.arrays) for one in (self.workload, other.workload))
        return (
            here == there and self.cap_mib == other.cap_mib and max(self.servers, other.servers) < 2
        )

    @functools.cached_property
    def assumed_buckets(self) -> tuple[float, ...]:
        """Bytes of each bucket as sent, in order, if every one but the last is full: no record said better."""
        whole, full = self.workload.gradient_bytes, self.cap_mib * MIB
        if whole <= 0:  # nothing says how large the gradients are
            return (0.0,)
        count = max(1, round(whole / full))
        sizes = [full] * (count - 1) + [whole - full * (count - 1)]
        return tuple(size * self.sent_bytes / whole for size in sizes)


@dataclass(frozen=True)
class MeasuredCell:
    """The runs of one cell."""

    question: Question
    record_ids: tuple[str, ...]
    step_ms: Values | None
    cost_ms: (
        Values | None
    )  # steps with the strategy minus steps without, in turn (strategy/cost_ms)
    exchange_ms: Values | None  # alone
    scatter_ms: float  # of the steps of a run: (95th percentile − median) ÷ 1.645
    launch_ms: float  # host time to enqueue a step; 0: not measured
    between_runs: float = 0.0  # standard deviation of the step between runs, as a share
    valid: bool = True  # no check cast doubt on it
    cpu_bound: bool = (
        False  # in every run GPUs waited for the CPU: its step says nothing of other batch sizes
    )
    tables: Mapping[str, Any] = field(default_factory=dict)
    logged_buckets: tuple[float, ...] = ()  # bytes of each, by NCCL's log of its calls
    label: str = ""
    sm_mhz: float = 0.0  # mean clock of its GPUs; 0: not sampled
    capped_share: float = 0.0  # of samples at the power cap
    images_per_second: float = 0.0  # the median of its runs; 0: not known

    @property
    def rate_share(self) -> float | None:
        """Images per second, of those that its median step would give: long steps make it less than 1; None if not known."""
        if self.step_ms is None or not self.images_per_second or not self.question.batch_size:
            return None
        return (
            self.images_per_second
            * best(self.step_ms)
            / (self.ranks * self.question.batch_size * 1e3)
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.question.ranks

    @property
    def timed(self) -> bool:
        """Whether its steps were timed, and not its exchange alone."""
        return self.step_ms is not None


def workload_of(request: Mapping[str, str], model: Mapping[str, float]) -> Workload:
    """Return the workload of a cell's request and of what its record says of its model."""
    left_out = ("batch_size", "global_batch_size", "server_gpus", "server_hosts", "model.name")
    rest = tuple(
        (name, value)
        for name, value in sorted(request.items())
        if name not in left_out
        and not name.startswith(("strategy.", "nccl.", "benchmark.", "declared"))
    )
    gradient_bytes, arrays = (
        _at_most(model.get(name), _MOST_BYTES) for name in ("gradient_bytes", "arrays")
    )
    return Workload(request["model.name"], gradient_bytes, int(arrays), rest)


def _at_most(value: object, most: float) -> float:
    """Return a number of a record; 0 where it says none that can be."""
    return float(value) if isinstance(value, (int, float)) and 0 < value <= most else 0.0


def options_of(strategy: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the options of a strategy as texts, in order of their names."""
    return tuple(
        (name, canonical(value)) for name, value in sorted(strategy.items()) if value is not None
    )


def question_of(
    cell: Cell, workload: Workload, link_class: str | None = None, machine: str = ""
) -> Question:
    """Return the question that a cell is, before it runs. `link_class` is the farthest between its GPUs."""
    hosts = max(1, len(cell.hosts))
    shares = set(cell.server_gpus) & set(cell.gpus) and not set(cell.server_hosts) - set(cell.hosts)
    wire = asked_wire(cell.nccl, link_class, hosts)
    exchange = str(cell.declared.get("strategy", {}).get("exchange", ""))
    return Question(
        workload, cell.batch_size, options_of(cell.strategy), wire, len(cell.gpus), hosts, cell.members, bool(shares),
        machine=machine, exchange=exchange,
    )  # fmt: skip
