"""Say in plain words why the operating system refused something: what is full, at its limit, or gone."""

import errno
import os
import resource
from pathlib import Path

from benchmarks.record.own_files import NotOurs


def because(error: OSError) -> str:
    """Return the reason of an error as the end of a sentence, with what is full, at its limit or gone."""
    if isinstance(error, NotOurs):
        return f"{error.filename} {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "there is no space left" + (
            " for this user (a quota)" if error.errno == errno.EDQUOT else ""
        )
    if error.errno == errno.EROFS:
        return "its file system is read-only"
    if error.errno == errno.EFBIG:
        return (
            f"a file may not be larger than {_limit(resource.RLIMIT_FSIZE)} bytes here (ulimit -f)"
        )
    if error.errno == errno.EMFILE:
        return f"a process may have no more than {_limit(resource.RLIMIT_NOFILE)} files open here (ulimit -n)"
    if error.errno == errno.EAGAIN:
        return "no further process or thread may be started here (ulimit -u, or pids.max of the control group)"
    if error.errno == errno.ENOMEM:
        return "there is no memory for it (ulimit -v, or the control group's limit)"
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTCONN) and error.filename:
        return f"{_missing(error.filename)} is gone: removed, or no longer mounted"
    if error.errno == errno.EIO:
        return "its disk answers with an input/output error"
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def _missing(path: str) -> Path:
    """Return the first folder of a path that does not exist, or the path itself."""
    asked = Path(os.fsdecode(path)).absolute()
    return next((folder for folder in reversed(asked.parents) if not folder.exists()), asked)


def _limit(kind: int) -> str:
    """Return a limit of this process."""
    soft = resource.getrlimit(kind)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
