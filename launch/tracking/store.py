"""Open MLflow's store within a bounded time, or fail with one sentence.

By itself MLflow 3 retries a dead server for four minutes and a dead database for more than one, and
two processes that make the same SQLite file at once destroy it. Here waiting is bounded, and a new
file appears whole or not at all.
"""

import contextlib
import logging
import os
import re
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.record import safe_files
from benchmarks.record.folder import COPIES
from benchmarks.record.safe_files import NotOurs, because
from launch.machine.secrets import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_STORE, ARTIFACTS = "mlflow.db", COPIES  # in output_dir
SQLITE = b"SQLite format 3\0"  # the first bytes of every SQLite file
SQLITE_JOURNALS = ("-journal", "-wal", "-shm")  # what SQLite writes beside it
LOCK_WAIT_S = 20.0  # for a locked SQLite file; also MLflow's own busy_timeout
STORE_LOCK_WAIT_S = 60.0  # for another launcher that holds the lock: it may be making the store
CONNECT_WAIT_S = 20  # for a database server to accept a connection
DAMAGED = (
    "is damaged: move its file away, and the next sweep or sync makes it anew from the records"
)
# {what SQLite says: what the user reads}; the first that fits counts.
SQLITE_ERRORS = {
    "database is locked": f"is locked by another process (waited {LOCK_WAIT_S:.0f} s)",
    "database or disk is full": "has no space left on its disk",
    "readonly database": "cannot be written: its file, or its file system, is read-only",
    "disk i/o error": "cannot be written: its disk answers with an input/output error",
    "unable to open database file": "cannot be opened: its folder cannot be written, or no further file may be open",
    "malformed": DAMAGED,
    "not a database": DAMAGED,
}
SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "databricks-uc")
ACCEPTED = "sqlite:///FILE, postgresql://…, mysql://…, mssql://…, http://HOST:PORT, https://HOST and databricks"
# Defaults for MLflow's variables; it reads them when it is imported, or at each request.
MLFLOW_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # at ERROR it prints a traceback beside our sentence
}
# Characters of a path that a URI needs encoded: SQLAlchemy does that, and its import takes half a second.
ENCODED = re.compile(r"[%?@\x00-\x1f\x7f]")


class TrackingUnavailable(Exception):
    """The store cannot be reached or written; the message is one sentence without credentials."""


class StoreBusy(TrackingUnavailable):
    """Another launcher is writing the store; later it can be written."""


class WrongUri(TrackingUnavailable):
    """No store can have this URI."""


def store_uri(given: str | None, output_dir: Path) -> str:
    """Return the URI to use, of a SQLite file with an absolute path; by default `<output_dir>/mlflow.db`.

    Raises:
        WrongUri: no store can have it.
    """
    if given is None:
        return _sqlite_uri((output_dir / DEFAULT_STORE).absolute())
    wrong = f"tracking.uri={without_credentials(given)}"
    scheme = _scheme(given)
    if scheme not in SCHEMES or ("://" not in given and not scheme.startswith("databricks")):
        raise WrongUri(f"{wrong}: accepted are {ACCEPTED}")
    if scheme in ("http", "https") and not urlsplit(given).hostname:
        raise WrongUri(f"{wrong}: accepted is {scheme}://HOST or {scheme}://HOST:PORT")
    if scheme != "sqlite":
        return given
    file = sqlite_file(given)
    if file is None:
        raise WrongUri(f"{wrong}: accepted is sqlite:///FILE")
    return _sqlite_uri(file.absolute())


def _scheme(uri: str) -> str:
    return uri.split(":", 1)[0].split("+")[0].lower()


def _sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite file. With a driver in it MLflow makes no folder of an encoded name."""
    if not ENCODED.search(str(file)):
        return f"sqlite:///{file}"
    from sqlalchemy.engine import URL

    return URL.create("sqlite+pysqlite", database=str(file)).render_as_string()


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite URI; None for every other."""
    if _scheme(uri) != "sqlite":
        return None
    path: str | None = uri.removeprefix("sqlite:///")
    if path == uri or ENCODED.search(path or ""):
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            path = make_url(uri).database
        except (ArgumentError, ValueError):
            return None
    if not path or path == ":memory:" or path.startswith("file:"):
        return None
    return Path(path)


def not_a_store(file: Path) -> str:
    """Return what speaks against writing a SQLite store here, the end of a sentence; empty if nothing.

    A link is not followed: what it leads to was not named. SQLite would write through a journal's.
    """
    for ending in SQLITE_JOURNALS:
        if file.with_name(file.name + ending).is_symlink():
            return f"has a journal that is a link ({file.name}{ending})"
    try:
        mode = file.lstat().st_mode
    except OSError:
        return ""  # nothing is there; what else is wrong is told when it is opened
    if stat.S_ISLNK(mode):
        return "is a link"
    if not stat.S_ISREG(mode):
        return "is no regular file"
    try:
        with file.open("rb") as opened:
            beginning = opened.read(len(SQLITE))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not beginning:
        return "is an empty file"
    return "" if beginning == SQLITE else "is no SQLite file"


