"""The environment of a cell's processes: what a launcher asks for, merged on the host with what is set there.

What is asked for travels as JSON; what is set on a host stays there, for it holds secrets.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# At the beginning of a value: the folder of the cell on the host, which only the host knows.
CELL_FOLDER = "{cell}"


@dataclass(frozen=True)
class Variables:
    """What a cell needs in the environment of its processes on one host."""

    set: Mapping[str, str]  # whatever the host says
    defaults: Mapping[str, str]  # where the host says nothing, or sets it to nothing
    remove: Sequence[str]  # names; one that ends in * stands for all that begin so

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON types."""
        return {"set": dict(self.set), "defaults": dict(self.defaults), "remove": list(self.remove)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Variables":
        """Return what `to_dict` made. Raises KeyError."""
        return Variables(plain["set"], plain["defaults"], plain["remove"])


def merged(asked: Variables, surrounding: Mapping[str, str], folder: str = CELL_FOLDER) -> dict[str, str]:
    """Return the environment of a cell's processes where the variables `surrounding` are set and the cell has this folder."""
    prefixes = tuple(name[:-1] for name in asked.remove if name.endswith("*"))
    names = set(asked.remove)
    kept = {
        name: value
        for name, value in surrounding.items()
        if name not in names and not name.startswith(prefixes) and (value or name not in asked.defaults)
    }
    own = {
        name: folder + value.removeprefix(CELL_FOLDER) if value.startswith(CELL_FOLDER) else value
        for name, value in asked.set.items()
    }
    return {**asked.defaults, **with_absolute_path(kept), **own}


def with_absolute_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH is absolute: our processes have another working folder than the user's."""
    if "PYTHONPATH" not in variables:
        return {**variables}
    folders = (str(Path(folder).absolute()) for folder in variables["PYTHONPATH"].split(os.pathsep))
    return {**variables, "PYTHONPATH": os.pathsep.join(folders)}
