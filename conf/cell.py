"""A cell: one point of a study with every `auto` resolved. It is what a worker measures and what a record answers."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from conf import nccl
from conf.knobs import Refused, accepted, check, check_fields, check_names, closest
from conf.schema import Config, Optimizer

ROOT = Path(__file__).parent
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Network:
    """The model of a cell: `builder` of `library`, with the sizes that were resolved."""

    name: str
    library: str
    builder: str
    channels: int
    classes: int
    image_size: int  # pixels of a side
    auxiliary_weight: float
    options: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One point: model × strategy × GPU subset × NCCL settings × …; equal cells have equal keys."""

    model: Network
    strategy: dict[str, Any]  # name and options
    benchmark: dict[str, Any]  # name and options
    nccl: dict[str, str]  # environment variables asked for
    optimizer: Optimizer
    profiler: str
    gpus: tuple[int, ...]  # in rank order
    device: str  # cpu or cuda
    batch_size: int  # images per rank and step
    global_batch_size: int | None  # where it was asked for (strong scaling)
    precision: str
    optimize: str
    channels_last: bool
    seed: int
    repeat: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.gpus)

    @property
    def key(self) -> str:
        """16 hexadecimal digits: SHA-256 over everything that was asked, in a canonical form."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """`resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC`: what was asked, for people."""
        parts = [self.model.name, self.strategy["name"], "gpus " + ",".join(map(str, self.gpus))]
        if self.benchmark["name"] != "throughput":
            parts.insert(0, self.benchmark["name"])
        parts += [f"{name.removeprefix('NCCL_')}={value}" for name, value in sorted(self.nccl.items())]
        return " · ".join(parts)

    @property
    def folder(self) -> str:
        """The name of its folder: readable, safe, unique by its key."""
        gpus = "-".join(map(str, self.gpus))
        return f"{self.model.name}-{self.strategy['name']}-gpus{gpus}-{self.key[:10]}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**dataclasses.asdict(self), "gpus": list(self.gpus)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Cell":
        """The inverse of to_dict. Raises TypeError or KeyError where a field is missing or unknown."""
        nested = {"model": Network(**plain["model"]), "optimizer": Optimizer(**plain["optimizer"])}
        return Cell(**{**plain, **nested, "gpus": tuple(plain["gpus"])})


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
    _choice("profiler", config.profiler.name)
    return dataclasses.replace(
        config,
        strategy=options("strategy", config.strategy),
        benchmark=options("benchmark", config.benchmark),
    ), notices


def _choice(group: str, name: Any) -> None:
    """Refuse a `group.name` that has no YAML in its group."""
    choices = sorted(path.stem for path in (ROOT / group).glob("*.yaml"))
    if name not in choices:
        raise Refused(f"{group}.name={name}: accepted are {', '.join(choices)}{closest(str(name), choices)}")


def options(group: str, given: Any) -> dict[str, Any]:
    """The options of a strategy or benchmark, held to the types and the `accepts` of its own YAML.

    Raises:
        Refused: an unknown option, another type than the YAML's default has, or a value outside `accepts`.
    """
    if not isinstance(given, Mapping):
        raise Refused(f"{group}={given}: accepted is {group}=NAME and {group}.OPTION=value")
    name = given.get("name")
    _choice(group, name)
    declared = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(ROOT / group / f"{name}.yaml")))
    accepts = declared.pop("accepts", {})
    for option, value in given.items():
        if option == "accepts":
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
        check(full, value, limits)
    if missing := [option for option in declared if option not in given]:
        raise Refused(f"{group}.{missing[0]}: has no value; accepted is for instance {declared[missing[0]]}")
    return {option: value for option, value in given.items() if option != "accepts"}


def resolve(config: Config, gpus: tuple[int, ...], device: str, repeat: int = 0) -> Cell:
    """Resolve every `auto` for a subset on a kind of device ('cpu' or 'cuda').

    Raises:
        Refused: `global_batch_size` does not divide, or the precision needs a GPU.
    """
    model, sizes = config.model, config.model.gpu if device == "cuda" else config.model.cpu
    batch_size = sizes.batch_size if config.batch_size == "auto" else config.batch_size
    if config.global_batch_size is not None:
        if config.batch_size != "auto":
            raise Refused(
                f"global_batch_size={config.global_batch_size}: accepted alone, not beside batch_size={config.batch_size}"
            )
        batch_size, rest = divmod(config.global_batch_size, len(gpus))
        if rest or not batch_size:
            raise Refused(
                f"global_batch_size={config.global_batch_size}: accepted is a multiple of the {len(gpus)} GPUs of "
                f"gpus={','.join(map(str, gpus))}"
            )
    image_size = sizes.image_size if config.image_size == "auto" else config.image_size
    if device == "cpu" and config.precision in ("tf32", "fp16"):
        raise Refused(
            f"precision={config.precision}: needs a GPU; accepted on CPU workers are auto, fp32, bf16 and bf16_weights"
        )
    precision = ("bf16" if device == "cuda" else "fp32") if config.precision == "auto" else config.precision
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
        profiler=config.profiler.name,
        gpus=gpus,
        device=device,
        batch_size=int(batch_size),
        global_batch_size=config.global_batch_size,
        precision=precision,
        optimize="eager" if config.optimize == "auto" else config.optimize,
        channels_last=nhwc,
        seed=config.seed,
        repeat=repeat,
    )  # fmt: skip
