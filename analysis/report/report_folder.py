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
from collections.abc import Mapping
from pathlib import Path

from benchmarks.record.safe_files import make_folder, refuse_other

PAGE = "index.html"
_LISTED = re.compile(r'<meta name="ringside-files" content="([^"]*)">')


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their paths from the folder, and remove those of an earlier report.

    Raises OSError: the folder holds something else than a report (FileExistsError), is a link or no
    folder (NotOurs), or cannot be written.
    """
    refuse_other(folder, stat.S_IFDIR)
    target = folder.resolve()
    users_own = _users_files(folder, target, files)
    make_folder(target.parent)
    name = uuid.uuid4().hex
    new = target.with_name(f".{target.name}.{name}.new")
    old = target.with_name(f".{target.name}.{name}.old")
    try:
        for path, content in files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
        for path in users_own:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(target / path, new / path, follow_symlinks=False)
            except OSError:
                shutil.copy2(target / path, new / path, follow_symlinks=False)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _users_files(folder: Path, target: Path, files: Mapping[str, bytes]) -> list[str]:
    """Return the files in a report's folder that no report wrote. Raises as `write_folder`."""
    present = []
    for where, folders, names in os.walk(target):
        for name in sorted([*names, *folders]):
            path = Path(where) / name
            if name in names or path.is_symlink():
                present.append(str(path.relative_to(target)))
    earlier = None
    try:
        refuse_other(target / PAGE)  # to wait for a pipe would be for ever
        listed = _LISTED.search((target / PAGE).read_text(encoding="utf-8", errors="replace"))
        if listed is not None:
            earlier = {PAGE, *map(str, json.loads(html.unescape(listed[1])))}
    except (OSError, ValueError, TypeError):
        pass  # an unreadable page, or a list that is none, is no page of Ringside's
    if present and earlier is None:
        raise FileExistsError(
            f"{folder}: holds files, and no report of Ringside; nothing was written (-o names "
            "another folder)"
        )
    # A report has no links and no pipes: one with the name of its file is the user's.
    users_own = []
    for file in present:
        is_file = stat.S_ISREG((target / file).lstat().st_mode)
        if earlier is None or file not in earlier or not is_file:
            users_own.append(file)
            if file in files:
                raise FileExistsError(
                    f"{folder / file}: is not of the earlier report and would be overwritten; "
                    "nothing was written (move it away)"
                )
    return users_own
