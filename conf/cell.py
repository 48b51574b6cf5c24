"""A cell: one point of a study with every `auto` resolved. A worker measures it; a record is its
result."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec

# What a double holds; a record that says more is damaged.
Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
# The device of a rank: an id on this machine; '<host>:<id>' where cells have hosts.
Member: TypeAlias = int | str
IMAGES, SAMPLES = "images", "samples"  # what a model is trained on, and what is counted
# Values of `optimize`: those that compile the model, and those that replay a step as a CUDA graph.
COMPILED = ("compile", "max", "compile_graph", "max_graph")
GRAPHED = ("graph", "compile_graph", "max_graph")
SECOND_RUN = -1  # the repeat of a cell that is measured a second time, for the noise floor
LISTS = ("gpus", "labels", "server_gpus", "hosts", "server_hosts")
FEWEST_COMPRESSED = 3  # hosts with consecutive numbers
MOST_SERVERS, MOST_RANKS = 4096, 1 << 16  # processes of a cell; a record that says more is damaged
HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}", re.ASCII)  # as long as DNS has them
# Left out where they say nothing: cells of an older version keep their keys.
OF_ADAMW = ("name", "beta1", "beta2", "epsilon")
SCRIPTS = "benchmarks.script."  # where code that runs scripts is
OWN_MODEL = "python"  # the library of a model that is a user's own code
CONNECTIONS, MOST_CONNECTIONS = "cuda_device_max_connections", 32
OMITTED_IF_EMPTY = ("inputs", "data", "hosts", "server_hosts", CONNECTIONS, "accumulate", *OF_ADAMW)
# What two cells with equal compiled graphs may differ in. Everything else decides, or could decide,
# what is compiled.
NOT_COMPILED = ("nccl", "benchmark", "repeat", "labels", "profiler", "profiler_options", "declared")


class Compared(msgspec.Struct):
    """What a benchmark's YAML says of how its cells are compared: the rule `compared`."""

    metric: str
    less_is_better: bool
    rate: str  # its name for people
    may_differ: list[str]
    work: list[str]


