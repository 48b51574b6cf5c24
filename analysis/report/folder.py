"""Put the files of a report into a folder, in place of those of an earlier report.

A report's page lists the files that were written with it (`<meta name="ringside-files" …>`). A
folder with such a page is replaced as a whole: the new files are written into a folder beside it,
files that the page does not list are the user's and are taken along, and then the two folders are
swapped. Whatever ends the writing leaves the earlier report as it was.
"""

import html
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.record.safe_files import make_folder, refuse_other

PAGE = "index.html"
_LISTED = re.compile(r'<meta name="ringside-files" content="([^"]*)">')


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their paths from the folder, and remove those of an earlier report.

    Raises:
        FileExistsError: the folder holds something else than a report, or a file of the user's.
        NotOurs: it is a link, or no folder.
        OSError: it cannot be written.
    """
    refuse_other(folder, stat.S_IFDIR)
    place = folder.resolve()
    users_own = _users_files(folder, place, files)
    make_folder(place.parent)
    new, old = (
        place.with_name(f".{place.name}.{uuid.uuid4().hex}.{end}") for end in ("new", "old")
    )
    try:
        for name, content in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        for name in users_own:
            _take_along(place / name, new / name)
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except OSError:
            if old.exists():
                old.rename(place)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _users_files(folder: Path, place: Path, files: Mapping[str, bytes]) -> list[str]:
    """Return the files in a report's folder that no report wrote. Raises as `write_folder`."""
    if not place.exists():
        return []
    present = list(_files_in(place))
    if not present:
        return []
    earlier = _files_of_report(place / PAGE)
    if earlier is None:
        raise FileExistsError(
            f"{folder}: holds files, and no report of Ringside; nothing was written (-o names "
            "another folder)"
        )
    # A report has no links and no pipes: one with the name of its file is the user's.
    users_own = []
    for name in present:
        if name not in earlier or not stat.S_ISREG((place / name).lstat().st_mode):
            users_own.append(name)
    overwritten = [name for name in users_own if name in files]
    if overwritten:
        raise FileExistsError(
            f"{folder / overwritten[0]}: is not of the earlier report and would be overwritten; nothing "
            "was written (move it away)"
        )
    return users_own


def _files_of_report(page: Path) -> set[str] | None:
    """Return the files that were written with a page; None where it is no page of Ringside's."""
    try:
        refuse_other(page)  # to wait for a pipe would be for ever
        text = page.read_text(encoding="utf-8", errors="replace")
        listed = _LISTED.search(text)
        if listed is None:
            return None
        return {PAGE, *map(str, json.loads(html.unescape(listed[1])))}
    except (OSError, ValueError, TypeError):
        return None  # an unreadable page, or a list that is none, is no page of Ringside's


def _files_in(folder: Path) -> Iterator[str]:
    """Yield every file and link below a folder, as a path from it."""
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        yield from (
            str((Path(where) / name).relative_to(folder)) for name in sorted([*names, *links])
        )


def _take_along(source: Path, target: Path) -> None:
    """Make a file of the user's appear in the new folder too: as a link, else as a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
