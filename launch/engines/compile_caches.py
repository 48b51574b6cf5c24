"""The folder in which torch.compile keeps what it made, for all cells of all studies of an output folder.

It lies beside the studies, not in one: nothing that reads, packs or moves a study passes through it. torch and Triton write each
file whole and give it its name at once, so several ranks and launchers may share it.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from benchmarks.record import own_files
from conf.cell import Cell

NAME = ".compiled"  # no study has such a name
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# torch puts the path into commands for the C++ compiler, unquoted.
PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")


def variables(cell: Cell, output_dir: Path, surrounding: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the folder; none where a cell is not compiled here or the user names a folder.

    None also where the folder cannot serve; torch then takes its own one in TMPDIR. The folder is made.
    """
    if not cell.compiled or cell.hosts or INDUCTOR in surrounding:
        return {}
    folder = output_dir / NAME
    if not _serves(folder):
        return {}
    # Without a folder of its own Triton would get one for each GPU from torch, with the same kernels.
    triton = {} if TRITON in surrounding else {TRITON: str(folder / "triton")}
    return {INDUCTOR: str(folder), **triton}


def _serves(folder: Path) -> bool:
    """Return whether code may be kept in a folder, which is made where it is missing: torch runs what it finds there.

    So it must be the user's own, and nobody else may write to it.
    """
    if not PLAIN.fullmatch(str(folder)):
        return False
    try:
        own_files.make_folder(folder, mode=0o700)
        found, system = folder.stat(), os.statvfs(folder)
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.geteuid() and not found.st_mode & others and not system.f_flag & os.ST_NOEXEC
