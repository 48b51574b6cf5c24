"""A cell: one point of a study with every `auto` resolved. A worker measures it; a record is its result."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

IMAGES, SAMPLES = "images", "samples"  # what a model is trained on, and what is counted
# Values of `optimize`: those that compile the model, and those that replay a step as a CUDA graph.
COMPILED, GRAPHED = (
    ("compile", "max", "compile_graph", "max_graph"),
    ("graph", "compile_graph", "max_graph"),
)


@dataclass(frozen=True)
class Network:
    """The model of a cell: `builder` of `library`, with resolved sizes."""

    name: str
    library: str
    builder: str
    channels: int
    classes: int
    image_size: int  # pixels of a side
    auxiliary_weight: float
    options: dict[str, Any]
    inputs: str = IMAGES  # samples: the model makes its own batches, and has no channels, classes and image size


@dataclass
class Optimizer:
    """The optimizer of a cell with its settings; those of the other one mean nothing."""

    learning_rate: float = 0.01
    momentum: float = 0.9  # sgd
    weight_decay: float = 5e-5
    name: str = "sgd"
    beta1: float = 0.9  # adamw, these three
    beta2: float = 0.999
    epsilon: float = 1e-8


def counted(cells: "Iterable[Cell]") -> str:
    """Return what cells count, for people: images, or samples if one of them trains on something else."""
    return SAMPLES if any(cell.model.inputs == SAMPLES for cell in cells) else IMAGES


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of a cell runs."""

    kind: str  # rank or server
    host: str  # '' is this machine
    gpu: int | None  # or the slot of a CPU worker; None: a server in host memory


def compress_hosts(hosts: Sequence[str]) -> str:
    """Return hosts in short, in their order, as Slurm writes them: `a+b`, `node[01-16]+gpu7`."""
    numbered = [re.fullmatch(r"(.*?)([0-9]+)", host) for host in hosts]
    alike = [
        (found[1], len(found[2]), int(found[2]) - place) if found else (host,)
        for place, (host, found) in enumerate(zip(hosts, numbered, strict=True))
    ]
    parts: list[str] = []
    for _, group in groupby(range(len(hosts)), key=alike.__getitem__):
        places = list(group)
        first, last = numbered[places[0]], numbered[places[-1]]
        if first and last and len(places) >= FEWEST_FOLDED:
            parts.append(f"{first[1]}[{first[2]}-{last[2]}]")
        else:
            parts += [hosts[place] for place in places]
    return "+".join(parts)


SECOND_RUN = -1  # the repeat of a cell that is measured a second time, for the noise floor
LISTS = ("gpus", "labels", "server_gpus", "hosts", "server_hosts")
FEWEST_FOLDED = 3  # hosts with consecutive numbers
MOST_SERVERS, MOST_RANKS = 4096, 1 << 16  # processes of a cell; a record that says more is damaged
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", re.ASCII)  # as long as DNS has them
# Left out where they say nothing: cells of an older version keep their keys.
OF_ADAMW = ("name", "beta1", "beta2", "epsilon")
ONLY_IF_SAID = ("inputs", "data", "hosts", "server_hosts", *OF_ADAMW)
# What two cells with equal compiled graphs may differ in. Everything else decides, or could decide, what is compiled.
NOT_COMPILED = ("nccl", "benchmark", "repeat", "labels", "profiler", "profiler_options", "declared")

# What a benchmark's YAML says of how its cells are compared: the rule `compared`. Lists are of texts.
COMPARED: dict[str, type] = {
    "metric": str,
    "less_is_better": bool,
    "rate": str,
    "may_differ": list,
    "work": list,
}


