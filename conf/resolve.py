"""From a composed configuration to a cell: check every option, then resolve each `auto` for a GPU
subset."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf import groups, nccl
from conf.cell import (
    CONNECTIONS,
    GRAPHED,
    IMAGES,
    MOST_CONNECTIONS,
    OWN_MODEL,
    SAMPLES,
    Cell,
    Network,
    Optimizer,
    compress_hosts,
)
from conf.groups import SERVER_NODES
from conf.options import Refused, accepted, check_fields, check_names, to_text
from conf.schema import PRECISIONS, UNGRAPHED, Config, Data, Model, OptimizerOptions, Sizes
from conf.subsets import is_name
from conf.targets import sha256_of_foreign_code, source_file

GPU_PRECISIONS = ("tf32", "fp16")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# Options without effect in a benchmark that trains nothing.
TRAINING = (
    *("model", "data", "strategy", "optimizer", "batch_size", "global_batch_size", "image_size"),
    *("precision", "optimize", "channels_last", "profiler", "accumulate"),
)
# What `auto` means for the settings of each optimizer: torch's own, for sgd those of the published
# recipes.
ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.01, "weight_decay": 5e-5, "momentum": 0.9},
    "adamw": {"learning_rate": 0.001, "weight_decay": 0.01, **ADAM},
}

OF_IMAGES = ("channels", "classes", "auxiliary_weight")  # fields of a model


@dataclass
class CheckedConfig(Config):
    """A checked configuration. Of NCCL's settings only the variables are left."""

    nccl: dict[str, str] = dataclasses.field(default_factory=dict)  # type: ignore[assignment]


def checked(config: Config) -> tuple[CheckedConfig, list[str]]:
    """Check every option. Return the configuration and notices for the user."""
    variables, notices = nccl.settings(config.nccl)
    check_names("", config)
    check_fields("", dataclasses.replace(config, nccl=nccl.Nccl()))
    fields = dict(vars(config)) | {"nccl": variables}
    fields["model"] = checked_model(config.model)
    fields["data"] = checked_data(config.data)
    check_name("study", config.study)
    texts = {
        "output_dir": config.output_dir,
        "tracking.uri": config.tracking.uri,
        "tracking.experiment": config.tracking.experiment,
    }
    for name, text in texts.items():
        if text is not None and (not text.strip() or not text.isprintable() or len(text) > 1000):
            raise Refused(f"{name}={text!r}: expected printable text of 1 to 1000 characters")
    if any(len(part.encode()) > 255 for part in config.output_dir.split("/")):
        raise Refused(
            f"output_dir={config.output_dir}: expected folders whose names have at most 255 bytes"
        )
    for group in groups.WITH_RULES:
        fields[group] = groups.options(group, fields[group])
    return CheckedConfig(**fields), notices


def resolve(
    config: CheckedConfig,
    gpus: tuple[int, ...],
    device: str,
    all_gpus: Mapping[str, tuple[int, ...]] | None = None,
    hosts: tuple[str, ...] = (),
) -> Cell:
    """Return the cell of a configuration on one subset: each `auto` is resolved for cpu or cuda.

    The subset is on each of `hosts`; without them on this machine. `all_gpus` are the ids of all
    GPUs of every host that the sweep may use ('' is this machine); without it, those of the subset.
    """
    benchmark = groups.choice("benchmark", config.benchmark["name"])
    typed = dict(config.benchmark)
    may_be_whole = "all" in benchmark.accepts.get("calibrate", {}).get("words", ())
    if config.predict == "auto" and may_be_whole and typed["calibrate"] == "auto":
        typed["calibrate"] = "all"
    options = groups.resolved("benchmark", typed, device, len(gpus) * max(1, len(hosts)))
    connections = config.cuda_device_max_connections
    if connections is not None and device == "cpu":
        raise Refused(
            f"{CONNECTIONS}={connections}: works on GPUs only; leave it out on CPU workers"
        )
    labels = _typed_options(benchmark, config.benchmark, options)
    if connections is not None:
        labels.append(f"{CONNECTIONS}={connections}")
    cell = Cell(  # that measures links: the same cell with any model and strategy
        model=Network(
            *(options.pop("script", "none"), "ringside", "none", 0, 0, 0, 0.0, {}),
            benchmark.rules.get("counts", IMAGES),
        ),
        strategy={"name": "none"},
        benchmark=options,
        nccl=dict(config.nccl),
        optimizer=Optimizer(),
        profiler="none",
        gpus=gpus,
        device=device,
        batch_size=0,
        global_batch_size=None,
        precision="fp32",
        optimize="eager",
        channels_last=False,
        seed=config.seed,
        labels=tuple(labels),
        hosts=hosts,
        declared={"benchmark": benchmark.declared()},
        cuda_device_max_connections=connections,
    )
    if benchmark.trains or cell.runs_script:
        profiler_options = dict(config.profiler)
        name = profiler_options.pop("name")
        profiler_options.pop("nsys_path", None)  # a path on this machine
        if name != "none":
            cell = dataclasses.replace(cell, profiler=name, profiler_options=profiler_options)
    if not benchmark.trains:
        return cell
    return _training(config, cell, all_gpus or dict.fromkeys(hosts or ("",), gpus))


