"""From a composed configuration to a cell: check every option, then resolve every `auto` for a GPU subset."""

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf import groups, nccl
from conf.cell import GRAPHED, IMAGES, SAMPLES, Cell, Network, Optimizer, compress_hosts
from conf.groups import SERVER_NODES
from conf.options import Refused, accepted, check_fields, check_names, to_text
from conf.schema import Config, Data, Model, OptimizerOptions, Sizes
from conf.subsets import is_name
from conf.targets import sha256_of_foreign_code, source_file


@dataclass
class CheckedConfig(Config):
    """A configuration whose every option was checked. Of NCCL's settings only the variables are left, in `nccl_variables`."""

    nccl_variables: dict[str, str] = field(default_factory=dict)


def checked(config: Config) -> tuple[CheckedConfig, list[str]]:
    """Check every option. Return the configuration and notices for the user.

    Raises:
        Refused: the first option that is wrong, with its value and what is accepted.
    """
    variables, notices = nccl.settings(config.nccl)
    check_names("", config)
    config = dataclasses.replace(config, nccl=nccl.Nccl())
    check_fields("", config)
    config = dataclasses.replace(
        config, model=checked_model(config.model), data=checked_data(config.data)
    )
    _check_names_of_folders(config)
    known = {one.name: getattr(config, one.name) for one in dataclasses.fields(Config)}
    known |= {
        group: groups.options(group, known[group])
        for group in ("strategy", "benchmark", "profiler")
    }
    return CheckedConfig(**known, nccl_variables=variables), notices


def _check_names_of_folders(config: Config) -> None:
    """Refuse texts that cannot be names of a study, a folder or a tracking store."""
    check_name("study", config.study)
    for name, path in (
        ("output_dir", config.output_dir),
        ("tracking.uri", config.tracking.uri),
        ("tracking.experiment", config.tracking.experiment),
    ):
        if path is not None and (not path.strip() or not path.isprintable() or len(path) > 1000):
            raise Refused(f"{name}={path!r}: accepted is printable text of 1 to 1000 characters")
    if any(len(part.encode()) > 255 for part in config.output_dir.split("/")):
        raise Refused(
            f"output_dir={config.output_dir}: accepted are folders whose names have at most 255 bytes"
        )


def resolve(
    config: CheckedConfig,
    gpus: tuple[int, ...],
    device: str,
    all_gpus: Mapping[str, tuple[int, ...]] | None = None,
    hosts: tuple[str, ...] = (),
) -> Cell:
    """Return the cell of a configuration on one subset: every `auto` is resolved for a kind of device, cpu or cuda.

    The subset is on each of `hosts`; without them on this machine. `all_gpus` are the ids of all GPUs of every host that the
    sweep may use ('' is this machine); without it, those of the subset.

    Raises:
        Refused: options that do not fit the subset, the hosts, the device or each other.
    """
    benchmark = groups.choice("benchmark", config.benchmark["name"])
    ranks = len(gpus) * max(1, len(hosts))
    options = groups.resolved("benchmark", _calibrated(config, benchmark), device, ranks)
    common = _Common(options, dict(config.nccl_variables), gpus, hosts, device, config.seed)
    if not benchmark.trains:
        return _without_training(config, benchmark, common)
    return _training(
        config, benchmark, common, ranks, all_gpus or dict.fromkeys(hosts or ("",), gpus)
    )


def _calibrated(config: Config, benchmark: groups.GroupChoice) -> dict[str, Any]:
    """Return the options of the benchmark; predict=auto calibrates whole where nobody says how much."""
    may_be_whole = "all" in benchmark.accepts.get("calibrate", {}).get("words", ())
    if config.predict != "auto" or not may_be_whole or config.benchmark["calibrate"] != "auto":
        return dict(config.benchmark)
    return {**config.benchmark, "calibrate": "all"}