class LoadedData(TypedDict):
    """The `data` of a cell that has a loader."""

    name: str
    loader: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Network:
    """The model of a cell: `builder` of `library`, with resolved sizes."""

    name: str
    library: str
    builder: str
    channels: Integer
    classes: Integer
    image_size: Integer  # pixels of a side
    auxiliary_weight: float
    options: dict[str, Any]
    # Samples: the model makes its own batches, and has no channels, classes and image size.
    inputs: str = IMAGES


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
    """Return what cells count, for people: images, or samples if a model makes its own batches."""
    return SAMPLES if any(cell.model.inputs == SAMPLES for cell in cells) else IMAGES


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process of a cell runs."""

    kind: str  # rank or server
    host: str  # '' is this machine
    gpu: int | None  # or the slot of a CPU worker; None: a server in host memory


def compress_hosts(hosts: Sequence[str]) -> str:
    """Return hosts in short, in their order, as Slurm writes them: `a+b`, `node[01-16]+gpu7`."""
    runs: list[list[str]] = []  # of hosts with consecutive numbers
    expected = ""  # the host that continues the last run
    for host in hosts:
        if host != expected:
            runs.append([])
        runs[-1].append(host)
        letters = host.rstrip("0123456789")
        digits = host[len(letters) :]
        expected = ""
        if digits and digits.strip("9"):  # 99 is followed by a longer number
            expected = letters + str(int(digits) + 1).zfill(len(digits))
    parts = []
    for run in runs:
        if len(run) < FEWEST_COMPRESSED:
            parts += run
        else:
            letters = run[0].rstrip("0123456789")
            parts.append(f"{letters}[{run[0][len(letters) :]}-{run[-1][len(letters) :]}]")
    return "+".join(parts)


@dataclass(frozen=True)
class Cell:
    """One point: model × strategy × GPU subset × NCCL settings × … Equal cells have equal keys."""

    model: Network
    strategy: dict[str, Any]  # name and options
    benchmark: dict[str, Any]  # name and options
    nccl: dict[str, str]  # variables that the settings set
    optimizer: Optimizer
    profiler: str  # none, nsys, torch: of a pass after the timed one
    gpus: tuple[Integer, ...]  # in rank order; with hosts, those of every host
    device: str  # cpu or cuda
    batch_size: Integer  # images or samples per rank and step
    global_batch_size: Integer | None  # strong scaling; None: weak scaling
    precision: str
    optimize: str
    channels_last: bool
    seed: Integer
    repeat: Integer = 0
    labels: tuple[str, ...] = ()  # what differs from the defaults, for people; no part of the key
    server_gpus: tuple[Integer, ...] = ()  # one for each server that keeps weights on a GPU
    profiler_options: dict[str, Any] = field(default_factory=dict)  # empty without a profiler
    data: dict[str, Any] = field(default_factory=dict)  # of a loader; empty: synthetic batches
    hosts: tuple[str, ...] = ()  # in rank order; empty: this machine
    server_hosts: tuple[str, ...] = ()  # one for each server, where the cell has hosts
    # By group, rules of its YAML: target, derive, section, compared; sha256 of a file of
    # the user's own.
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    # CUDA_DEVICE_MAX_CONNECTIONS of its processes; None: as it is around the launcher.
    cuda_device_max_connections: Integer | None = None
    accumulate: Integer = 1  # micro-steps of a step, which share its batch equally

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.gpus) * max(1, len(self.hosts))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that the cell asks for, NCCL's among them."""
        if self.cuda_device_max_connections is None:
            return self.nccl
        return {**self.nccl, CONNECTIONS.upper(): str(self.cuda_device_max_connections)}

    @property
    def compiled(self) -> bool:
        """Whether torch.compile makes the model's kernels."""
        return self.optimize in COMPILED

    @property
    def graph(self) -> str:
        """What decides what torch compiles, as text; empty for a cell that is not compiled."""
        if not self.compiled:
            return ""
        # A captured graph holds the same kernels.
        cell = dataclasses.replace(self, optimize=self.optimize.removesuffix("_graph"))
        fields = cell.to_dict()
        for name in NOT_COMPILED:
            del fields[name]
        declared = dict(self.declared)
        declared.pop("benchmark", None)
        return json.dumps({**fields, "declared": declared}, sort_keys=True)

    @property
    def graphed(self) -> bool:
        """Whether a step is the replay of a CUDA graph."""
        return self.optimize in GRAPHED

    @property
    def servers(self) -> int:
        """The number of server processes, which are no ranks."""
        return int(self.strategy.get("servers", 0))

    @property
    def period(self) -> int:
        """The steps in which a strategy synchronises all weights once; 1 for most."""
        return int(self.strategy.get("period", 1))

    @property
    def members(self) -> tuple[Member, ...]:
        """The devices of the ranks, in rank order; '<host>:<id>' where the cell has hosts."""
        if not self.hosts:
            return self.gpus
        return tuple(f"{host}:{gpu}" for host in self.hosts for gpu in self.gpus)

    @property
    def places(self) -> tuple[ProcessPlace, ...]:
        """Where each process runs, by its number: the ranks, host by host, then the servers."""
        places = []
        for host in self.hosts or ("",):
            places += [ProcessPlace("rank", host, gpu) for gpu in self.gpus]
        hosts = self.server_hosts or ("",) * self.servers
        gpus = self.server_gpus or (None,) * self.servers
        for host, gpu in zip(hosts, gpus, strict=True):
            places.append(ProcessPlace("server", host, gpu))
        return tuple(places)

    @property
    def every_host(self) -> tuple[str, ...]:
        """The hosts of the ranks, then those that have servers only; empty: this machine."""
        return tuple(dict.fromkeys((*self.hosts, *self.server_hosts)))

    @property
    def trains(self) -> bool:
        """Whether Ringside trains its model by a strategy; else it measures links or a script."""
        return self.model.builder != "none"

    @property
    def runs_script(self) -> bool:
        """Whether its ranks run a command of the user's, in the timed pass or another."""
        # An old record declares no benchmark.
        target = self.declared.get("benchmark", {}).get("target", "")
        return str(target).startswith(SCRIPTS)

    def target(self, group: str) -> str:
        """Return the dotted name of what a rank calls for the cell's strategy or benchmark."""
        return str(self.declared[group]["target"])

    def untimed_pass(self, name: str, target: str, **options: Any) -> "Cell":
        """Return the same cell with another benchmark: a pass that is not the timed one."""
        declared = {**self.declared, "benchmark": {"target": target}}
        return dataclasses.replace(self, benchmark={"name": name, **options}, declared=declared)

    @property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the cell as canonical JSON, without its
        labels.

        The profiler is part of it although the timed pass is the same with it: a cell without a
        trace does not answer a request for one. Comparisons between cells leave the profiler out
        (analysis.findings).
        """
        content = self.to_dict()
        del content["labels"]
        content["declared"] = {}
        for group, rules in self.declared.items():
            hashed = {name: rules[name] for name in ("target", "sha256") if name in rules}
            content["declared"][group] = hashed
        for name in ("server_gpus", "profiler_options", "declared"):
            if not content[name]:
                del content[name]  # a cell of an older schema keeps its key
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The cell for people: `resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC`."""
        parts = [*self.subject]
        if self.trains:
            parts.append(self.strategy["name"])
        parts += [self.where, *self.labels]
        for name, value in sorted(self.nccl.items()):
            parts.append(f"{name.removeprefix('NCCL_')}={value}")
        return " · ".join(parts)

    @property
    def subject(self) -> tuple[str, ...]:
        """The names of what it measures: its script, or its benchmark and model; of `throughput`
        the model alone."""
        if self.runs_script:
            return (self.model.name,)
        names = []
        if self.benchmark["name"] != "throughput":
            names.append(self.benchmark["name"])
        if self.trains:
            names.append(self.model.name)
        return tuple(names)

    @property
    def where(self) -> str:
        """The devices for people: `gpus 0,3`, with hosts `a · gpus 0,3` or `a+b · 2 × gpus 0,3`."""
        gpus = f"gpus {','.join(map(str, self.gpus))}"
        if len(self.hosts) > 1:
            gpus = f"{len(self.hosts)} × {gpus}"
        return f"{compress_hosts(self.hosts)} · {gpus}" if self.hosts else gpus

    def run_suffixes(self, drift: bool = False) -> list[str]:
        """Return which of several measurements of the same cell it is; empty for the first."""
        if self.repeat == SECOND_RUN:
            return ["second run"]
        if drift:
            return ["drift"]
        return [f"repeat {self.repeat}"] if self.repeat else []

    @property
    def folder(self) -> str:
        """The name of the cell's folder: readable, safe, and unique by the key."""
        kind = self.benchmark["name"]
        if self.trains:
            kind = f"{self.model.name}-{self.strategy['name']}"
        hosts = f"{len(self.hosts)}x" if self.hosts else ""
        return f"{kind}-{hosts}gpus{'-'.join(map(str, self.gpus))}-{self.key[:10]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain JSON types. Nested mappings are the cell's own: read them, do
        not change them.

        A report does this for thousands of records: dataclasses.asdict, which copies every value,
        would take far longer.
        """
        plain: dict[str, Any] = dict(vars(self))
        model, optimizer = dict(vars(self.model)), dict(vars(self.optimizer))
        if self.model.inputs == IMAGES:
            del model["inputs"]
        if self.optimizer.name == "sgd":
            for name in OF_ADAMW:
                del optimizer[name]
        plain |= {"model": model, "optimizer": optimizer}
        if self.accumulate == 1:
            del plain["accumulate"]
        for name in LISTS:
            plain[name] = list(plain[name])
        for name in OMITTED_IF_EMPTY:
            if name in plain and not plain[name]:
                del plain[name]
        if self.hosts:
            plain["places"] = [list(vars(process).values()) for process in self.places]
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Cell":
        """Return the cell that `to_dict` wrote.

        Raises ValueError: a field is missing or holds something else, or the places of the
        processes cannot be told.
        """
        cell = msgspec.convert(plain, Cell)
        # msgspec leaves defaults on the class, where vars() does not see them.
        cell = dataclasses.replace(
            cell,
            model=dataclasses.replace(cell.model),
            optimizer=dataclasses.replace(cell.optimizer),
        )
        for group in ("strategy", "benchmark"):
            if not isinstance(getattr(cell, group).get("name"), str):
                raise ValueError(f"{group}.name={getattr(cell, group).get('name')!r:.100}")
        if cell.data:
            msgspec.convert(cell.data, LoadedData)
        if cell.batch_size < cell.trains:
            raise ValueError(f"batch_size={cell.batch_size}")
        if not 1 <= cell.accumulate <= max(1, cell.batch_size):
            raise ValueError(f"accumulate={cell.accumulate}")
        period = cell.strategy.get("period", 1)
        if type(period) is not int or not 1 <= period <= MOST_RANKS:
            raise ValueError(f"strategy.period={period!r:.100}")
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
        if compared:
            msgspec.convert(compared, Compared)
        return cell
