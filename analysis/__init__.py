"""What it means: topology, subsets, NCCL logs, validity and scaling. Needs neither a GPU nor torch.

In a notebook, `from analysis import open_study`; analysis/example.ipynb shows what it gives.
"""

import sys

# `python -m` puts the working folder first, where a study of somebody else may hold a numpy.py.
# (Python 3.10 has no safe_path.)
if (
    sys.argv[:1] == ["-m"]
    and not getattr(sys.flags, "safe_path", sys.flags.isolated)
    and f"{sys.path[0]}/analysis" not in __path__
):
    sys.path.pop(0)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.notebook import OpenedStudy

__all__ = ["open_study"]


def open_study(folder: "str | Path") -> "OpenedStudy":
    """Return a study: its records, tables, figures and sentences. `folder` is OUTPUT_DIR/STUDY.

    Raises FileNotFoundError, NotADirectoryError: it is not a folder.
    """
    # pandas, scipy and jinja2 take a second; the launcher imports this package.
    from analysis.notebook import opened

    return opened(folder)
