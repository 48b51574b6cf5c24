"""What a real `mlflow ui` shows of a study, in Debian's chromium: the pictures of launch/tracking/README.md.

    pip install -e '.[test,ui]' && python -m pytest -n 0 tests/test_mlflow_ui.py

RINGSIDE_SCREENS=tests/data/screens keeps the pictures.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from build import ROOT
from pages import report

from benchmarks.record import read_study
from conf.schema import Tracking
from launch.tracking.mlflow_run import page_of
from launch.tracking.tracker import Tracker, sync

DATA = ROOT / "tests" / "data" / "h200_x4"
WIDTH, HEIGHT = 1500, 900
PANEL = 1158  # pixels from the left, where MLflow's assistant begins
CONTENT = (450, 230, PANEL, HEIGHT)  # behind menus and headings
INK = 150  # dark pixels of CONTENT: a blank preview has 56, a page whose table is folded 268, a report 12,655
TRIES = 8  # chromium's virtual time does not wait for the page inside a preview: one picture in five is blank, more on busy cores

pytestmark = pytest.mark.needs("chromium", "mlflow-ui")


class Study:
    """A study in a store: its page and its runs."""

    def __init__(self, folder):
        sync(folder)
        tracker = Tracker(Tracking(), folder.parent, folder.name)
        self.page, self.experiment = page_of(tracker._experiment), tracker._experiment
        every = tracker._client.search_runs([self.experiment])
        self.cells = {run.data.tags["ringside.record_id"]: run.info.run_id for run in every
                      if run.data.tags["ringside.kind"] == "cell"}  # fmt: skip
        parents = [run.data.tags.get("mlflow.parentRunId") for run in every]
        self.largest = max(filter(None, parents), key=parents.count)

    def run(self, run_id, page=""):
        """The address of a page of a run."""
        return f"/#/experiments/{self.experiment}/runs/{run_id}{page}?workflowType=machine_learning"


@pytest.fixture(scope="module")
def ui(tmp_path_factory):
    """A store with two studies, served: (address, settings, scaling)."""
    folder = tmp_path_factory.mktemp("store")
    settings, scaling = (
        Path(shutil.copytree(DATA / name, folder / name)) for name in ("settings", "scaling")
    )
    report(settings, settings / "report")
    studies = Study(settings), Study(scaling)
    typed = [sys.executable, "-m", "launch", "ui", str(scaling)]
    with subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.PIPE, text=True) as command:
        address, _, page = command.stdout.readline().strip().partition("/#")
        try:
            assert f"/#{page}" == studies[1].page
            yield address, *studies
        finally:
            command.terminate()
            assert command.wait(30) == 0
    with pytest.raises(OSError, match="refused"):  # nothing is left of the server
        urllib.request.urlopen(address)


def browse(folder, address, height, *asked):
    """What chromium prints of a page once its scripts have run."""
    shutil.rmtree(folder / "profile", ignore_errors=True)  # it would change the page
    command = ["chromium", "--headless", "--no-sandbox", f"--window-size={WIDTH},{height}"]
    command += ["--virtual-time-budget=30000", f"--user-data-dir={folder}/profile", *asked, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def shown(address, path, name, folder, height=HEIGHT, words=()):
    """The text of a page once these words are there; its picture goes to RINGSIDE_SCREENS, if set.

    A preview is a page of its own inside: its text is not there, but its picture is.
    """
    for _ in range(TRIES):
        text = browse(folder, address + path, height, "--dump-dom")
        if all(word in text for word in words):
            break
    assert not [word for word in words if word not in text]
    screens = os.environ.get("RINGSIDE_SCREENS")
    if screens:
        keep_picture(address + path, folder, height, Path(screens) / f"{name}.png")
    return text


def keep_picture(address, folder, height, path):
    from PIL import Image  # comes with matplotlib

    for _ in range(TRIES):
        browse(folder, address, height, f"--screenshot={folder / path.name}")
        with Image.open(folder / path.name) as image:
            cut = image.crop((0, 0, PANEL, height))
        colours = cut.convert("L").crop(CONTENT).getcolors(256)
        ink = sum(count for count, colour in colours if colour < 100)
        if ink > INK:
            break
    assert ink > INK, "a blank page"
    path.parent.mkdir(exist_ok=True)
    cut.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def in_order(text, words):
    """Whether a page has all these words, each behind the one before."""
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


def test_the_printed_address_opens_the_cells_with_their_figures(ui, tmp_path):
    address, _, scaling = ui
    text = shown(address, scaling.page, "mlflow_cells", tmp_path, words=("0.9952968",))
    assert "Ringside: runs, fastest first" in text and "13</strong> matching runs" in text.replace(
        "<span>", ""
    )
    rates = ("25737.9", "18676.2", "12904.2", "9520.7")
    assert in_order(text, rates), "no click shows images/s, and the fastest comes first"
    for name in ("resnet50 · nccl_allreduce · gpus 0,1,2,3", "scaling/efficiency", "0.9952968"):
        assert name in text


def test_the_charts_are_those_that_matter(ui, tmp_path):
    address, _, scaling = ui
    words = ("scaling/efficiency", "throughput/images_per_second")
    page = f"{scaling.page}&compareRunsMode=CHART"
    shown(address, page, "mlflow_charts", tmp_path, 1500, words)


def test_parallel_coordinates_compare_the_settings_of_a_sweep_at_once(ui, tmp_path):
    address, settings, _ = ui
    asked = {
        "runs": json.dumps([*settings.cells.values()]),
        "experiments": json.dumps([settings.experiment]),
    }
    text = shown(
        address, f"/#/compare-runs?{urllib.parse.urlencode(asked)}", "mlflow_compare", tmp_path
    )
    assert "Parallel Coordinates Plot" in text and "unknown" not in text
    for name in ("nccl.algo", "nccl.p2p_level", "throughput/images_per_second"):
        assert name in text


def test_the_parent_of_a_sweep_has_its_table_its_figures_and_its_report(ui, tmp_path):
    address, settings, _ = ui
    text = shown(address, settings.run(settings.largest), "mlflow_parent", tmp_path)
    for name in ("P2P_LEVEL=LOC", "best/images_per_second", "cells/valid", "NVIDIA H200"):
        assert name in text
    text = shown(
        address,
        settings.run(settings.largest, "/artifacts/report/index.html"),
        "mlflow_report",
        tmp_path,
    )
    assert "report/index.html" in text


def test_a_cell_has_its_machine(ui, tmp_path):
    address, _, scaling = ui
    records, _ = read_study(DATA / "scaling")
    record = next(record for record in records if record.cell.gpus == (0, 1))
    words = ("NVIDIA H200", "580.159.04", "throughput/images_per_second")
    page = scaling.run(scaling.cells[record.record_id])
    shown(address, page, "mlflow_child", tmp_path, words=words)
