"""What Hydra has read and composed is not read and composed again in the same process.

Hydra reads every file anew for each composition and merges them: 0.1 s of CPU. A named study takes at least two
compositions (the first is for `hydra.mode`), and one more for each combination of group choices that it sweeps.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

HYDRAS_LOAD = ConfigRepository.load_config
HYDRAS_COMPOSE = ConfigLoaderImpl._compose_config_from_defaults_list
MOST_READ, MOST_COMPOSED = 1000, 32
Key = tuple[Any, ...]

_read: dict[Key, ConfigResult] = {}
_composed: dict[Key, DictConfig] = {}


def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Return what stands under a path, in place of Hydra's own method: read once, and again only where the file has changed.

    Nobody may change its configuration.
    """
    key = _key(repository, config_path)
    if key not in _read:
        found = HYDRAS_LOAD(repository, config_path)
        if found is None:
            return None
        if len(_read) >= MOST_READ:
            _read.clear()
        _read[key] = found
    return copy.copy(_read[key])


def compose(
    loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository
) -> DictConfig:
    """Return the files of a list of choices, merged, in place of Hydra's own method; before any value of the command line."""
    key = tuple(
        (one.config_path, one.package, one.is_self, one.primary, *_key(repo, str(one.config_path)))
        for one in defaults
    )
    if key not in _composed:
        if len(_composed) >= MOST_COMPOSED:
            del _composed[next(iter(_composed))]
        copies: Any = _Copies(repo)
        _composed[key] = HYDRAS_COMPOSE(loader, defaults, copies)
    return copy.deepcopy(_composed[key])  # callers change theirs


class _Copies:
    """A repository whose configurations may be changed."""

    def __init__(self, repo: IConfigRepository) -> None:
        self._repo = repo

    def load_config(self, config_path: str) -> ConfigResult | None:
        found = self._repo.load_config(config_path)
        return found and dataclasses.replace(found, config=copy.deepcopy(found.config))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repo, name)


def _key(repository: Any, config_path: str) -> Key:
    """Return what a configuration is known by: its place, and of a file its inode, size and time."""
    own: ConfigRepository = getattr(repository, "delegate", repository)
    source = own._find_object_source(config_path, ObjectType.CONFIG)
    if source is None:
        return (config_path,)
    return source.scheme(), source.provider, source.path, config_path, *_file(source, config_path)


def _file(source: ConfigSource, config_path: str) -> Key:
    if source.scheme() != "file":
        return ()
    try:
        found = (Path(source.path) / source._normalize_file_name(config_path)).stat()
    except OSError:  # since it was found: Hydra says so
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def register() -> None:
    """Give Hydra these functions."""
    ConfigRepository.load_config = load_config  # type: ignore[method-assign, assignment]
    ConfigLoaderImpl._compose_config_from_defaults_list = compose  # type: ignore[method-assign, assignment]
