"""README's pictures, made from a committed study: python tests/pictures.py (needs chromium)."""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from analysis.report.build import examine  # noqa: E402
from analysis.report.report_files import write  # noqa: E402
from analysis.study.study import open_study  # noqa: E402
from launch.display.closing_summary import print_summary  # noqa: E402

NAME = "strategies"
STUDY = ROOT / "tests" / "data" / "h200_x2" / NAME
SCREENS = ROOT / "tests" / "data" / "screens"
COLUMNS = 100  # of the terminal
PAGE = "1400,1000"  # pixels of the browser's window
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # of another host


def main():
    """Write the end of the sweep as SVG, and the first screen of its report as PNG."""
    study = open_study(STUDY)
    content, _ = examine(STUDY)
    options = {"force_terminal": True, "color_system": "truecolor", "width": COLUMNS}
    screen = Console(record=True, file=io.StringIO(), highlight=False, **options)
    folder = SimpleNamespace(folder=Path("outputs") / NAME)
    where = [f"report   {folder.folder}/report/index.html"]
    print_summary(screen, folder, study, study.records, 0, content.finding, where)
    command = f"python launch.py {study.records[0].overrides[0]}"
    svg = WEB_FONT.sub("", screen.export_svg(title=command, unique_id="terminal"))
    (SCREENS / f"terminal_{NAME}_h200_x2.svg").write_text(svg, encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        page = write(content, Path(scratch) / "report")
        picture = SCREENS / f"report_{NAME}_h200_x2.png"
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE}",
             f"--user-data-dir={scratch}/profile", f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True, timeout=100,
        )  # fmt: skip


if __name__ == "__main__":
    main()