@contextlib.contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Turn every exception inside into TrackingUnavailable."""
    try:
        yield
    except TrackingUnavailable:
        raise
    except Exception as error:
        sentence = f"the tracking store {without_credentials(uri)} {_reason(error)}"
        raise TrackingUnavailable(sentence) from None


def _reason(error: Exception) -> str:
    """Return the end of a sentence: what MLflow, SQLAlchemy or requests says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_credentials(lines[0] if lines else "")
    for words, sentence in SQLITE_ERRORS.items():
        if words in text.lower():
            return sentence
    if isinstance(error, OSError) and error.errno:
        return f"cannot be used: {because(error)}"
    if isinstance(error, ImportError):
        return f"needs a package that is not installed: {text}"
    caused = re.search(r"\(Caused by \w+\(['\"](?:\w+\(.*?\): )?(.*)['\"]\)\)", text)  # by requests
    if caused:
        return f"does not answer: {caused[1].split(chr(39))[-1]}"
    if len(text) > 400:
        text = text[:399] + "…"
    return f"cannot be used: {type(error).__name__}: {text}"


@contextlib.contextmanager
def store_lock(path: Path, store: Path | None = None) -> Iterator[None]:
    """Hold the lock file at `path`: one launcher at a time writes to the store.

    `store` is a SQLite file that must still be there: its folder may be what an unmount uncovered.

    Raises:
        StoreBusy: another process held it for STORE_LOCK_WAIT_S.
        TrackingUnavailable: it is no lock of Ringside's, or the store is gone.
        OSError: the file cannot be made.
    """
    if store:
        _refuse_gone(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with safe_files.locked(path.parent.resolve() / path.name, STORE_LOCK_WAIT_S) as ours:
            if not ours:
                held = f"another process has held {path} for {STORE_LOCK_WAIT_S:.0f} s"
                raise StoreBusy(held)
            yield
    except NotOurs as error:
        raise TrackingUnavailable(f"the store's lock {error}") from None


def _refuse_gone(file: Path) -> None:
    if not file.exists():
        raise TrackingUnavailable(f"the tracking store {file} is gone")


def check_writable(file: Path) -> None:
    """Take and give back SQLite's write lock. Raises sqlite3.Error: locked, read-only, no database."""
    _refuse_gone(file)  # connecting would make an empty one
    connection = sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def silence_mlflow() -> None:
    """Bound MLflow's waiting and silence it, by variables that the user has not set."""
    for name, value in MLFLOW_VARIABLES.items():
        os.environ.setdefault(name, value)
    if "DO_NOT_TRACK" not in os.environ:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for logger in map(logging.getLogger, ("urllib3.connectionpool", "alembic", "mlflow")):
        if logger.level == logging.NOTSET:  # urllib3 announces every retry
            logger.setLevel(logging.CRITICAL)


def connect(uri: str, artifacts: Path) -> "MlflowClient":
    """Return a client of the store; make its SQLite file if it is missing. The caller holds the lock.

    Raises:
        TrackingUnavailable, and what `tracking_errors` turns into it.
    """
    file = sqlite_file(uri)
    if file is not None and (reason := not_a_store(file)):
        raise TrackingUnavailable(f"the tracking store {file} {reason}")
    if artifacts.is_symlink():
        raise TrackingUnavailable(f"{artifacts} is a link; accepted is a folder")
    silence_mlflow()
    import mlflow

    if file is not None:
        if not file.exists():
            _make(file, artifacts)
        check_writable(file)
    elif _scheme(uri) in ("postgresql", "mysql"):  # MLflow alone tries ten times
        from sqlalchemy import create_engine

        engine = create_engine(uri, connect_args={"connect_timeout": CONNECT_WAIT_S})
        engine.connect().close()
        engine.dispose()
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def _make(file: Path, artifacts: Path) -> None:
    """Make MLflow's tables in a temporary file and give it its name: no incomplete store is left.

    It is written to disk once, when it is whole: MLflow's migrations would wait for it hundreds of
    times. The umask says who may read it, as for the records.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import Engine, event

    def without_disk(connection: sqlite3.Connection, record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=MEMORY")

    file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.parent.resolve()  # an output_dir may be a link, to a larger disk
    temporary = folder / f".{file.name}.{secrets.token_hex(4)}"
    descriptor = safe_files.open_own(temporary)
    event.listen(Engine, "connect", without_disk)
    try:
        make: Any = SqlAlchemyStore
        make(_sqlite_uri(temporary), artifacts.absolute().as_uri()).engine.dispose()
        os.fsync(descriptor)
        os.link(temporary, file)  # unlike a rename it fails where something appeared meanwhile
    finally:
        event.remove(Engine, "connect", without_disk)
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
