"""Pages of reports: how they are written, and how wide they are in Debian's chromium."""

import csv
import re
import subprocess

from analysis.report.build import examine
from analysis.report.report_files import write

PHONE, SCREEN = 390, 1280  # pixels
SCRIPT = (
    "onload = () => { const all = [...document.querySelectorAll('iframe')].map(f => f.contentDocument.documentElement);"
    "const told = all.map(e => e.scrollWidth + ' of ' + e.clientWidth).join(', ');"
    "document.body.innerHTML = '<p id=told>' + told + '</p>'; }"
)


def report(folder, out):
    """Write the report of a study and return its page."""
    return write(examine(folder)[0], out)


def rows_of(folder, table):
    """The rows of a table of a report as its CSV has them."""
    with (folder / "tables" / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    """{path: bytes} of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def widths(page, folder):
    """(width of the content, room for it) in frames as wide as a phone and as a screen.

    Chromium's own window is never as narrow as a phone.
    """
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    quoted = text.replace("&", "&amp;").replace('"', "&quot;")
    frames = ""
    for width in (PHONE, SCREEN):
        frames += (
            f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{quoted}"></iframe>'
        )
    html = f"<!doctype html><body>{frames}<script>{SCRIPT}</script>"
    (folder / "frames.html").write_text(html, encoding="utf-8")
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1800,1200",
        f"--user-data-dir={folder}/profile", "--dump-dom", f"file://{folder}/frames.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    pairs = re.findall(r"(\d+) of (\d+)", done.stdout.partition("id=")[2])
    (phone, phone_room), (screen, screen_room) = (map(int, pair) for pair in pairs)
    assert phone_room <= PHONE < screen_room <= SCREEN, done.stdout[-500:] + done.stderr[-500:]
    return [(phone, phone_room), (screen, screen_room)]