def _training(config: CheckedConfig, cell: Cell, all_gpus: Mapping[str, tuple[int, ...]]) -> Cell:
    device, hosts = cell.device, cell.hosts
    strategy = groups.choice("strategy", config.strategy["name"])
    sizes = config.model.gpu if device == "cuda" else config.model.cpu
    batch_size, global_batch_size = _batch_sizes(config, sizes, cell, all_gpus)
    options = groups.resolved("strategy", config.strategy, device, cell.world_size)
    if config.accumulate > 1 and "servers" in options:
        raise Refused(
            f"accumulate={config.accumulate}: the servers of strategy={strategy.name} apply every "
            "gradient; expected accumulate=1 or a strategy without servers"
        )
    precision, optimize = _arithmetic(config, strategy, options, cell.benchmark["name"], device)
    on: tuple[str, ...] = ()
    if hosts:
        on = server_hosts(config.strategy, hosts, [*all_gpus])
    channels_last = config.channels_last in (True, "True")
    if config.channels_last == "auto":
        channels_last = device == "cuda" and config.model.inputs == IMAGES
    data: dict[str, Any] = {}
    if config.data.loader is not None:
        data = dataclasses.asdict(config.data)
    cell = dataclasses.replace(
        cell,
        model=_network(config, sizes, device),
        strategy=options,
        optimizer=_optimizer(config.optimizer),
        data=data,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        precision=precision,
        optimize=optimize,
        channels_last=channels_last,
        accumulate=config.accumulate,
        server_gpus=server_gpus(options, cell.gpus, device, all_gpus, hosts, on),
        server_hosts=on,
        declared={
            "strategy": strategy.declared(),
            "benchmark": cell.declared["benchmark"],
            **_declared_own(config),
        },
    )
    connections = cell.cuda_device_max_connections
    if hosts and cell.server_gpus and connections not in (None, MOST_CONNECTIONS):
        raise Refused(
            f"{CONNECTIONS}={connections}: GPU servers on several hosts stand still with fewer "
            f"than {MOST_CONNECTIONS}; possible there: null and {MOST_CONNECTIONS}"
        )
    return labelled(cell, config)


