"""Open MLflow's store within a bounded time, or fail with one sentence.

By itself MLflow 3 retries a dead server for four minutes, and two processes that make the same
SQLite file at once destroy it. Here waiting is bounded, launchers write one after the other, and a
new file appears whole or not at all.
"""

import contextlib
import importlib.util
import logging
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.record import safe_files
from benchmarks.record.folder import COPIES
from conf.secrets import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_STORE, ARTIFACTS = "mlflow.db", COPIES  # in output_dir
SQLITE = b"SQLite format 3\0"  # the first bytes of every SQLite file
LOCK_WAIT_S = 20.0  # for a locked SQLite file; also MLflow's own busy_timeout
STORE_LOCK_WAIT_S = 60.0  # for another launcher that holds the lock: it may be making the store
SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "databricks-uc")
ACCEPTED = (
    "sqlite:///FILE, postgresql://…, mysql://…, mssql://…, http://HOST:PORT, https://HOST or "
    "databricks"
)
# Defaults for MLflow's variables; it reads them when it is imported, or at each request.
MLFLOW_VARIABLES = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # at ERROR it prints a traceback beside our sentence
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Of a path in a URI: SQLAlchemy encodes them, and its import takes half a second.
ENCODED = re.compile(r"[%?@\x00-\x1f\x7f]")


class TrackingUnavailable(Exception):
    """The store cannot be reached or written; the message is one sentence without credentials."""


class WrongUri(TrackingUnavailable):
    """No store can have this URI."""


def store_uri(given: str | None, output_dir: Path) -> str:
    """Return the URI to use, of a SQLite file with an absolute path.

    Raises WrongUri: no store can have it.
    """
    if given is None:
        return _sqlite_uri((output_dir / DEFAULT_STORE).absolute())
    wrong = f"tracking.uri={without_credentials(given)}"
    scheme = _scheme(given)
    if scheme not in SCHEMES or ("://" not in given and not scheme.startswith("databricks")):
        raise WrongUri(f"{wrong}: expected {ACCEPTED}")
    try:
        has_host = urlsplit(given).hostname and urlsplit(given).port != 0
    except ValueError:  # a port above 65535, half a pair of brackets
        has_host = False
    if scheme in ("http", "https") and not has_host:
        raise WrongUri(f"{wrong}: expected {scheme}://HOST or {scheme}://HOST:PORT")
    if scheme != "sqlite":
        return given
    file = sqlite_file(given)
    if file is None:
        raise WrongUri(f"{wrong}: expected sqlite:///FILE")
    return _sqlite_uri(file.absolute())


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


def missing_pages() -> str:
    """Return the command that installs the pages of MLflow; empty where they are."""
    return "" if importlib.util.find_spec("flask") else "pip install -e '.[ui]'"


def not_a_store(file: Path) -> str:
    """Return what speaks against a SQLite store here, the end of a sentence; empty if nothing.

    A link is not followed: what it leads to was not named.
    """
    try:
        if file.is_symlink():
            return "is a link"
        if not file.exists():
            return ""
        if not file.is_file():
            return "is not a regular file"
        with file.open("rb") as opened:
            beginning = opened.read(len(SQLITE))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if beginning != SQLITE:
        return "is not an SQLite file"
    return ""


def _scheme(uri: str) -> str:
    return uri.split(":", 1)[0].split("+")[0].lower()


def _sqlite_uri(file: Path) -> str:
    """Return the URI of a file. With a driver in it MLflow makes no folder of an encoded name."""
    if not ENCODED.search(str(file)):
        return f"sqlite:///{file}"
    from sqlalchemy.engine import URL

    return URL.create("sqlite+pysqlite", database=str(file)).render_as_string()


@contextlib.contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Turn every exception inside into TrackingUnavailable, with its first line."""
    try:
        yield
    except TrackingUnavailable:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = without_credentials(" ".join(lines[:1]))[:400]
        if "database is locked" in reason:
            reason = f"it is locked by another process (waited {LOCK_WAIT_S:.0f} s)"
        else:
            reason = f"{type(error).__name__}: {reason}"
        sentence = f"the tracking store {without_credentials(uri)} cannot be used: {reason}"
        raise TrackingUnavailable(sentence) from None


@contextlib.contextmanager
def writing(uri: str, lock: Path) -> Iterator[None]:
    """Hold the lock file of a store, one launcher at a time; a SQLite file is there and writable.

    Raises TrackingUnavailable: another process held it for STORE_LOCK_WAIT_S, it is not a lock of
    Ringside's, or the store is gone, locked or read-only.
    """
    file = sqlite_file(uri)
    if file is not None and not file.exists():  # its folder may be what an unmount uncovered
        raise TrackingUnavailable(f"the tracking store {file} is gone")
    with tracking_errors(uri), store_lock(lock):
        if file is not None:
            check_writable(file)
        yield


@contextlib.contextmanager
def store_lock(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`. Raises TrackingUnavailable, NotOurs, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with safe_files.locked(path.parent.resolve() / path.name, STORE_LOCK_WAIT_S) as ours:
        if not ours:
            held = f"another process has held {path} for {STORE_LOCK_WAIT_S:.0f} s"
            raise TrackingUnavailable(held)
        yield


def check_writable(file: Path) -> None:
    """Take and give back SQLite's write lock. Raises sqlite3.Error."""
    connection = sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def silence_mlflow() -> None:
    """Bound MLflow's waiting and silence it, by variables that the user has not set."""
    for name, value in MLFLOW_VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in ("urllib3.connectionpool", "alembic", "mlflow"):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:  # urllib3 announces every retry
            logger.setLevel(logging.CRITICAL)


def connect(uri: str, artifacts: Path) -> "MlflowClient":
    """Return a client of the store, whose lock the caller holds; make a missing SQLite file.

    Raises TrackingUnavailable, and what `tracking_errors` turns into it.
    """
    file = sqlite_file(uri)
    if file is not None and not_a_store(file):
        raise TrackingUnavailable(f"the tracking store {file} {not_a_store(file)}")
    if artifacts.is_symlink():
        raise TrackingUnavailable(f"{artifacts} is a link; expected a folder")
    silence_mlflow()
    import mlflow

    if file is not None:
        if not file.exists():
            _make(file, artifacts)
        check_writable(file)
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
