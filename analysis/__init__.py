"""What it means: topology, subsets, NCCL logs, validity and scaling. Needs neither a GPU nor torch.

In a notebook, `from analysis import open_study`; analysis/example.ipynb shows what it gives.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from analysis.notebook import OpenedStudy

__all__ = ["open_study"]


def open_study(folder: "str | Path") -> "OpenedStudy":
    """Return a study: its records, tables, figures and sentences. `folder` is OUTPUT_DIR/STUDY.

    Raises:
        FileNotFoundError, NotADirectoryError: it is no folder.
    """
    # pandas, scipy and jinja2 take a second; the launcher imports this package.
    from analysis.notebook import opened

    return opened(folder)
