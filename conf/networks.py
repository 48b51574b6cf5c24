"""The model and the data of a cell: check what is asked of them, and resolve the sizes of images."""

import dataclasses
import re
from typing import Any

from conf import groups
from conf.cell import IMAGES, SAMPLES, Network
from conf.options import Refused, accepted
from conf.schema import Config, Data, Model, Sizes
from conf.targets import sha256_of_foreign_code, source_file

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
