"""What it means: topology, subsets, NCCL logs, validity and scaling. Needs neither a GPU nor torch.

In a notebook, `from analysis import open_study`; analysis/notebook/example.ipynb shows what it gives.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.notebook.study import OpenedStudy

__all__ = ["open_study"]


def open_study(folder: "str | Path") -> "OpenedStudy":
    """Return a study: its records, tables, figures and sentences. `folder` is OUTPUT_DIR/STUDY.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    from analysis.notebook.study import (
        opened,
    )  # numpy, scipy and jinja2 take a second; the launcher imports this package

    return opened(folder)
