"""Pages in Debian's chromium: how wide they are, and pictures of them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

PHONE, SCREEN = 390, 1280  # pixels
COMMAND = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def widths(page, folder):
    """(width of the content, room for it) in frames as wide as a phone and as a screen.

    Chromium's own window is never as narrow as a phone.
    """
    script = (
        "onload = () => { const all = [...document.querySelectorAll('iframe')].map(f => f.contentDocument.documentElement);"
        "const said = all.map(e => e.scrollWidth + ' of ' + e.clientWidth).join(', ');"
        "document.body.innerHTML = '<p id=said>' + said + '</p>'; }"
    )
    frames = "".join(framed(page, width) for width in (PHONE, SCREEN))
    (folder / "frames.html").write_text(
        f"<!doctype html><body>{frames}<script>{script}</script>", encoding="utf-8"
    )
    command = [
        *COMMAND,
        f"--user-data-dir={folder}/profile",
        "--window-size=1800,1200",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, f"file://{folder}/frames.html"], capture_output=True, text=True, timeout=100
    )
    found = [
        (int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+)", done.stdout.partition("id=")[2])
    ]
    assert len(found) == 2 and found[0][1] <= PHONE < found[1][1] <= SCREEN, (
        done.stdout[-500:] + done.stderr[-500:]
    )
    return found


def framed(page, width, height=900):
    """A page inside a frame of another page."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text(encoding="utf-8"))
    quoted = text.replace("&", "&amp;").replace('"', "&quot;")
    return f'<iframe style="width:{width}px;height:{height}px;border:0" srcdoc="{quoted}"></iframe>'


def picture(page, name, folder, *, height=1600, phone=False, dark=False):
    """A picture of a page (PIL), also written to the folder that RINGSIDE_SCREENS names."""
    from PIL import Image  # comes with matplotlib

    shown, width = page, SCREEN
    if phone:
        shown, width = folder / f"{name}.html", 500  # the narrowest window of chromium
        shown.write_text(
            f'<!doctype html><body style="margin:0">{framed(page, PHONE, height)}', encoding="utf-8"
        )
    command = [*COMMAND, f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    path = folder / f"{name}.png"
    subprocess.run(
        [*command, f"--screenshot={path}", f"file://{shown}"],
        capture_output=True,
        timeout=100,
        check=True,
    )
    if kept := os.environ.get("RINGSIDE_SCREENS"):
        Path(kept).mkdir(exist_ok=True)
        shutil.copy(path, kept)
    return Image.open(path).convert("RGB").crop((0, 0, PHONE if phone else SCREEN, height))


def printed(page, folder):
    """The bytes of a page as it is printed."""
    path = folder / "printed.pdf"
    command = [
        *COMMAND,
        f"--user-data-dir={folder}/profile",
        "--no-pdf-header-footer",
        f"--print-to-pdf={path}",
    ]
    subprocess.run([*command, f"file://{page}"], capture_output=True, timeout=100, check=True)
    return path.read_bytes()