@dataclass(frozen=True)
class _Common:
    """The fields of a cell that do not depend on whether it trains."""

    benchmark: dict[str, Any]
    nccl: dict[str, str]
    gpus: tuple[int, ...]
    hosts: tuple[str, ...]
    device: str
    seed: int

    def fields(self) -> dict[str, Any]:
        """Return them as arguments of Cell."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


def _training(
    config: CheckedConfig,
    benchmark: groups.GroupChoice,
    common: _Common,
    ranks: int,
    all_gpus: Mapping[str, tuple[int, ...]],
) -> Cell:
    """Return a cell with a model and a strategy. Raises Refused."""
    strategy = groups.choice("strategy", config.strategy["name"])
    device, gpus, hosts = common.device, common.gpus, common.hosts
    sizes = config.model.gpu if device == "cuda" else config.model.cpu
    global_batch_size = _global_batch_size(config, sizes, sum(map(len, all_gpus.values())))
    options = groups.resolved("strategy", config.strategy, device, ranks)
    precision = _precision(config, device)
    _check_together(strategy, options, precision, common)
    optimize = _optimize(config, strategy, options, precision, device)
    on = server_hosts(config.strategy, hosts, [*all_gpus]) if hosts else ()
    cell = Cell(
        **common.fields(),
        model=network(config, sizes, device),
        strategy=options,
        optimizer=_optimizer(config.optimizer),
        profiler=config.profiler["name"],
        profiler_options=_traced(config.profiler),
        batch_size=_batch_size(config, sizes, global_batch_size, common, ranks),
        global_batch_size=global_batch_size,
        precision=precision,
        optimize=optimize,
        channels_last=channels_last(config, device),
        data=data_of(config.data),
        server_gpus=server_gpus(options, gpus, device, all_gpus, hosts, on),
        server_hosts=on,
        declared={
            "strategy": strategy.declared(),
            "benchmark": benchmark.declared(),
            **declared_own(config),
        },
    )
    return labelled(cell, config)


def _global_batch_size(config: Config, sizes: Sizes, all_gpus: int) -> int | None:
    """Return the images per step over all ranks, None for weak scaling; `all_gpus` is the number of all GPUs. Raises Refused."""
    images = config.global_batch_size
    if images is None:
        return None
    if images == "auto":
        shared = math.lcm(
            1 << (all_gpus.bit_length() - 1), all_gpus
        )  # 1, 2, 4, … and all GPUs divide it
        images = max(sizes.batch_size // shared, 1) * shared
    if config.batch_size != "auto":
        raise Refused(
            f"global_batch_size={images}: accepted alone, not together with batch_size={config.batch_size}"
        )
    return int(images)


def _batch_size(
    config: Config, sizes: Sizes, global_batch_size: int | None, common: _Common, ranks: int
) -> int:
    """Return the images per rank and step. Raises Refused where the global batch cannot be divided."""
    if global_batch_size is None:
        return int(sizes.batch_size if config.batch_size == "auto" else config.batch_size)
    batch_size, rest = divmod(global_batch_size, ranks)
    if rest or not batch_size:
        where = f"gpus={','.join(map(str, common.gpus))}" + (
            f" on {len(common.hosts)} hosts" if common.hosts else ""
        )
        raise Refused(
            f"global_batch_size={global_batch_size}: accepted is a multiple of the {ranks} ranks of {where}"
        )
    return batch_size


# What `auto` means for the settings that each optimizer has: torch's own, and for sgd those of the published recipes.
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.01, "weight_decay": 5e-5, "momentum": 0.9},
    "adamw": {
        "learning_rate": 0.001,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
    },
}


def _optimizer(options: OptimizerOptions) -> Optimizer:
    """Return the optimizer of a cell. Raises Refused for a setting that it does not have."""
    usual, found = OPTIMIZERS[options.name], Optimizer(name=options.name)
    typed = {
        name: value for name, value in vars(options).items() if name != "name" and value != "auto"
    }
    for name, value in typed.items():
        if name not in usual:
            others = " or ".join(
                other for other, settings in OPTIMIZERS.items() if name in settings
            )
            raise Refused(f"optimizer.{name}={value}: accepted with optimizer.name={others}")
    values: dict[str, Any] = {name: float(typed.get(name, value)) for name, value in usual.items()}
    return dataclasses.replace(found, **values)


def _precision(config: Config, device: str) -> str:
    """Return the arithmetic. Raises Refused where it needs a GPU."""
    if device == "cpu" and config.precision in ("tf32", "fp16"):
        raise Refused(
            f"precision={config.precision}: needs a GPU; accepted on CPU workers are auto, fp32, bf16 and bf16_weights"
        )
    if config.precision == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return config.precision


def _optimize(
    config: CheckedConfig,
    strategy: groups.GroupChoice,
    options: Mapping[str, Any],
    precision: str,
    device: str,
) -> str:
    """Return how steps are made fast. Raises Refused where no CUDA graph can hold them."""
    if config.optimize not in GRAPHED:
        return "eager" if config.optimize == "auto" else config.optimize
    why = "CUDA graphs need GPUs" if device == "cpu" else strategy.why_no_graph(options)
    if precision == "fp16":
        why = "the loss scaler of precision=fp16 leaves out some steps"
    if why:
        raise Refused(
            f"optimize={config.optimize}: {why}; accepted here are eager, compile and max"
        )
    return config.optimize


def _check_together(
    strategy: groups.GroupChoice, options: Mapping[str, Any], precision: str, common: _Common
) -> None:
    """Refuse what the strategy's YAML says does not go with it, or only on GPUs."""
    for name, value in (("precision", precision), ("benchmark", common.benchmark["name"])):
        if value in strategy.accepts.get(name, {}).get("refused", ()):
            raise Refused(f"{name}={value}: accepted with other strategies than {strategy.name}")
    for name, limits in strategy.accepts.items() if common.device == "cpu" else ():
        if options.get(name) in limits.get("gpu_only", ()):
            raise Refused(
                f"strategy.{name}={options[name]}: accepted on GPUs only, not on CPU workers"
            )


