"""Open MLflow's store within a bounded time, or fail with one sentence.

By itself MLflow 3 retries a dead server for four minutes and a dead database for more than one, and two processes that
make the same SQLite file at once destroy it. Here waiting is bounded, and a new file appears whole or not at all.
"""

import contextlib
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.record import own_files
from benchmarks.record.cell_folder import COPIES
from benchmarks.record.os_errors import because
from benchmarks.record.own_files import NotOurs
from launch.machine.secrets import without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_STORE, ARTIFACTS = "mlflow.db", COPIES  # in output_dir
SQLITE = b"SQLite format 3\0"  # the first bytes of every SQLite file
SQLITE_JOURNALS = ("-journal", "-wal", "-shm")  # what SQLite writes beside it
# A path that means the same in a URI: a plan reads it without SQLAlchemy, whose import takes half a second. MLflow makes the
# folder that it reads after sqlite:/// without decoding it, so %C3%BC for ü gave a second one; after WITH_DRIVER it makes none.
PLAIN, PLAIN_PATH = "sqlite:///", re.compile(r"(?!:memory:$|file:)[^%?@\x00-\x1f\x7f]+")
WITH_DRIVER = "sqlite+pysqlite"
LOCK_WAIT_S = 20.0  # how long to wait for a locked SQLite file; also MLflow's own busy_timeout
STORE_LOCK_WAIT_S = 60.0  # how long another launcher may hold the lock: it may be making the store
# What SQLite says, and what is told instead. The first that is found counts.
SQLITE_SAYS = {
    "database is locked": f"is locked by another process (waited {LOCK_WAIT_S:.0f} s)",
    "database or disk is full": "has no space left on its disk",
    "readonly database": "cannot be written: its file, or its file system, is read-only",
    "disk i/o error": "cannot be written: its disk answers with an input/output error",
    "unable to open database file": "cannot be opened: its folder cannot be written, or no further file may be open",
    "malformed": "is damaged: move its file away, and the next sweep or sync makes it anew from the records",
    "not a database": "is damaged: move its file away, and the next sweep or sync makes it anew from the records",
}
CONNECT_WAIT_S = 20.0  # how long a database server may take to accept a connection
SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "databricks-uc")
ACCEPTED = "sqlite:///FILE, postgresql://…, mysql://…, mssql://…, http://HOST:PORT, https://HOST and databricks"
QUIET = {  # defaults for MLflow's variables; it reads them when it is imported, or at each request
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # at ERROR it prints the traceback of what is reported here as a sentence
}


class TrackingUnavailable(Exception):
    """The store cannot be reached or written; the message is one sentence without credentials."""


class StoreBusy(TrackingUnavailable):
    """Another launcher is writing the store; later it can be written."""


class WrongUri(TrackingUnavailable):
    """No store can have this URI."""


def store_uri(given: str | None, output_dir: Path) -> str:
    """Return the URI to use: the given one with an absolute SQLite path; if none is given, `<output_dir>/mlflow.db`.

    Raises:
        WrongUri: no store can have it.
    """
    plain = output_dir / DEFAULT_STORE if given is None else _plain_path(given)
    if given is None or plain:
        return _uri_of(Path(str(plain)).absolute())
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    scheme = given.split(":", 1)[0].split("+")[0].lower()
    if scheme not in SCHEMES or ("://" not in given and not scheme.startswith("databricks")):
        raise WrongUri(f"tracking.uri={without_credentials(given)}: accepted are {ACCEPTED}")
    if scheme in ("http", "https") and not urlsplit(given).hostname:
        raise WrongUri(
            f"tracking.uri={without_credentials(given)}: accepted is {scheme}://HOST or {scheme}://HOST:PORT"
        )
    if scheme != "sqlite":
        return given
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.database in (None, "", ":memory:"):
        raise WrongUri(f"tracking.uri={without_credentials(given)}: accepted is sqlite:///FILE")
    if str(url.database).startswith("file:"):
        return given
    absolute = url.set(database=str(Path(str(url.database)).absolute()))
    return re.sub("^sqlite:", f"{WITH_DRIVER}:", absolute.render_as_string(hide_password=False))


