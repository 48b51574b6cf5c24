"""From a composed configuration to a cell: every option is checked, then every `auto` is resolved for a GPU subset."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from conf import nccl
from conf.cell import Cell, Network
from conf.groups import declared, options, trains
from conf.options import Refused, accepted, check_fields, check_names
from conf.schema import Config, Optimizer
from conf.servers import placed

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def checked(config: Config) -> tuple[Config, list[str]]:
    """Check every option and translate legacy NCCL numbers. Returns the configuration and notices for the user.

    Raises:
        Refused: the first option that is wrong, with its value and what is accepted.
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
    accepts = declared("strategy", config.strategy["name"])[1]
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
    defaults = declared("benchmark", config.benchmark["name"])[0]
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
    defaults = declared("strategy", config.strategy["name"])[0]
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
