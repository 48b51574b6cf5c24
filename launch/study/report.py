"""Write the report of a study when a sweep ends, next to the records, and open it on a desktop."""

import contextlib
import importlib
import os
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from analysis.gc_pause import gc_paused
from benchmarks.record.os_errors import because
from conf.variables import usable_cores

REPORT = "report"  # the folder in a study's
# What takes more than a second to import, in parts of a few tenths.
NEEDED = ("scipy.special", "scipy.optimize", "analysis.report.build", "matplotlib.figure",
          "matplotlib.backends.backend_svg", "matplotlib.backends.backend_pdf", "jinja2")  # fmt: skip


class StudyReport:
    """The report of a study, as `report=` asks for it."""

    def __init__(self, study_folder: Path, asked: object, note: Callable[[str], None]) -> None:
        """`note` gets the reason where it cannot be written."""
        self._study_folder, self._asked, self._note = study_folder, str(asked), note

    @property
    def wanted(self) -> bool:
        """Whether there is to be one."""
        return self._asked != "False"

    def prepare(self, may_go_on: Callable[[], bool]) -> None:
        """Import what it needs, part by part as long as `may_go_on`: before ranks measure another core has time.

        What fails is told when it is written.
        """
        if not self.wanted or usable_cores() < 2:
            return
        with contextlib.suppress(Exception):
            for name in NEEDED:
                if may_go_on():
                    importlib.import_module(name)

    def write(self) -> tuple[Path | None, Sequence[str]]:
        """Write it, and open it if that was asked; return its page, None without one, and its finding."""
        if not self.wanted:
            return None, ()
        page, finding = write_report(self._study_folder, self._note, self._asked)
        if page and self._asked == "open":
            show(page)
        return page, finding


def write_report(study_folder: Path, note: Callable[[str], None], asked: str = "") -> tuple[Path | None, Sequence[str]]:
    """Write `<study>/report` and return its page and its finding; None and nothing if that fails, and `note` gets the reason.

    `asked` may name the width of figures (analysis.report.figure.WIDTHS_IN).
    """
    try:
        with gc_paused():
            from analysis.report.build import examine, write  # a second to import
            from analysis.report.figure import ON_PAGE, WIDTHS_IN

            content, _ = examine(study_folder, asked if asked in WIDTHS_IN else ON_PAGE)
            return write(content, study_folder / REPORT), content.finding
    except Exception as error:  # a full disk, a font, a record that nobody thought of: every record is safe already
        reason = because(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        later = f"python -m analysis report {quote(str(study_folder))}"
        note(f"the report could not be written: {reason}; to write it later: {later}")
        return None, ()


def show(page: Path) -> None:
    """Open a page in the user's browser if there is a desktop: a browser in the terminal would hide the sweep's table."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(page.absolute().as_uri())
