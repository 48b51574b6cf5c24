"""Code that a file or a command names: `package.module.name`, or `package.module:name` as Python's
own tools write it.

A launcher finds such code without importing it, because it may import torch; a rank imports it.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from conf.options import Refused

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*", re.ASCII)
OURS = ("analysis", "benchmarks", "conf", "launch", "trainers")


def split(dotted: str) -> tuple[str, str]:
    """Return (module, name in it)."""
    module, _, name = dotted.replace(":", ".").rpartition(".")
    return module, name


def locate(dotted: str) -> Any:
    """Import a module and return what it calls `name`. Raises whatever the import raises, or
    AttributeError."""
    module, name = split(dotted)
    return getattr(importlib.import_module(module), name)


def locate_without_torch(dotted: str) -> Any:
    """Import code that the launching process calls, and return it."""
    had_torch = "torch" in sys.modules
    try:
        target = locate(dotted)
    except (Exception, SystemExit) as error:
        raise Refused(f"{dotted}: cannot be imported ({type(error).__name__}: {error})") from None
    if not had_torch and "torch" in sys.modules:
        raise Refused(
            f"{dotted}: imports torch; the launching process calls it, so put it in a module "
            "without torch"
        )
    return target


def call_dotted(dotted: str, *arguments: Any) -> Any:
    """Call code of a benchmark in the launching process, before any process starts; return what it
    returns.
    """
    function = locate_without_torch(dotted)
    try:
        return function(*arguments)
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(f"{dotted}: raised {type(error).__name__}: {error}") from error


def sha256_of_foreign_code(field: str, dotted: str) -> str | None:
    """Return the SHA-256 of the file that defines a name, in hexadecimal digits; None for
    Ringside's own code.
    """
    if split(dotted)[0].partition(".")[0] in OURS:
        return None
    return hashlib.sha256(source_file(field, dotted).read_bytes()).hexdigest()


def source_file(field: str, dotted: str) -> Path:
    """Return the Python file of a dotted name's module, found without running any code.

    Whether it defines the name is known once it is imported (launch.plan.own_code).
    """
    if not DOTTED.fullmatch(dotted):
        raise Refused(
            f"{field}={dotted}: expected a name that Python can import, such as "
            "my_package.my_module:build"
        )
    module, _ = split(dotted)
    # As an import finds it, but parents are looked up, not imported.
    folders: list[str] | None = None
    spec: ModuleSpec | None = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None and folders is None:  # an editable install
            spec = importlib.util.find_spec(part)
        if spec is None:
            break
        folders = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise Refused(
            f"{field}={dotted}: Python finds no module {module}; put its folder on PYTHONPATH, or "
            "install its package"
        )
    return Path(spec.origin)