@dataclass(frozen=True)
class Cell:
    """One point: model × strategy × GPU subset × NCCL settings × … Equal cells have equal keys."""

    model: Network
    strategy: dict[str, Any]  # name and options
    benchmark: dict[str, Any]  # name and options
    nccl: dict[str, str]  # variables that the settings set
    optimizer: Optimizer
    profiler: str  # none, nsys, torch: of a pass after the timed one
    gpus: tuple[int, ...]  # in rank order; with hosts, those of every host
    device: str  # cpu or cuda
    batch_size: int  # images or samples per rank and step
    global_batch_size: int | None  # strong scaling; None: weak scaling
    precision: str
    optimize: str
    channels_last: bool
    seed: int
    repeat: int = 0
    labels: tuple[str, ...] = ()  # what differs from the defaults, for people; no part of the key
    server_gpus: tuple[int, ...] = ()  # one for each server that keeps weights on a GPU
    profiler_options: dict[str, Any] = field(default_factory=dict)  # empty without a profiler
    data: dict[str, Any] = field(
        default_factory=dict
    )  # name, loader, options; empty: synthetic batches
    hosts: tuple[str, ...] = ()  # in rank order; empty: this machine
    server_hosts: tuple[str, ...] = ()  # one for each server, where the cell has hosts
    # By group, rules of its YAML: target, derive, section, exchange, compared; sha256 of a file of the user's own.
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.gpus) * max(1, len(self.hosts))

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes the model's kernels."""
        return self.optimize in COMPILED

    @property
    def graph(self) -> str:
        """What decides what torch compiles, as text: equal for cells with equal graphs, empty for one that is not compiled."""
        if not self.compiled:
            return ""
        alike = dataclasses.replace(
            self, optimize=self.optimize.removesuffix("_graph")
        )  # captured or not
        deciding = {
            name: value for name, value in alike.to_dict().items() if name not in NOT_COMPILED
        }
        deciding["declared"] = {
            group: rules for group, rules in self.declared.items() if group != "benchmark"
        }
        return json.dumps(deciding, sort_keys=True)

    @property
    def graphed(self) -> bool:
        """Whether a step is the replay of a CUDA graph."""
        return self.optimize in GRAPHED

    @property
    def servers(self) -> int:
        """The number of server processes, which are no ranks."""
        return int(self.strategy.get("servers", 0))

    @property
    def members(self) -> tuple[int | str, ...]:
        """The devices of the ranks, in rank order: ids on this machine; '<host>:<id>' where the cell has hosts."""
        return (
            tuple(f"{host}:{gpu}" for host in self.hosts for gpu in self.gpus)
            if self.hosts
            else self.gpus
        )

    @property
    def places(self) -> tuple[ProcessPlace, ...]:
        """Where each process runs, by its number: the ranks, all of one host after all of another, then the servers."""
        ranks = [
            ProcessPlace("rank", host, gpu) for host in self.hosts or ("",) for gpu in self.gpus
        ]
        hosts = self.server_hosts or ("",) * self.servers
        gpus = self.server_gpus or (None,) * self.servers
        return (
            *ranks,
            *(ProcessPlace("server", host, gpu) for host, gpu in zip(hosts, gpus, strict=True)),
        )

    @property
    def every_host(self) -> tuple[str, ...]:
        """The hosts of the ranks, then those that have servers only; empty: this machine."""
        return tuple(dict.fromkeys((*self.hosts, *self.server_hosts)))

    @property
    def trains(self) -> bool:
        """Whether the cell has a model and a strategy; otherwise it measures links."""
        return self.model.name != "none"

    def target(self, group: str) -> str:
        """Return the dotted name of what a rank calls for the cell's strategy or benchmark. Raises KeyError."""
        return str(self.declared[group]["target"])

    def untimed_pass(self, name: str, target: str, **options: Any) -> "Cell":
        """Return the same cell with another benchmark: a pass that is not the timed one."""
        declared = {**self.declared, "benchmark": {"target": target}}
        return dataclasses.replace(self, benchmark={"name": name, **options}, declared=declared)

    @property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the cell as canonical JSON, without its labels.

        The profiler is part of it although the timed pass is the same with it: a cell without a trace does not answer a
        request for one. Comparisons between cells leave the profiler out (analysis.findings).
        """
        content = {name: value for name, value in self.to_dict().items() if name != "labels"}
        content["declared"] = {
            group: {name: value for name, value in rules.items() if name in ("target", "sha256")}
            for group, rules in self.declared.items()
        }
        for name in ("server_gpus", "profiler_options", "declared"):
            if not content[name]:
                del content[name]  # a cell of an older schema keeps its key
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The cell for people: `resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC`."""
        parts = [self.where]
        if self.trains:
            parts = [self.model.name, self.strategy["name"], *parts]
        if self.benchmark["name"] != "throughput":
            parts.insert(0, self.benchmark["name"])
        parts += self.labels
        parts += [
            f"{name.removeprefix('NCCL_')}={value}" for name, value in sorted(self.nccl.items())
        ]
        return " · ".join(parts)

    @property
    def where(self) -> str:
        """The devices for people: `gpus 0,3`, with hosts `a · gpus 0,3` or `a+b · 2 × gpus 0,3`."""
        gpus, many = "gpus " + ",".join(map(str, self.gpus)), len(self.hosts)
        return (
            f"{compress_hosts(self.hosts)} · {f'{many} × ' * (many > 1)}{gpus}"
            if self.hosts
            else gpus
        )

    def run_suffixes(self, drift: bool = False) -> list[str]:
        """Return which of several measurements of the same cell it is, for people; empty for the first."""
        if self.repeat == SECOND_RUN:
            return ["second run"]
        return ["drift"] if drift else [f"repeat {self.repeat}"] if self.repeat else []

    @property
    def folder(self) -> str:
        """The name of the cell's folder: readable, safe, and unique by the key."""
        gpus = "-".join(map(str, self.gpus))
        kind = (
            f"{self.model.name}-{self.strategy['name']}" if self.trains else self.benchmark["name"]
        )
        hosts = f"{len(self.hosts)}x" if self.hosts else ""
        return f"{kind}-{hosts}gpus{gpus}-{self.key[:10]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain JSON types. Nested mappings are the cell's own: read them, do not change them.

        A report does this for thousands of records: dataclasses.asdict, which copies every value, would take far longer.
        """
        nested: dict[str, dict[str, Any]] = {
            "model": dict(vars(self.model)),
            "optimizer": dict(vars(self.optimizer)),
        }
        if self.model.inputs == IMAGES:
            del nested["model"]["inputs"]
        if self.optimizer.name == "sgd":
            nested["optimizer"] = {
                one: value for one, value in nested["optimizer"].items() if one not in OF_ADAMW
            }
        plain = {**vars(self), **nested, **{name: list(getattr(self, name)) for name in LISTS}}
        said = {name: value for name, value in plain.items() if value or name not in ONLY_IF_SAID}
        return said | (
            {"places": [list(vars(one).values()) for one in self.places]} if self.hosts else {}
        )

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Cell":
        """Return the cell that `to_dict` wrote.

        Raises:
            ValueError: a field is missing or holds something else.
        """
        cell = msgspec.convert(plain, Cell)
        # msgspec leaves defaults on the class, where vars() does not see them.
        cell = dataclasses.replace(
            cell,
            model=dataclasses.replace(cell.model),
            optimizer=dataclasses.replace(cell.optimizer),
        )
        _refuse_wrong_places(cell)
        return cell


def _refuse_wrong_places(cell: Cell) -> None:
    """Refuse a cell that was read if the places of its processes, or how it is compared, cannot be told. Raises ValueError."""
    for group in ("strategy", "benchmark"):
        if not isinstance(getattr(cell, group).get("name"), str):
            raise ValueError(f"{group}.name={getattr(cell, group).get('name')!r:.100}")
    servers = cell.strategy.get("servers", 0)
    if type(servers) is not int or not 0 <= servers <= MOST_SERVERS:
        raise ValueError(f"strategy.servers={servers!r:.100}")
    for name in ("hosts", "server_hosts"):
        if not all(map(HOST_NAME.fullmatch, getattr(cell, name))):
            raise ValueError(f"{name}={getattr(cell, name)!r:.100}")
    if len(set(cell.hosts)) < len(cell.hosts) or len(cell.hosts) * len(cell.gpus) > MOST_RANKS:
        raise ValueError(f"hosts={cell.hosts!r:.100}")
    if len(cell.server_hosts) != (servers if cell.hosts else 0):
        raise ValueError(f"server_hosts={cell.server_hosts!r:.100}, strategy.servers={servers}")
    if len(cell.server_gpus) not in (0, servers):
        raise ValueError(f"server_gpus={cell.server_gpus!r:.100}, strategy.servers={servers}")
    compared = cell.declared.get("benchmark", {}).get("compared")
    if not compared:
        return
    for name, kind in COMPARED.items():
        value: Any = compared.get(name)
        is_right = type(value) is kind
        if is_right and kind is list:
            is_right = all(isinstance(text, str) for text in value)
        if not is_right:
            raise ValueError(f"declared.benchmark.compared.{name}={value!r:.100}")
