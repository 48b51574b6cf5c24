"""Attach Ringside's instruments to a script once it has imported torch.

Only the ranks of a script have this folder on PYTHONPATH. Whatever fails here is a line of the log,
and the script goes on.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
# Files with a function `attach(write, settings)`. They import torch and the standard library alone:
# nothing of ours may hide a module of the script's.
ATTACHED = ("instruments.py", "exchanges.py")
SETTINGS = "RINGSIDE_SCRIPT"
CLOCK = "RINGSIDE_CLOCK"
Write = Callable[..., None]


def write(lines: str, kind: str, **content: Any) -> None:
    """Append a line to the raw lines of this rank. `lines` is their path, with `{rank}` in it."""
    moment = float(os.environ.get(CLOCK) or 0.0) + time.monotonic()
    text = json.dumps({"kind": kind, "time": moment, **content}) + "\n"
    with open(lines.format(rank=rank()), "ab", buffering=0) as file:  # noqa: PTH123
        file.write(text.encode())


def rank() -> int:
    """Return the rank of this process: that in torch's default group, else RANK, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK") or 0)


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as Python does, and attaches the instruments after its import."""

    def __init__(self, attach: Callable[[], None]) -> None:
        self._attach, self._is_finding = attach, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec for torch, None for all else."""
        if fullname != "torch" or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_finding = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._attach()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def attach_all(settings: dict[str, Any]) -> None:
    """Attach every instrument. What else they need is in the same settings."""
    for name in ATTACHED:
        path = FOLDER.parent / name
        try:
            spec = importlib.util.spec_from_file_location(f"_ringside_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            module.attach(functools.partial(write, settings["lines"]), settings)
        except Exception as error:
            print(f"ringside: {name}: {type(error).__name__}: {error}", file=sys.stderr)


def run_next() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    folders = [folder for folder in sys.path if Path(folder or ".").resolve() != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if SETTINGS in os.environ:
        settings = json.loads(os.environ[SETTINGS])
        sys.meta_path.insert(0, TorchFinder(functools.partial(attach_all, settings)))
except Exception as error:
    print(f"ringside: sitecustomize: {type(error).__name__}: {error}", file=sys.stderr)
run_next()
