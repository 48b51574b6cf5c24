"""From a composed configuration to a cell: every knob is checked, then every `auto` is resolved for a GPU subset."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from conf import nccl
from conf.cell import Cell, Network
from conf.options import Refused, accepted, check, check_fields, check_names, closest
from conf.schema import Config, Optimizer
from conf.servers import placed

ROOT = Path(__file__).parent
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def checked(config: Config) -> tuple[Config, list[str]]:
    """Check every knob and translate legacy NCCL numbers. Returns the configuration and notices for the user.

    Raises:
        Refused: the first knob that is wrong, with its value and what is accepted.
    """
    check_names("", config)
    settings, notices = nccl.normalised(config.nccl)
    config = dataclasses.replace(config, nccl=settings)
    check_fields("", config)
    for name, text in (
        ("study", config.study),  # these become names of folders or modules
        ("model.name", config.model.name),
        ("model.builder", config.model.builder),
    ):
        if not NAME.fullmatch(text):
            raise Refused(
                f"{name}={text!r}: accepted are 1 to 100 ASCII letters, digits, '.', '_' and '-', not first '.' or '-'"
            )
    for name, path in (
        ("output_dir", config.output_dir),
        ("tracking.uri", config.tracking.uri),
        ("tracking.experiment", config.tracking.experiment),
    ):
        if path is not None and (not path.strip() or not path.isprintable() or len(path) > 1000):
            raise Refused(f"{name}={path!r}: accepted is printable text of 1 to 1000 characters")
    if any(len(part.encode()) > 255 for part in config.output_dir.split("/")):
        raise Refused(f"output_dir={config.output_dir}: accepted are folders whose names have at most 255 bytes")
    return dataclasses.replace(
        config,
        strategy=options("strategy", config.strategy),
        benchmark=options("benchmark", config.benchmark),
        profiler=options("profiler", config.profiler),
    ), notices


def _choice(group: str, name: Any) -> None:
    """Refuse a `group.name` that has no YAML in its group."""
    choices = sorted(path.stem for path in (ROOT / group).glob("*.yaml"))
    if name not in choices:
        raise Refused(f"{group}.name={name}: accepted are {', '.join(choices)}{closest(str(name), choices)}")


# What the YAML of a strategy, benchmark or profiler says beside its options.
RULES = ("accepts", "conflicts", "shared_memory", "trains")


@functools.cache
def _written(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options with their defaults, RULES that are there) of a strategy's, benchmark's or profiler's YAML."""
    declared = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(ROOT / group / f"{name}.yaml")))
    return declared, {rule: declared.pop(rule) for rule in RULES if rule in declared}


