"""What a real `mlflow ui` shows of a study, in Debian's chromium: README's screenshots.

    pip install -e '.[test,ui]' && python -m pytest -n 0 tests/test_mlflow_ui.py

RINGSIDE_SCREENS=tests/data/screens keeps the pictures.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from analysis.report.build import report
from launch.tracking.sync import sync

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "tests" / "data" / "h200_x4" / "settings"
WIDTH, HEIGHT = 1500, 900
PANEL = 1158  # pixels from the left, where MLflow's assistant begins
CONTENT = (450, 230, PANEL, HEIGHT)  # behind menus and headings
INK = 150  # dark pixels of CONTENT: a blank preview has 56, a page whose table is folded 268, a report 12,655
TRIES = 4  # chromium's virtual time does not wait for the page inside a preview: one picture in five is blank

pytestmark = pytest.mark.needs("chromium", "mlflow-ui")


@pytest.fixture(scope="module")
def ui(tmp_path_factory):
    """A store with the records of one sweep, served: (address, experiment id, parent run id, child run ids)."""
    folder = tmp_path_factory.mktemp("store")
    study = Path(shutil.copytree(SETTINGS, folder / "settings"))
    report(study, study / "report")
    sync(study)
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(store)
    (experiment,) = [one for one in client.search_experiments() if one.name == "ringside/settings"]
    everyone = client.search_runs([experiment.experiment_id])
    children = [run for run in everyone if "mlflow.parentRunId" in run.data.tags]
    parents = {run.data.tags["mlflow.parentRunId"] for run in children}
    largest = max(parents, key=lambda one: sum(run.data.tags["mlflow.parentRunId"] == one for run in children))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield address, experiment.experiment_id, largest, [run.info.run_id for run in children]
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def shown(address, path, name, folder):
    """The text of a page once its scripts have run; its picture goes to RINGSIDE_SCREENS, if that is set.

    A preview is a page of its own inside: its text is not there, but its picture is.
    """
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        f"--window-size={WIDTH},{HEIGHT}",
        "--virtual-time-budget=30000",
    ]
    text = subprocess.run(
        [*command, "--dump-dom", address + path], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    from PIL import Image  # comes with matplotlib

    picture = folder / f"{name}.png"
    for _ in range(TRIES):
        subprocess.run(
            [*command, f"--screenshot={picture}", address + path], capture_output=True, timeout=120, check=True
        )
        with Image.open(picture) as image:
            cut = image.crop((0, 0, PANEL, HEIGHT))
        ink = sum(count for count, colour in cut.convert("L").crop(CONTENT).getcolors(256) if colour < 100)
        if ink > INK:
            break
    assert ink > INK, "a blank page"
    if kept := os.environ.get("RINGSIDE_SCREENS"):
        Path(kept).mkdir(exist_ok=True)
        cut.save(Path(kept) / f"{name}.png", optimize=True)
    return text


def test_parallel_coordinates_compare_the_settings_of_a_sweep_at_once(ui, tmp_path):
    address, experiment, _, children = ui
    asked = {"runs": json.dumps(children), "experiments": json.dumps([experiment])}
    text = shown(address, f"/#/compare-runs?{urllib.parse.urlencode(asked)}", "mlflow_compare", tmp_path)
    assert "Parallel Coordinates Plot" in text
    for name in ("nccl.algo", "nccl.p2p_level", "throughput/images_per_second"):
        assert name in text


def test_the_parent_of_a_sweep_has_its_table_and_its_report(ui, tmp_path):
    address, experiment, parent, _ = ui
    run = f"/#/experiments/{experiment}/runs/{parent}"
    assert "P2P_LEVEL=LOC" in shown(address, run, "mlflow_parent", tmp_path)
    text = shown(address, f"{run}/artifacts/report/index.html", "mlflow_report", tmp_path)
    assert "report/index.html" in text
