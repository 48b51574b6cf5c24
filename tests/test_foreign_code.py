"""Code that only the record of a study names is never imported: a study may be somebody else's."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from build import ROOT

from analysis import open_study
from analysis.__main__ import main
from benchmarks.record import CellFolder
from conf import groups, targets
from conf.options import Refused
from launch.__main__ import main as launch_main
from launch.study.study_folder import assemble

CELL = ROOT / "tests/data/h200_x2/eager_a/resnet50-nccl_allreduce-gpus0-1-b00fa85d23"
OBEYED = "obeyed"
MODULE = f"open(__file__ + '.{OBEYED}', 'w')\ndef f(*a, **k): open(__file__ + '.{OBEYED}', 'w')\n"
LOOK_ALIKE = "\u0430nalysis"  # its first letter is Cyrillic
WAYS = {
    "a module of the study": "outputs.mine.x.f",
    "a module beside it": "hostile_x:f",
    "a package with our prefix": "analysis_more.x.f",
    "a package named like ours": "analysis.x.f",
    "a look-alike": f"{LOOK_ALIKE}.x.f",
    "a module that ours imports": "analysis.bundle.shutil.rmtree",
    "a function of ours": "conf.targets.locate",
    "a relative name": ".hostile_x.f",
    "a dunder": "analysis.text.__builtins__.exec",
    "a shell": "os.system",
    "a builtin": "builtins.exec",
    "a file": "outputs/mine/x.py:f",
}
PLACES = (
    ("declared", "benchmark", "derive"), ("declared", "benchmark", "section"),
    ("declared", "benchmark", "target"), ("declared", "benchmark", "code"),
    ("declared", "strategy", "target"), ("declared", "strategy", "exchange"),
    ("declared", "strategy", "_target_"), ("model", "builder"), ("data", "loader"),
)  # fmt: skip
STUDY = "outputs/mine"
COMMANDS = {
    "verify": ("verify", STUDY),
    "report": ("report", STUDY),
    "bundle": ("report", STUDY, "--bundle"),
    "seconds": ("seconds", STUDY),
    "predict": ("predict", STUDY),
    "holdout": ("predict", STUDY, "--holdout", "condition"),
    "advise": ("advise", STUDY, "--gpus", "0+1"),
    "compare": ("compare", STUDY, f"{STUDY}-few"),
    "sync": ("sync", f"{STUDY}-few"),
}


def hostile_cell(cell, place, dotted, number):
    """Put a name into one place of a cell; benchmark and strategy are none of this installation."""
    cell["data"] = {"name": "mine", "loader": "torch:load", "options": {}}
    cell["model"]["library"] = "python"
    for group in ("benchmark", "strategy"):
        if place[-1] in ("section", "exchange", "code"):
            cell[group]["name"] = f"mine{number}"
    part = cell
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = {"derive": dotted, "section": dotted} if place[-1] == "code" else dotted
    if place[0] == "declared":
        del cell["data"]


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """A folder with hostile modules, and a study in outputs/ with a record for each name and place."""
    folder = tmp_path_factory.mktemp("hostile")
    number = 0
    for dotted in WAYS.values():
        for place in PLACES:
            copy = shutil.copytree(CELL, folder / STUDY / f"{number:03d}")
            path = copy / "record.json"
            content = json.loads(path.read_text())
            content["record_id"], content["cell_key"] = f"{number:032x}", f"{number:016x}"
            content["cell"]["repeat"] = number
            hostile_cell(content["cell"], place, dotted, number)
            path.write_text(json.dumps(content))
            (copy / "cell.json").write_text(json.dumps(content["cell"]))
            if dotted == WAYS["a module of the study"]:
                shutil.copytree(copy, folder / f"{STUDY}-few" / copy.name)
            number += 1
    (folder / "hostile_x.py").write_text(MODULE)
    for package in (STUDY, "analysis_more", "analysis", "benchmarks", LOOK_ALIKE):
        (folder / package).mkdir(exist_ok=True)
        (folder / package / "x.py").write_text(MODULE)
        if package != STUDY:
            (folder / package / "__init__.py").write_text(MODULE)
    return folder


@pytest.fixture
def world(hostile_folder, monkeypatch):
    """Work in that folder, first on the path; at the end nothing there was imported or called."""
    monkeypatch.chdir(hostile_folder)
    monkeypatch.syspath_prepend(str(hostile_folder))
    located = []
    locate = targets.locate

    def noted(dotted):
        located.append(dotted)
        return locate(dotted)

    monkeypatch.setattr(targets, "locate", noted)
    yield hostile_folder
    declared = set()
    for name in groups.choices("benchmark"):
        declared |= set(groups.choice("benchmark", name).code.values())
    assert set(located) <= declared
    assert list(hostile_folder.rglob(f"*.{OBEYED}")) == []
    for module in [*sys.modules.values()]:
        assert not str(getattr(module, "__file__", "")).startswith(str(hostile_folder)), module


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_a_record_names(world, command, capsys, undrawn):
    arguments = COMMANDS[command]
    if command == "sync":
        status = launch_main([*arguments])
    else:
        status = main([*arguments])
    printed, said = capsys.readouterr()
    assert "Traceback" not in printed + said
    assert status in (0, 1), said
    if command == "verify":
        reason = " is not run (a record names it, and no YAML of this installation does"
        assert printed.count(reason) == len(WAYS)
    if command == "report":
        page = (world / STUDY / "report" / "report.md").read_text()
        assert page.count("This section was not made: ") == len(WAYS)
        assert page.count("is not run (a record names it") == len(WAYS)


def test_a_notebook_and_the_launcher_import_nothing_of_it_either(world, launch):
    os.chdir(world)
    opened = open_study(world / STUDY)
    assert len(opened.runs()) == len(WAYS) * len(PLACES)
    asked = ("gpus=0", "model=fmnist_cnn", "study=mine", "dry_run=true")
    status, _, said = launch(f"output_dir={world / 'outputs'}", *asked)
    assert said == "" and status == 0


@pytest.mark.parametrize("dotted", WAYS.values(), ids=WAYS)
def test_an_attempt_that_a_dead_launcher_left_names_no_code(world, dotted, tmp_path):
    folder = CellFolder(shutil.copytree(CELL, tmp_path / "cell"))
    content = json.loads(folder.record.read_text())
    content["cell"]["declared"]["benchmark"]["derive"] = dotted
    folder.cell.write_text(json.dumps(content["cell"]))
    begun = {"record_id": "0" * 32, "started_at": 1e9, "study": "mine", "sweep_id": ""}
    begun |= {"overrides": [], "drift": False, "environment": {}}
    folder.attempt.write_text(json.dumps(begun))
    record = assemble(folder, "interrupted", None, 2e9, [], CellFolder)
    assert f"{dotted} is not run (a record names it" in record.failure.message


@pytest.mark.parametrize(
    "command", [("analysis", "verify", STUDY), ("launch", "sync", "nowhere")], ids=str
)
def test_modules_of_the_working_folder_are_not_ringsides(hostile_folder, tmp_path, command):
    """`python -m` puts the working folder first on the path: before the libraries and before us."""
    shutil.copytree(hostile_folder / STUDY / "000", tmp_path / STUDY / "000")
    for library in ("numpy", "yaml", "msgspec", "rich", "argparse", "mlflow", "hostile_x"):
        (tmp_path / f"{library}.py").write_text(MODULE)
    for package in ("benchmarks", "conf", "analysis_more"):
        shutil.copytree(hostile_folder / "benchmarks", tmp_path / package)
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=around, capture_output=True, text=True
    )
    assert list(tmp_path.rglob(f"*.{OBEYED}")) == [], done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_yaml_of_ones_own_names_is_run(tmp_path):
    assert groups.declares("derive", "benchmarks.training.derive.throughput")
    assert not groups.declares("section", "benchmarks.training.derive.throughput")
    (tmp_path / "benchmark").mkdir()
    text = "name: mine\n_target_: a.b\ncode: {derive: a.c}\n"
    (tmp_path / "benchmark" / "mine.yaml").write_text(text)
    (tmp_path / "benchmark" / "broken.yaml").write_text("name: [")
    with contextlib.ExitStack() as after:
        after.callback(groups.add_config_dir, [])
        groups.add_config_dir([tmp_path])
        assert groups.declares("derive", "a.c") and not groups.declares("derive", "a.b")
    assert not groups.declares("derive", "a.c")
    with pytest.raises(Refused, match="nowhere: not a folder"):
        groups.add_config_dir([tmp_path / "nowhere"])
    groups.add_config_dir([])