def _without_training(
    config: CheckedConfig, benchmark: groups.GroupChoice, common: _Common
) -> Cell:
    """Return a cell that measures links: it is the same cell with any model and strategy."""
    return Cell(
        **common.fields(),
        model=Network("none", "ringside", "none", 0, 0, 0, 0.0, {}),
        strategy={"name": "none"},
        optimizer=Optimizer(),
        profiler="none",
        batch_size=0,
        global_batch_size=None,
        precision="fp32",
        optimize="eager",
        channels_last=False,
        labels=tuple(_typed_options(benchmark, config.benchmark, common.benchmark)),
        declared={"benchmark": benchmark.declared()},
    )


# The options that do nothing in a benchmark which trains nothing.
TRAINING = (
    "model", "data", "strategy", "optimizer", "batch_size", "global_batch_size", "image_size", "precision", "optimize",
    "channels_last", "profiler",
)  # fmt: skip


def without_effect(benchmark: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a request that do nothing because its benchmark trains nothing."""
    if groups.choice("benchmark", benchmark).trains:
        return []
    typed = {
        text: text.lstrip("+").partition("=")[0].partition(".")[0].partition("@")[0]
        for text in overrides
    }
    return [text for text, group in typed.items() if group in TRAINING]


def _traced(profiler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a trace, without the path of the profiler on this machine."""
    if profiler["name"] == "none":
        return {}
    return {name: value for name, value in profiler.items() if name not in ("name", "nsys_path")}


def _typed_options(
    choice: groups.GroupChoice, typed: Mapping[str, Any], resolved: Mapping[str, Any]
) -> list[str]:
    """Return 'name=value' for each option that differs from the default of its YAML."""
    defaults = choice.options
    return [
        f"{name}={to_text(resolved[name])}"
        for name, value in typed.items()
        if name in resolved and value not in (defaults[name], "auto")
    ]


def labelled(cell: Cell, config: Config) -> Cell:
    """Return a cell that trains, made from a configuration, with its labels.

    They are what the configuration asks for besides the defaults, as the cell has it, for people: 'batch 512', 'compile',
    'comm_hook=bf16'. No code reads them.
    """
    strategy = cell.strategy["name"]
    is_same_strategy = strategy == config.strategy["name"]
    with_batch = config.batch_size != "auto" or (
        config.global_batch_size is not None and not cell.global_batch_size
    )
    labels = [
        f"global batch {cell.global_batch_size}" if cell.global_batch_size else "",
        f"batch {cell.batch_size}" if with_batch else "",
        f"{config.image_size} px" if config.image_size != "auto" else "",
        config.precision if config.precision != "auto" else "",
        config.optimize if config.optimize not in ("auto", "eager") else "",
        config.optimizer.name if config.optimizer.name != "sgd" else "",
        *(
            _typed_options(groups.choice("strategy", strategy), config.strategy, cell.strategy)
            if is_same_strategy
            else ()
        ),
        f"servers on {compress_hosts(cell.server_hosts)}"
        if config.strategy.get(groups.SERVER_NODES, "auto") != "auto"
        else "",
        f"data={cell.data['name']}" if cell.data else "",
        f"profiler={cell.profiler}" if cell.profiler != "none" else "",
    ]
    return dataclasses.replace(cell, labels=tuple(label for label in labels if label))


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def checked_model(model: Model) -> Model:
    """Return the model; one of the user's own module is named after it where it still has the name of a model of ours.

    Raises:
        Refused: a name that no library can have, or a builder that Python does not find.
    """
    if model.library == "python":
        source_file("model.builder", model.builder)
        if (
            model.name in groups.choices("model")
            and groups.of_model(model.name, "library") != "python"
        ):
            model = dataclasses.replace(model, name=_named_after(model.builder))
    else:
        check_name("model.builder", model.builder)
    check_name("model.name", model.name)
    return model


def checked_data(data: Data) -> Data:
    """Return the data; a loader without a name is named after its function. Raises Refused: Python does not find it."""
    if data.loader is None:
        if data.options or data.name != Data.name:
            typed = f"data.options={data.options}" if data.options else f"data.name={data.name}"
            raise Refused(
                f"{typed}: accepted with data.loader, a function of your own (trainers/OWN.md)"
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
            f"{option}={text!r}: accepted are 1 to 100 ASCII letters, digits, '.', '_' and '-', not first '.' or '-'"
        )


def network(config: Config, sizes: Sizes, device: str) -> Network:
    """Return the model with its image size. Raises Refused where its layers do not accept the images."""
    model = config.model
    if model.inputs == SAMPLES:
        return _of_samples(config)
    image_size = sizes.image_size if config.image_size == "auto" else config.image_size
    if image_size is None:
        where = "gpu" if device == "cuda" else "cpu"
        raise Refused(
            f"model.{where}.image_size: has no value; accepted is a whole number of at least 8 and at most 4096"
        )
    if not model.least_image_size <= image_size <= model.most_image_size:
        bounds = accepted(
            {"least": model.least_image_size, "most": model.most_image_size, "whole": True}
        )
        raise Refused(f"image_size={image_size}: {model.name} accepts {bounds}")
    if model.library == "torchvision" and model.channels != 3:
        raise Refused(f"model.channels={model.channels}: torchvision's models accept 3")
    return Network(
        model.name, model.library, model.builder, model.channels, model.classes, int(image_size),
        model.auxiliary_weight, dict(model.options),
    )  # fmt: skip


def _of_samples(config: Config) -> Network:
    """Return a model that makes its own batches. Raises Refused where the request says something about images."""
    model, without = config.model, Model()
    if model.library != "python":
        raise Refused(
            f"model.inputs={SAMPLES}: accepted with model.library=python, a model of your own (trainers/OWN.md)"
        )
    if config.image_size != "auto":
        raise Refused(f"image_size={config.image_size}: accepted with model.inputs={IMAGES} only")
    for name in ("channels", "classes", "auxiliary_weight"):
        if getattr(model, name) != getattr(without, name):
            raise Refused(
                f"model.{name}={getattr(model, name)}: accepted with model.inputs={IMAGES} only; what your own model takes "
                f"stands in model.options"
            )
    return Network(
        model.name, model.library, model.builder, 0, 0, 0, 0.0, dict(model.options), SAMPLES
    )


def channels_last(config: Config, device: str) -> bool:
    """Return whether tensors are NHWC."""
    if config.channels_last == "auto":
        return device == "cuda" and config.model.inputs == IMAGES
    return config.channels_last in (True, "True")


def data_of(data: Data) -> dict[str, Any]:
    """Return the data as a cell has it; empty without a loader."""
    return dataclasses.asdict(data) if data.loader is not None else {}


def declared_own(config: Config) -> dict[str, dict[str, Any]]:
    """Return the hashes of the files that define the user's own model and loader, by group; empty where there are none."""
    own = {"model": config.model.builder} if config.model.library == "python" else {}
    own |= {} if config.data.loader is None else {"data": config.data.loader}
    fields = {"model": "model.builder", "data": "data.loader"}
    declared = {}
    for group, dotted in own.items():
        code_hash = sha256_of_foreign_code(fields[group], dotted)
        declared[group] = {"target": dotted} | ({"sha256": code_hash} if code_hash else {})
    return declared


def server_hosts(
    strategy: Mapping[str, Any], hosts: Sequence[str], known: Sequence[str]
) -> tuple[str, ...]:
    """Return the host of each server of a cell on `hosts`; empty for a strategy without servers.

    `server_nodes=auto` takes the cell's hosts in turn, as MXNet's launch.py does; named hosts are taken in turn too, and may have
    servers only. `known` are all hosts that the sweep may use.

    Raises:
        Refused: text that names no hosts, an unknown host, or more hosts than servers.
    """
    servers, asked = int(strategy.get("servers", 0)), strategy.get(SERVER_NODES, "auto")
    chosen = list(hosts) if asked == "auto" else named_hosts(asked)
    typed = f"strategy.{SERVER_NODES}={'+'.join(chosen)}"
    if unknown := next((name for name in chosen if name not in known), None):
        raise Refused(
            f"{typed}: host {unknown} is not known; accepted are auto and hosts of {', '.join(known[:8])}"
        )
    if asked != "auto" and len(chosen) > servers:
        raise Refused(
            f"{typed}: names {len(chosen)} hosts; accepted with strategy.servers={servers} are at most {servers}"
        )
    return tuple(itertools.islice(itertools.cycle(chosen), servers))


def named_hosts(asked: Any) -> list[str]:
    """Return the hosts that `server_nodes` names, joined by + or as a list; none for auto. Raises Refused."""
    if asked == "auto":
        return []
    names = (
        [str(one) for one in asked] if isinstance(asked, list | tuple) else str(asked).split("+")
    )
    if not names or not all(map(is_name, names)):
        raise Refused(
            f"strategy.{SERVER_NODES}={asked}: accepted are auto, or names of hosts joined by +"
        )
    return names


def server_gpus(
    strategy: Mapping[str, Any],
    gpus: tuple[int, ...],
    device: str,
    all_gpus: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str] = (),
    on: Sequence[str] = (),
) -> tuple[int, ...]:
    """Return the GPU of each server; empty for a strategy without GPU servers, and on CPU workers.

    `all_gpus` are the ids of all GPUs of each host ('' is this machine), `hosts` the hosts of the ranks, `on` the host of each
    server; the last two are empty on this machine. `server_gpus=free` takes GPUs outside the subset, in order. Where a host has
    too few of them, its servers share the subset's own.

    Raises:
        Refused: more GPU servers than GPUs, an unknown GPU, or a bound on staleness that no order of updates can keep.
    """
    bound, workers = strategy.get("max_staleness"), len(gpus) * max(1, len(hosts))
    if bound is not None and bound < workers - 1:
        raise Refused(
            f"strategy.max_staleness={bound}: accepted is at least {workers - 1}: where {workers} workers push in turn, "
            f"each sees {workers - 1} updates of the others"
        )
    wanted = strategy.get("server_gpus")
    if wanted is None or device != "cuda":
        return ()
    servers = int(strategy["servers"])
    places = [*on] or [""] * servers
    for host, number in Counter(places).items():
        if number > len(all_gpus[host]):
            there = f"the GPUs of {f'host {host}' if host else 'this machine'}"
            raise Refused(
                f"strategy.servers={servers}: accepted on GPUs is at most {len(all_gpus[host])}, {there}"
            )
    if wanted == "free":
        return tuple(_free(gpus, places, all_gpus, hosts or ("",)))
    named = (
        [str(gpu) for gpu in wanted] if isinstance(wanted, list | tuple) else str(wanted).split("+")
    )
    are_there = [
        gpu.isdecimal() and int(gpu) in all_gpus[host]
        for gpu, host in zip(named, places, strict=False)
    ]
    if len(named) != servers or not all(are_there):
        ids = sorted({gpu for host in places for gpu in all_gpus[host]})
        raise Refused(
            f"strategy.server_gpus={'+'.join(named)}: accepted are auto, or {servers} of {', '.join(map(str, ids))} "
            f"joined by +, one for each of strategy.servers={servers}"
        )
    return tuple(int(name) for name in named)


def _free(
    gpus: tuple[int, ...],
    places: Sequence[str],
    all_gpus: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str],
) -> Iterator[int]:
    """Yield a GPU for each server: on its host one outside the subset, or one of the subset in turn if these are too few."""
    numbers: dict[str, int] = defaultdict(int)  # of servers that each host has so far
    wanted = Counter(places)
    for host in places:
        free = [gpu for gpu in all_gpus[host] if host not in hosts or gpu not in gpus]
        chosen = free if len(free) >= wanted[host] else gpus
        yield chosen[numbers[host] % len(chosen)]
        numbers[host] += 1
