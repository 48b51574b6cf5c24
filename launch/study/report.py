"""The report of a study when a sweep ends: written beside the records, opened where somebody can see it."""

import os
import webbrowser
from collections.abc import Callable
from pathlib import Path

REPORT = "report"  # the folder in a study's


def write_report(study_folder: Path, note: Callable[[str], None]) -> Path | None:
    """Write `<study>/report`; returns its page. A report that fails costs nothing but itself: `note` is told why."""
    try:
        from analysis.report.build import report  # a second to import

        return report(study_folder, study_folder / REPORT)
    except Exception as error:  # a full disk, a font, a record that nobody thought of: every record is safe already
        note(
            f"the report could not be written ({type(error).__name__}: {error}); later: python -m analysis report {study_folder}"
        )
        return None


def show(page: Path) -> None:
    """Open a page in the user's browser, where there is a screen; a browser in the terminal would hide the sweep's table."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(page.absolute().as_uri())
