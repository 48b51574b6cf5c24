"""A cell, composed as launch.py composes it, for scripts that step it themselves."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf import schema
from conf.cell import Cell
from conf.command_line import normalise
from conf.resolve import checked, resolve

ROOT = Path(__file__).resolve().parents[2]


def cell_of(overrides: Sequence[str], gpus: tuple[int, ...], device: str) -> Cell:
    """Return the cell that these options mean on a subset."""
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("config", normalise(list(overrides))))
    return resolve(checked(config)[0], gpus, device)
