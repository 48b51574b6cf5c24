"""Write files of ours and nothing else's: every module that makes a file of Ringside's own does it here.

What stands in the place of a file of ours and is none (a link, a folder, a device, a pipe, a file that has a second name) stays
as it is, and so does what lies behind a folder that is a link: NotOurs names it. Folders and files have the mode that the umask
leaves of 0777 and 0666. Only a user's own name for a file (`write_named`) may be a link.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.05  # between two tries to take a lock
HEAD_BYTES = 1024  # of a drawing, which tell that it is one


class NotOurs(OSError):
    """Something of somebody else's stands where a file or a folder of ours belongs. The message is a sentence."""

    def __init__(self, path: Path, what: str) -> None:
        """`what` ends a sentence that begins with the path: "is a link"."""
        super().__init__(errno.EEXIST, what, str(path))

    def __str__(self) -> str:
        """Return the sentence, without the number of the error."""
        return f"{self.filename} {self.strerror}; it is left as it is"


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder and those above it where they are missing; return it. Raises NotOurs for a link or a file, and OSError.

    `mode` is that of the folder itself where it is made, less what the umask takes.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode, parents=True, exist_ok=True)
    refuse_other(path, stat.S_IFDIR)
    return path


def refuse_other(path: Path, kind: int = stat.S_IFREG, folder: int | None = None) -> None:
    """Refuse what stands at a path unless it is of this kind (a file, or stat.S_IFDIR); nothing may stand there. Raises NotOurs.

    `folder` is a descriptor of the folder in which to look for the path's name.
    """
    try:
        mode = os.stat(
            path if folder is None else path.name, dir_fd=folder, follow_symlinks=False
        ).st_mode
    except FileNotFoundError:
        return
    if stat.S_IFMT(mode) != kind:
        kinds = {stat.S_IFLNK: "is a link", stat.S_IFDIR: "is a folder"}
        other = "is no regular file" if kind == stat.S_IFREG else "is no folder"
        raise NotOurs(path, kinds.get(stat.S_IFMT(mode), other))


def open_own(path: Path, append: bool = True) -> int:
    """Open a file of ours for reading and writing, made if it is missing; return its descriptor.

    Raises:
        NotOurs: it is a link or no regular file, or a hard link gives it a second name, whose content would change too.
        OSError: it cannot be opened.
    """
    flags = (
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # a pipe without a reader is no reason to wait
    with _folder_of(path) as folder:
        refuse_other(
            path, folder=folder
        )  # before it is opened: to open a device may do something already
        descriptor = os.open(
            path.name, flags | (os.O_APPEND if append else 0), 0o666, dir_fd=folder
        )
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotOurs(path, "is no regular file")
        if found.st_nlink > 1:
            raise NotOurs(path, "has a second name (a hard link)")
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Path) -> IO[bytes]:
    """Open a regular file for reading, also through links. Never waits for a pipe. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOurs(path, "is no regular file")
    return os.fdopen(descriptor, "rb")


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all, on disk when this returns: a new file takes the name of an earlier one.

    Raises:
        NotOurs: a link, or no regular file, has the name.
        OSError: it cannot be written; an earlier file is as it was.
    """
    temporary = f".{path.name}.{secrets.token_hex(4)}"
    with _folder_of(path) as folder:
        refuse_other(path, folder=folder)
        try:
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder
            )
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
    return path


def put_in_place(made: Path, path: Path) -> None:
    """Give a finished file, which lies on the same file system, its name. Raises as `write_whole`."""
    with _folder_of(path) as folder:
        refuse_other(path, folder=folder)
        os.rename(made, path.name, dst_dir_fd=folder)
        os.fsync(folder)


def write_named(path: Path, drawing: bytes) -> None:
    """Write a drawing where a user said. A link is followed, as the user named it.

    Raises:
        NotOurs: something else than such a drawing is there already.
        OSError: it cannot be written.
    """
    place = Path(os.path.realpath(path))
    mark = b"<svg" if b"<svg" in drawing[:HEAD_BYTES] else drawing[:4]
    with contextlib.suppress(FileNotFoundError), open_to_read(place) as file:
        if (head := file.read(HEAD_BYTES)) and mark not in head:
            raise NotOurs(path, "holds something else than a drawing")
    write_whole(place, drawing)


@contextlib.contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold a lock file while the context is entered; yields False if others have held it for `wait_s` seconds.

    The kernel frees it when its holder ends. Raises OSError, and NotOurs for a file that holds something: a lock is empty.
    """
    descriptor = open_own(path)
    try:
        if os.fstat(descriptor).st_size:
            raise NotOurs(path, "holds something, so it is no lock of Ringside's")
        yield _taken(descriptor, time.monotonic() + wait_s)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """Open the folder of a file, which is no link. Errors inside name the whole path, not the name in the folder."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # what a link is too
        raise NotOurs(
            path.parent, "is a link" if path.parent.is_symlink() else "is no folder"
        ) from None
    try:
        yield folder
    except NotOurs:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)
