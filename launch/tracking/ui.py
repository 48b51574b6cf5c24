"""Show the runs of a study in the browser: MLflow's server on this machine, opened at their table.

The server ends with the command, and answers to this machine alone.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Tracking
from conf.secrets import without_credentials
from launch.tracking import store
from launch.tracking.mlflow_run import page_of
from launch.tracking.store import TrackingUnavailable
from launch.tracking.tracker import experiment_name

START_S = 120.0  # for the server to answer; it takes 5 on an idle machine
WAITS = "starting MLflow (up to two minutes on a busy machine); its address follows"
VARIABLES = {"MLFLOW_HOST": "127.0.0.1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
POLL_S = 0.2


def find_study(folder: Path) -> Path:
    """Return the folder itself, if it is a study, or the study in it that was measured last.

    Raises ValueError: there is none.
    """
    if any(folder.glob("*/record.json")):
        return folder.absolute()
    records = sorted(folder.glob("*/*/record.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        expected = "expected the folder of a study, or an output_dir with studies"
        raise ValueError(f"{folder}: holds no study; {expected}")
    return records[-1].parent.parent.absolute()


def show(folder: Path, tracking: Tracking) -> int:
    """Serve MLflow's page of a study until Ctrl-C and return the exit status.

    Raises:
        ValueError: there is no study, no run of it, or MLflow's pages are not installed.
        TrackingUnavailable: the store cannot be read, or the server did not start.
    """
    study = find_study(folder)
    uri = store.store_uri(tracking.uri, study.parent)
    file = store.sqlite_file(uri)
    sync = f"python -m launch sync {shlex.quote(str(study))}"
    if file is not None and not file.exists():
        raise ValueError(f"{file}: no run was written to MLflow yet; to write them: {sync}")
    print(WAITS, file=sys.stderr, flush=True)
    with store.tracking_errors(uri):
        client = store.connect(uri, study.parent / store.ARTIFACTS)
        experiment = client.get_experiment_by_name(experiment_name(tracking, study.name))
    if experiment is None:
        raise ValueError(f"{study}: MLflow has no run of this study; to write them: {sync}")
    page = page_of(experiment.experiment_id)
    if uri.startswith(("http://", "https://")):  # a server that runs already
        _open(f"{without_credentials(uri).rstrip('/')}{page}")
        return 0
    missing = store.missing_pages()
    if missing:
        raise ValueError(f"the pages of MLflow are not installed: {missing}")
    with _server(uri) as address:
        _open(f"{address}{page}")
        print("Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def _open(address: str) -> None:
    print(address, flush=True)
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)


@contextlib.contextmanager
def _server(uri: str) -> Iterator[str]:
    """Start MLflow's server on a free port of this machine and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "ui", "--port", str(port), "--workers", "1"],
        env={**os.environ, **VARIABLES, "MLFLOW_BACKEND_STORE_URI": uri},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        while not _answers(address):
            if server.poll() is not None or time.monotonic() > deadline:
                why = f"to see why: mlflow ui --backend-store-uri {without_credentials(uri)}"
                raise TrackingUnavailable(f"MLflow's server did not start; {why}")
            time.sleep(POLL_S)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # its workers too; it only reads
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1):
            return True
    except OSError:
        return False