def _uri_of(file: Path) -> str:
    """Return the URI of a SQLite file, of which MLflow makes no other folder."""
    if not _plain_path(PLAIN + str(file)):
        from sqlalchemy.engine import URL

        return URL.create(WITH_DRIVER, database=str(file)).render_as_string()
    return PLAIN + str(file)


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite URI; None for every other."""
    if not uri.lower().startswith("sqlite"):
        return None
    if plain := _plain_path(uri):
        return Path(plain)
    from sqlalchemy.engine import make_url

    database = str(make_url(uri).database)
    return None if database.startswith("file:") else Path(database)


def _plain_path(uri: str) -> str | None:
    """Return the path of a SQLite URI that needs no decoding; None for every other URI."""
    path = uri.removeprefix(PLAIN)
    return path if path != uri and PLAIN_PATH.fullmatch(path) else None


def not_a_store(file: Path) -> str:
    """Return what speaks against writing a SQLite store here, the end of a sentence; empty for a new file and for a store.

    A link is not followed: what it leads to was not named. SQLite would write through one in the place of a journal.
    """
    for beside in SQLITE_JOURNALS:
        if file.with_name(file.name + beside).is_symlink():
            return f"has a journal that is a link ({file.name}{beside})"
    try:
        mode = file.lstat().st_mode
    except OSError:
        return ""  # nothing is there; what else is wrong is told when it is opened
    if not stat.S_ISREG(mode):
        return "is a link" if stat.S_ISLNK(mode) else "is no regular file"
    try:
        with file.open("rb") as opened:
            first = opened.read(len(SQLITE))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if first == SQLITE else "is an empty file" if not first else "is no SQLite file"


@contextlib.contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Turn every exception inside into TrackingUnavailable: a projection that fails must not cost a measurement."""
    try:
        yield
    except TrackingUnavailable:
        raise
    except Exception as error:
        raise TrackingUnavailable(
            f"the tracking store {without_credentials(uri)} {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    """Return the end of a sentence: what an exception of MLflow, SQLAlchemy or requests says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_credentials(lines[0] if lines else "")
    if said := next((said for known, said in SQLITE_SAYS.items() if known in text.lower()), ""):
        return said
    if isinstance(error, OSError) and error.errno:
        return f"cannot be used: {because(error)}"
    if isinstance(error, ImportError):
        return f"needs a package that is not installed: {text}"
    if cause := re.search(
        r"\(Caused by \w+\(['\"](?:\w+\(.*?\): )?(.*)['\"]\)\)", text
    ):  # requests' way to say why
        return (
            f"does not answer: {cause[1].split(chr(39))[-1]}"  # of one inside another the inner one
        )
    return (
        f"cannot be used: {type(error).__name__}: {text if len(text) <= 400 else text[:399] + '…'}"
    )


@contextlib.contextmanager
def store_lock(path: Path, store: Path | None = None) -> Iterator[None]:
    """Hold the lock file at `path`: one launcher at a time writes to the store.

    `store` is a SQLite file that must still be there: its folder may be what an unmount uncovered.

    Raises:
        StoreBusy: another process held it for STORE_LOCK_WAIT_S.
        TrackingUnavailable: it is no lock of Ringside's.
        OSError: the file cannot be made.
    """
    if store:
        refuse_gone(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with own_files.locked(path.parent.resolve() / path.name, STORE_LOCK_WAIT_S) as ours:
            if not ours:
                raise StoreBusy(f"another process has held {path} for {STORE_LOCK_WAIT_S:.0f} s")
            yield
    except NotOurs as error:
        raise TrackingUnavailable(f"the store's lock {error}") from None


def silence_mlflow() -> None:
    """Bound MLflow's waiting and silence it, by variables of this process that the user has not set."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if "DO_NOT_TRACK" not in os.environ:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for logger in map(logging.getLogger, ("urllib3.connectionpool", "alembic", "mlflow")):
        if logger.level == logging.NOTSET:  # urllib3 announces every retry
            logger.setLevel(logging.CRITICAL)


def connect(uri: str, artifacts: Path) -> "MlflowClient":
    """Return a client of the store, whose SQLite file is made if it is missing. The caller holds the lock.

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
    elif uri.split(":", 1)[0].split("+")[0].lower() in ("postgresql", "mysql", "mssql"):
        _check_server(uri)
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def refuse_gone(file: Path) -> None:
    """Refuse a SQLite store that is no longer there. Raises TrackingUnavailable."""
    if not file.exists():
        raise TrackingUnavailable(f"the tracking store {file} is gone")


def check_writable(file: Path) -> None:
    """Take and give back SQLite's write lock. Raises sqlite3.Error: locked for LOCK_WAIT_S, read-only, no database."""
    refuse_gone(file)  # connecting would make an empty one
    with contextlib.closing(
        sqlite3.connect(file, timeout=LOCK_WAIT_S, isolation_level=None)
    ) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _make(file: Path, artifacts: Path) -> None:
    """Make MLflow's tables in a temporary file and give it its name: a killed launcher leaves no incomplete store.

    It is written to disk once, when it is whole: MLflow's migrations would wait for it hundreds of times.
    The umask says who may read it, as for the records, which hold everything that the store does.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import Engine, event

    def without_disk(connection: sqlite3.Connection, record: object) -> None:
        for setting in ("synchronous=OFF", "journal_mode=MEMORY"):
            connection.execute(f"PRAGMA {setting}")

    file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.parent.resolve()  # an output_dir may be a link, to a larger disk
    temporary = folder / f".{file.name}.{secrets.token_hex(4)}"
    made = own_files.open_own(temporary)
    event.listen(Engine, "connect", without_disk)
    try:
        make: Any = SqlAlchemyStore
        make(_uri_of(temporary), artifacts.absolute().as_uri()).engine.dispose()
        os.fsync(made)
        os.link(temporary, file)  # unlike a rename it fails where something appeared meanwhile
    finally:
        event.remove(Engine, "connect", without_disk)
        os.close(made)
        temporary.unlink(missing_ok=True)


def _check_server(uri: str) -> None:
    """Connect once, within CONNECT_WAIT_S: MLflow alone tries ten times. Raises what the driver raises."""
    from sqlalchemy import create_engine

    engine = create_engine(uri)
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            engine.connect().close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(CONNECT_WAIT_S)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {CONNECT_WAIT_S:.0f} s")
    engine.dispose()
    if errors:
        raise errors[0]