def _declared(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """(options with their defaults, what each accepts, values that exclude each other)."""
    declared, rules = _written(group, name)
    return declared, rules.get("accepts", {}), rules.get("conflicts", [])


def takes_shared_memory(strategy: str) -> bool:
    """Whether a strategy's YAML says that it takes memory in /dev/shm."""
    return bool(_written("strategy", strategy)[1].get("shared_memory", False))


def trains(benchmark: str) -> bool:
    """Whether a benchmark has a model and a strategy; its YAML says `trains: false` where it measures links alone."""
    return bool(_written("benchmark", benchmark)[1].get("trains", True))


def options(group: str, given: Any) -> dict[str, Any]:
    """The options of a strategy, benchmark or profiler, held to the types and the `accepts` of its own YAML.

    Raises:
        Refused: an unknown option, another type than the YAML's default has, or a value outside `accepts`.
    """
    if not isinstance(given, Mapping):
        raise Refused(f"{group}={given}: accepted is {group}=NAME and {group}.OPTION=value")
    name = given.get("name")
    _choice(group, name)
    declared, accepts, conflicts = _declared(group, str(name))
    for option, value in given.items():
        if option in RULES:
            continue
        full = f"{group}.{option}"
        if option not in declared:
            raise Refused(f"{full}={value}: {name} has the options {', '.join(declared)}{closest(option, declared)}")
        default, limits = declared[option], accepts.get(option, {})
        limits = {"whole": isinstance(default, int), **limits}
        if isinstance(default, bool) and not isinstance(value, bool):
            raise Refused(f"{full}={value}: accepted are true and false")
        if value is None and default is not None:
            raise Refused(f"{full}=null: accepted is {accepted(limits) or f'a value like {default}'}")
        if limits.get("text") and not isinstance(value, str | None):
            raise Refused(f"{full}={value}: accepted is a text")
        check(full, value, limits)
    if missing := [option for option in declared if option not in given]:
        raise Refused(f"{group}.{missing[0]}: has no value; accepted is for instance {declared[missing[0]]}")
    for conflict in conflicts:
        if all(given[option] == value for option, value in conflict.items()):
            first, *others = (f"{group}.{option}={value}" for option, value in conflict.items())
            raise Refused(f"{first}: accepted without {', '.join(others)}")
    return {option: value for option, value in given.items() if option not in RULES}


def resolve(
    config: Config, gpus: tuple[int, ...], device: str, repeat: int = 0, everyone: tuple[int, ...] | None = None
) -> Cell:
    """Resolve every `auto` for a subset on a kind of device ('cpu' or 'cuda'); `everyone` are the machine's GPUs.

    Raises:
        Refused: `global_batch_size` does not divide, the precision needs a GPU, or the strategy's servers do not fit.
    """
    if not trains(config.benchmark["name"]):
        return _without_training(config, gpus, device, repeat)
    model, sizes = config.model, config.model.gpu if device == "cuda" else config.model.cpu
    batch_size = sizes.batch_size if config.batch_size == "auto" else config.batch_size
    global_batch_size = config.global_batch_size
    if global_batch_size == "auto":
        shared = _shared_by_all(len(everyone or gpus))
        global_batch_size = max(sizes.batch_size // shared, 1) * shared
    if global_batch_size is not None:
        if config.batch_size != "auto":
            raise Refused(
                f"global_batch_size={global_batch_size}: accepted alone, not beside batch_size={config.batch_size}"
            )
        batch_size, rest = divmod(int(global_batch_size), len(gpus))
        if rest or not batch_size:
            raise Refused(
                f"global_batch_size={global_batch_size}: accepted is a multiple of the {len(gpus)} GPUs of "
                f"gpus={','.join(map(str, gpus))}"
            )
    image_size = sizes.image_size if config.image_size == "auto" else config.image_size
    if device == "cpu" and config.precision in ("tf32", "fp16"):
        raise Refused(
            f"precision={config.precision}: needs a GPU; accepted on CPU workers are auto, fp32, bf16 and bf16_weights"
        )
    if not model.least_image_size <= image_size <= model.most_image_size:
        asked = accepted({"least": model.least_image_size, "most": model.most_image_size, "whole": True})
        raise Refused(f"image_size={image_size}: {model.name} accepts {asked}")
    if model.library == "torchvision" and model.channels != 3:
        raise Refused(f"model.channels={model.channels}: torchvision's models accept 3")
    precision = ("bf16" if device == "cuda" else "fp32") if config.precision == "auto" else config.precision
    accepts = _declared("strategy", config.strategy["name"])[1]
    for field, value in (("precision", precision), ("benchmark", config.benchmark["name"])):
        if value in accepts.get(field, {}).get("refused", ()):
            raise Refused(f"{field}={value}: accepted with other strategies than {config.strategy['name']}")
    if device == "cpu":
        for option, limits in accepts.items():
            if config.strategy.get(option) in limits.get("gpu_only", ()):
                raise Refused(f"strategy.{option}={config.strategy[option]}: accepted on GPUs only, not on CPU workers")
    nhwc = device == "cuda" if config.channels_last == "auto" else config.channels_last in (True, "True")
    return Cell(
        model=Network(
            model.name, model.library, model.builder, model.channels, model.classes, int(image_size),
            model.auxiliary_weight, dict(model.options),
        ),
        strategy=dict(config.strategy),
        benchmark=dict(config.benchmark),
        nccl=nccl.environment(config.nccl),
        optimizer=config.optimizer,
        profiler=config.profiler["name"],
        profiler_options=_traced(config.profiler),
        gpus=gpus,
        device=device,
        batch_size=int(batch_size),
        global_batch_size=None if global_batch_size is None else int(global_batch_size),
        precision=precision,
        optimize="eager" if config.optimize == "auto" else config.optimize,
        channels_last=nhwc,
        seed=config.seed,
        repeat=repeat,
        labels=_labels(config, global_batch_size),
        server_gpus=placed(config.strategy, gpus, device, everyone or gpus),
    )  # fmt: skip


def _shared_by_all(count: int) -> int:
    """The least number that 1, 2, 4, … and all `count` GPUs divide."""
    return math.lcm(1 << (count.bit_length() - 1), count)


def _without_training(config: Config, gpus: tuple[int, ...], device: str, repeat: int) -> Cell:
    """A cell that measures links: whatever model or strategy stands beside it, it is the same cell."""
    defaults = _declared("benchmark", config.benchmark["name"])[0]
    return Cell(
        model=Network("none", "ringside", "none", 0, 0, 0, 0.0, {}),
        strategy={"name": "none"},
        benchmark=dict(config.benchmark),
        nccl=nccl.environment(config.nccl),
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
        repeat=repeat,
        labels=tuple(f"{name}={value}" for name, value in config.benchmark.items() if value != defaults[name]),
    )


# What a benchmark that trains nothing has no use for.
TRAINING = (
    "model", "strategy", "optimizer", "batch_size", "global_batch_size", "image_size", "precision", "optimize",
    "channels_last", "profiler",
)  # fmt: skip


def without_effect(benchmark: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a request that a benchmark which trains nothing has no use for."""
    if trains(benchmark):
        return []
    asked = {text: text.lstrip("+").partition("=")[0].partition(".")[0].partition("@")[0] for text in overrides}
    return [text for text, group in asked.items() if group in TRAINING]


def _traced(profiler: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of a trace; where the profiler lies on this machine is not."""
    if profiler["name"] == "none":
        return {}
    return {name: value for name, value in profiler.items() if name not in ("name", "nsys_path")}


def _labels(config: Config, global_batch_size: int | str | None) -> tuple[str, ...]:
    """What was asked beside the defaults: 'batch 512', 'compile', 'comm_hook=bf16'."""
    defaults = _declared("strategy", config.strategy["name"])[0]
    labels = [
        f"global batch {global_batch_size}" if global_batch_size else "",
        f"batch {config.batch_size}" if config.batch_size != "auto" else "",
        f"{config.image_size} px" if config.image_size != "auto" else "",
        config.precision if config.precision != "auto" else "",
        config.optimize if config.optimize == "compile" else "",
        *(f"{name}={value}" for name, value in config.strategy.items() if value != defaults[name]),
        f"profiler={config.profiler['name']}" if config.profiler["name"] != "none" else "",
    ]
    return tuple(label for label in labels if label)