def _batch_sizes(
    config: Config, sizes: Sizes, cell: Cell, all_gpus: Mapping[str, Sequence[int]]
) -> tuple[int, int | None]:
    """Return the images per rank and step, and over all ranks (None: weak scaling)."""
    images, micro_steps = config.global_batch_size, config.accumulate
    if images is None and config.batch_size == "auto":
        return int(sizes.batch_size) * micro_steps, None
    if images is None:
        return int(config.batch_size) * micro_steps, None
    if images == "auto":
        gpu_count = sum(map(len, all_gpus.values()))
        # Divisible by 1, 2, 4, … and all GPUs.
        divisor = math.lcm(1 << (gpu_count.bit_length() - 1), gpu_count) * micro_steps
        images = max(sizes.batch_size // divisor, 1) * divisor
    if config.batch_size != "auto":
        raise Refused(
            f"global_batch_size={images}: use it alone, not with batch_size={config.batch_size}"
        )
    batch_size, rest = divmod(int(images), cell.world_size)
    if rest or not batch_size or batch_size % micro_steps:
        factors = f"{cell.world_size} ranks"
        if micro_steps > 1:
            factors += f" × accumulate={micro_steps}"
        raise Refused(
            f"global_batch_size={images}: expected a multiple of {cell.world_size * micro_steps} "
            f"({factors})"
        )
    return batch_size, int(images)


def _optimizer(options: OptimizerOptions) -> Optimizer:
    values: dict[str, Any] = dict(OPTIMIZERS[options.name])
    for name, value in vars(options).items():
        if name == "name" or value == "auto":
            continue
        if name not in values:
            owners = [owner for owner, settings in OPTIMIZERS.items() if name in settings]
            raise Refused(
                f"optimizer.{name}={value}: works only with optimizer.name={' or '.join(owners)}"
            )
        values[name] = float(value)
    return Optimizer(name=options.name, **values)


def _arithmetic(
    config: CheckedConfig,
    strategy: groups.GroupChoice,
    options: Mapping[str, Any],
    benchmark: str,
    device: str,
) -> tuple[str, str]:
    """Return `precision` and `optimize`, as far as the device and the strategy allow them."""
    precision, optimize = config.precision, config.optimize
    if device == "cpu" and precision in GPU_PRECISIONS:
        raise Refused(
            f"precision={precision}: needs a GPU; CPU workers take auto, fp32, bf16 or bf16_weights"
        )
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    fields = {"precision": precision, "benchmark": benchmark, "optimize": optimize}
    for name, value in fields.items():
        if value in strategy.refused(name):
            possible = _possible(strategy, name, device)
            raise Refused(f"{name}={value}: with strategy={strategy.name} expected {possible}")
    for name, limits in strategy.accepts.items():
        if device == "cpu" and options.get(name) in limits.get("gpu_only", ()):
            raise Refused(
                f"strategy.{name}={options[name]}: works on GPUs only, not on CPU workers"
            )
    if optimize == "auto":
        optimize = "eager"
    reason = ""
    if optimize not in GRAPHED:
        pass
    elif precision == "fp16":
        reason = "the loss scaler of precision=fp16 skips some steps, and a CUDA graph skips none"
    elif device == "cpu":
        reason = "CUDA graphs need GPUs"
    else:
        reason = strategy.why_no_graph(options)
    if reason:
        possible = _possible(strategy, "optimize", device)
        raise Refused(f"optimize={optimize}: {reason}; expected {possible}")
    return precision, optimize


def _possible(strategy: groups.GroupChoice, name: str, device: str) -> str:
    """Return what precision, benchmark or optimize (without a CUDA graph) a strategy works with."""
    words = list(UNGRAPHED)
    if name == "benchmark":
        words = groups.choices("benchmark")
    elif name == "precision":
        words = [word for word in PRECISIONS if device == "cuda" or word not in GPU_PRECISIONS]
    return ", ".join(word for word in words if word not in strategy.refused(name))


def without_effect(benchmark: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a request that do nothing because its benchmark trains nothing."""
    if groups.choice("benchmark", benchmark).trains:
        return []
    ignored = []
    for text in overrides:
        option = re.split(r"[=.@]", text.lstrip("+"))[0]
        if option in TRAINING and (option, benchmark) != ("profiler", "script"):
            ignored.append(text)
    return ignored


def _typed_options(
    choice: groups.GroupChoice, typed: Mapping[str, Any], resolved: Mapping[str, Any]
) -> list[str]:
    """Return 'name=value' for each option that differs from the default of its YAML."""
    texts = []
    for name, value in typed.items():
        if name in resolved and value not in (choice.options[name], "auto"):
            texts.append(f"{name}={to_text(resolved[name])}")
    return texts


def labelled(cell: Cell, config: Config) -> Cell:
    """Return a cell with its labels for people: what is asked for besides the defaults.

    'batch 512', 'compile', 'comm_hook=bf16'. No code reads them.
    """
    labels = []
    if cell.global_batch_size:
        labels.append(f"global batch {cell.global_batch_size}")
    if config.batch_size != "auto" or (config.global_batch_size and not cell.global_batch_size):
        labels.append(f"batch {cell.batch_size // cell.accumulate}")
    if cell.accumulate > 1:
        labels.append(f"accumulate={cell.accumulate}")
    if config.image_size != "auto":
        labels.append(f"{config.image_size} px")
    if config.precision != "auto":
        labels.append(config.precision)
    if config.optimize not in ("auto", "eager"):
        labels.append(config.optimize)
    if config.optimizer.name != "sgd":
        labels.append(config.optimizer.name)
    strategy = cell.strategy["name"]
    if strategy == config.strategy["name"]:
        choice = groups.choice("strategy", strategy)
        labels += _typed_options(choice, config.strategy, cell.strategy)
    if config.strategy.get(SERVER_NODES, "auto") != "auto":
        labels.append(f"servers on {compress_hosts(cell.server_hosts)}")
    if cell.data:
        labels.append(f"data={cell.data['name']}")
    if cell.cuda_device_max_connections is not None:
        labels.append(f"{CONNECTIONS}={cell.cuda_device_max_connections}")
    if cell.profiler != "none":
        labels.append(f"profiler={cell.profiler}")
    return dataclasses.replace(cell, labels=tuple(labels))


def checked_model(model: Model) -> Model:
    """Return the model; a user's with the name of a built-in one is renamed after its module."""
    if model.library == OWN_MODEL:
        source_file("model.builder", model.builder)
        is_built_in = model.name in groups.choices("model")
        if is_built_in and groups.of_model(model.name, "library") != OWN_MODEL:
            model = dataclasses.replace(model, name=_named_after(model.builder))
    elif re.fullmatch(r"[\w.]+:\w+", model.builder):
        needs = "works only with model.library=python; add it"
        raise Refused(f"model.builder={model.builder}: {needs}")
    else:
        check_name("model.builder", model.builder)
    check_name("model.name", model.name)
    return model


def checked_data(data: Data) -> Data:
    """Return the data; a loader without a name is named after its function. Raises Refused."""
    if data.loader is None:
        typed = ""
        if data.options:
            typed = f"data.options={data.options}"
        elif data.name != Data.name:
            typed = f"data.name={data.name}"
        if typed:
            raise Refused(
                f"{typed}: works only with data.loader, a function of your own (trainers/OWN.md)"
            )
        return data
    source_file("data.loader", data.loader)
    if data.name == Data.name:
        data = dataclasses.replace(data, name=_named_after(data.loader))
    check_name("data.name", data.name)
    return data


def _named_after(dotted: str) -> str:
    """Return `module.name` of a dotted name."""
    return ".".join(dotted.replace(":", ".").split(".")[-2:])


def check_name(option: str, text: str) -> None:
    """Refuse a text that cannot become the name of a folder or of a builder."""
    if not NAME.fullmatch(text):
        raise Refused(
            f"{option}={text!r}: expected 1 to 100 ASCII letters, digits, '.', '_' and '-', "
            "not beginning with '.' or '-'"
        )


def _network(config: Config, sizes: Sizes, device: str) -> Network:
    model, image_size = config.model, config.image_size
    options = dict(model.options)
    if model.inputs == SAMPLES:
        if model.library != OWN_MODEL:
            raise Refused(
                f"model.inputs={SAMPLES}: works only with model.library=python, your own model "
                "(trainers/OWN.md)"
            )
        if image_size != "auto":
            raise Refused(f"image_size={image_size}: works only with model.inputs={IMAGES}")
        for name in OF_IMAGES:
            value = getattr(model, name)
            if value != getattr(Model, name):
                raise Refused(
                    f"model.{name}={value}: works only with model.inputs={IMAGES}; give your "
                    f"own model its arguments as +model.options.{name}={value}"
                )
        return Network(model.name, model.library, model.builder, 0, 0, 0, 0.0, options, SAMPLES)
    if image_size == "auto":
        image_size = sizes.image_size
    if image_size is None:
        where = "gpu" if device == "cuda" else "cpu"
        raise Refused(
            f"model.{where}.image_size: has no value; expected an integer from 8 to 4,096"
        )
    if not model.least_image_size <= image_size <= model.most_image_size:
        bounds = {"least": model.least_image_size, "most": model.most_image_size, "whole": True}
        raise Refused(f"image_size={image_size}: {model.name} needs {accepted(bounds)}")
    if model.library == "torchvision" and model.channels != 3:
        raise Refused(f"model.channels={model.channels}: torchvision's models accept 3")
    copied = ("name", "library", "builder", *OF_IMAGES)
    fields = {name: getattr(model, name) for name in copied}
    return Network(**fields, image_size=int(image_size), options=options)


def _declared_own(config: Config) -> dict[str, dict[str, Any]]:
    own = {}
    if config.model.library == OWN_MODEL:
        own["model"] = ("model.builder", config.model.builder)
    if config.data.loader is not None:
        own["data"] = ("data.loader", config.data.loader)
    declared = {}
    for group, (option, dotted) in own.items():
        declared[group] = {"target": dotted}
        code_hash = sha256_of_foreign_code(option, dotted)
        if code_hash:
            declared[group]["sha256"] = code_hash
    return declared


def server_hosts(
    strategy: Mapping[str, Any], hosts: Sequence[str], sweep_hosts: Sequence[str]
) -> tuple[str, ...]:
    """Return the host of each server of a cell on `hosts`; empty for a strategy without servers.

    `server_nodes=auto` takes the cell's hosts in turn, as MXNet's launch.py does; named hosts are
    taken in turn too, and may have servers only. `sweep_hosts` are those that the sweep may use.
    """
    servers = int(strategy.get("servers", 0))
    named = named_hosts(strategy.get(SERVER_NODES, "auto"))
    typed = f"strategy.{SERVER_NODES}={'+'.join(named)}"
    for name in named:
        if name not in sweep_hosts:
            raise Refused(
                f"{typed}: host {name} is not known; expected auto or hosts of "
                f"{', '.join(sweep_hosts[:8])}"
            )
    if len(named) > servers:
        raise Refused(
            f"{typed}: names {len(named)} hosts; strategy.servers={servers} uses at most {servers}"
        )
    return tuple(itertools.islice(itertools.cycle(named or hosts), servers))


def named_hosts(typed: Any) -> list[str]:
    """Return the hosts that `server_nodes` names, joined by + or as a list; none for auto."""
    if typed == "auto":
        return []
    names = _joined(typed)
    if not names or not all(map(is_name, names)):
        raise Refused(
            f"strategy.{SERVER_NODES}={typed}: expected auto, or names of hosts joined by +"
        )
    return names


def _joined(typed: Any) -> list[str]:
    if isinstance(typed, list | tuple):
        return [str(member) for member in typed]
    return str(typed).split("+")


def server_gpus(
    strategy: Mapping[str, Any],
    gpus: tuple[int, ...],
    device: str,
    all_gpus: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str] = (),
    on: Sequence[str] = (),
) -> tuple[int, ...]:
    """Return the GPU of each server; empty for a strategy without GPU servers, and on CPU workers.

    `all_gpus` are the ids of all GPUs of each host ('' is this machine), `hosts` the hosts of the
    ranks, `on` the host of each server; the last two are empty on this machine. `server_gpus=free`
    takes GPUs outside the subset, in order. Where a host has too few of them, its servers share the
    subset's own.
    """
    bound, workers = strategy.get("max_staleness"), len(gpus) * max(1, len(hosts))
    if bound is not None and bound < workers - 1:
        raise Refused(
            f"strategy.max_staleness={bound}: expected at least {workers - 1}, the number "
            "of other workers: each can push between two pushes of one worker"
        )
    typed = strategy.get("server_gpus")
    if typed is None or device != "cuda":
        return ()
    servers = int(strategy["servers"])
    server_host = list(on) or [""] * servers
    for host, count in Counter(server_host).items():
        if count > len(all_gpus[host]):
            machine = f"host {host}" if host else "this machine"
            raise Refused(
                f"strategy.servers={servers}: expected at most {len(all_gpus[host])}, "
                f"the GPUs of {machine}"
            )
    if typed == "free":
        return _free_gpus(gpus, server_host, all_gpus, hosts or ("",))
    named = _joined(typed)
    are_there = len(named) == servers
    for name, host in zip(named, server_host, strict=False):
        are_there = are_there and name.isdecimal() and int(name) in all_gpus[host]
    if not are_there:
        ids = sorted(set().union(*(all_gpus[host] for host in server_host)))
        example = "+".join(map(str, ids[:servers]))
        raise Refused(
            f"strategy.server_gpus={'+'.join(named)}: expected auto, or one GPU per server "
            f"(strategy.servers={servers}) out of {', '.join(map(str, ids))}, such as {example}"
        )
    return tuple(map(int, named))


def _free_gpus(
    gpus: tuple[int, ...],
    server_host: Sequence[str],
    all_gpus: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str],
) -> tuple[int, ...]:
    """Return a GPU for each server: outside the subset, or in turn inside if these are too few."""
    servers_on = Counter(server_host)
    placed: Counter[str] = Counter()
    chosen = []
    for host in server_host:
        candidates = all_gpus[host]
        if host in hosts:
            candidates = tuple(gpu for gpu in all_gpus[host] if gpu not in gpus)
        if len(candidates) < servers_on[host]:
            candidates = gpus
        chosen.append(candidates[placed[host] % len(candidates)])
        placed[host] += 1
    return tuple(chosen)
