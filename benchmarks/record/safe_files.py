"""Make Ringside's own files, touch nothing else, and say why a file cannot be written.

What stands in the place of a file of ours and is none (a link, a folder, a device, a pipe, a file
that has a second name) stays as it is, and so does what lies behind a folder that is a link:
NotOurs names it. Folders and files have the mode that the umask leaves of 0777 and 0666.
"""

import contextlib
import errno
import fcntl
import os
import resource
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.05  # between two tries to take a lock
_unfinished: list[tuple[int, str]] = []  # descriptor of a folder, name of a file that is written
REASONS = {
    errno.ENOSPC: "there is no space left",
    errno.EDQUOT: "there is no space left for this user (a quota)",
    errno.EROFS: "its file system is read-only",
    errno.EAGAIN: "no further process or thread may be started here (ulimit -u, or pids.max of "
    "the control group)",
    errno.ENOMEM: "there is no memory for it (ulimit -v, or the control group's limit)",
    errno.EIO: "its disk answers with an input/output error",
}
# Limits of this process, as errors name them: which, and the words around its number.
LIMITS = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "a file may not be larger than {} bytes here (ulimit -f)"),
    errno.EMFILE: (
        resource.RLIMIT_NOFILE,
        "a process may have no more than {} files open here (ulimit -n)",
    ),
}


class NotOurs(OSError):
    """Something else stands where a file or a folder of ours belongs. The message is a sentence."""

    def __init__(self, path: Path, what: str) -> None:
        """`what` ends a sentence that begins with the path: "is a link"."""
        super().__init__(errno.EEXIST, what, str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}; it is left as it is"


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder and those above it where they are missing; return it.

    `mode` is that of the folder itself where it is made, less what the umask takes.

    Raises:
        NotOurs: a link or a file has its name.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode, parents=True, exist_ok=True)
    refuse_other(path, stat.S_IFDIR)
    return path


def refuse_other(path: Path, kind: int = stat.S_IFREG, folder: int | None = None) -> None:
    """Refuse what stands at a path unless it is a file, or of another `kind` (stat.S_IFDIR).

    `folder` is a descriptor of the folder in which to look for the path's name. Raises NotOurs.
    """
    name = str(path) if folder is None else path.name
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_IFMT(mode) == kind:
        return
    what = "is not a regular file" if kind == stat.S_IFREG else "is not a folder"
    if stat.S_ISLNK(mode):
        what = "is a link"
    elif stat.S_ISDIR(mode):
        what = "is a folder"
    raise NotOurs(path, what)


def open_own(path: Path, append: bool = True) -> int:
    """Open a file of ours for reading and writing, made if it is missing; return its descriptor.

    Raises:
        NotOurs: it is a link or no regular file, or a hard link gives it a second name, whose
            content would change too.
        OSError: it cannot be opened.
    """
    # a pipe without a reader is no reason to wait
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    if append:
        flags |= os.O_APPEND
    with _folder_of(path) as folder:
        # before it is opened: to open a device may do something already
        refuse_other(path, folder=folder)
        descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotOurs(path, "is not a regular file")
        if status.st_nlink > 1:
            raise NotOurs(path, "has a second name (a hard link)")
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Path) -> IO[bytes]:
    """Open a regular file for reading, also through links; never wait for a pipe.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotOurs(path, "is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path) -> bytes:
    """Return what a regular file holds. Raises OSError: also of a pipe or a device."""
    with open_to_read(path) as file:
        return file.read()


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all (atomic): on disk when this returns.

    Raises:
        NotOurs: a link, or no regular file, has the name.
        OSError: it cannot be written; an earlier file is as it was.
    """
    temporary = f".{path.name}.{secrets.token_hex(4)}"
    with _folder_of(path) as folder:
        refuse_other(path, folder=folder)
        _unfinished.append((folder, temporary))
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
        finally:
            _unfinished.remove((folder, temporary))
        os.fsync(folder)
    return path


def remove_unfinished() -> None:
    """Remove what `write_whole` has begun, in a process that ends at once."""
    for folder, temporary in _unfinished:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)


def put_in_place(made: Path, path: Path) -> None:
    """Give a finished file, which lies on the same file system, its name.

    Raises as `write_whole`.
    """
    with _folder_of(path) as folder:
        refuse_other(path, folder=folder)
        os.rename(made, path.name, dst_dir_fd=folder)
        os.fsync(folder)


@contextlib.contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold a lock file; yield False if it is held elsewhere for `wait_s`.

    The kernel frees it when its holder ends. Raises OSError, and NotOurs for a file that holds
    something: a lock is empty.
    """
    descriptor, deadline = open_own(path), time.monotonic() + wait_s
    try:
        if os.fstat(descriptor).st_size:
            raise NotOurs(path, "holds something, so it is not a lock of Ringside's")
        is_ours = take_lock(descriptor)
        while not is_ours and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            is_ours = take_lock(descriptor)
        yield is_ours
    finally:
        os.close(descriptor)


def take_lock(descriptor: int) -> bool:
    """Lock an open file unless somebody holds it; return whether it is ours. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    """Open the folder of a file, which is not a link. Errors inside name the whole path."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:  # what a link is too
        if path.parent.is_symlink():
            raise NotOurs(path.parent, "is a link") from None
        raise NotOurs(path.parent, "is not a folder") from None
    try:
        yield folder
    except NotOurs:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)


def because(error: OSError) -> str:
    """Return why an error came as the end of a sentence: what is full, at its limit or gone."""
    if isinstance(error, NotOurs):
        return f"{error.filename} {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTCONN) and error.filename:
        missing = Path(os.fsdecode(error.filename)).absolute()
        for folder in reversed(missing.parents):
            if not folder.exists():
                missing = folder
                break
        return f"{missing} is gone: removed, or no longer mounted"
    if error.errno in LIMITS:
        limit, words = LIMITS[error.errno]
        soft, _ = resource.getrlimit(limit)
        return words.format("unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    if error.errno in REASONS:
        return REASONS[error.errno]
    reason = str(error.strerror or error)
    return f"{reason} ({error.filename})" if error.filename else reason
