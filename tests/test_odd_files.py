"""Pipes, devices, links and a damaged record in a study: that record is named, the others are read."""

import json
import os
import shutil
from pathlib import Path

import pytest

from analysis.__main__ import main
from benchmarks.record import record_paths
from launch.__main__ import main as launch_main

STUDY = Path(__file__).parent / "data" / "h200_x2" / "eager_a"
CELLS = len(list(STUDY.glob("*/record.json")))
CELL = "resnet50-nccl_allreduce-gpus0-1-b00fa85d23"


def put_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.fixture
def study(tmp_path):
    return shutil.copytree(STUDY, tmp_path / "outputs" / "study")


def commands(study, capsys):
    """What each command answers: {command: (status, what it printed, what it said on stderr)}."""
    results = {}
    for command in ("verify", "report", "seconds"):
        status = main([command, str(study)])
        results[command] = (status, *capsys.readouterr())
    for _, printed, said in results.values():
        assert "Traceback" not in printed + said
    assert results["report"][0] == results["seconds"][0] == 0
    return results


OF_RECORDS = ("ranks/0.jsonl", "gpus.jsonl", "cell.json", "record.json", "attempt.json")
BESIDE = ("journal.jsonl", f"{CELL}/topology.txt", f"{CELL}/profile/timeline.svg")


@pytest.mark.parametrize("put", [put_pipe, put_device])
def test_an_odd_file_ends_its_record_only(study, capsys, undrawn, put):
    odd = [CELL, *sorted(path.name for path in study.iterdir() if path.name != CELL)]
    for cell, name in zip(odd, OF_RECORDS, strict=False):
        path = study / cell / name
        path.with_name(f"{path.name}.gz").unlink(missing_ok=True)
        put(path)
    status, printed, _ = commands(study, capsys)["verify"]
    assert status == 1
    for cell in odd[: len(OF_RECORDS)]:
        named = [line for line in printed.splitlines() if line.startswith(f"wrong: {cell}: ")]
        assert len(named) == 1 and "is not a regular file" in named[0], cell
    assert f" of {CELLS} records recomputed" in printed
    assert int(printed.splitlines()[-1].split()[0]) >= CELLS - len(OF_RECORDS)


@pytest.mark.parametrize("put", [put_pipe, put_device])
def test_odd_files_beside_the_records_are_not_read(study, capsys, undrawn, put):
    for name in BESIDE:
        (study / name).parent.mkdir(exist_ok=True)
        put(study / name)
    assert f"{CELLS} of {CELLS} records recomputed" in commands(study, capsys)["verify"][1]


def test_a_link_to_the_study_in_itself_adds_no_record(study, capsys, undrawn):
    (study / "loop").symlink_to(".")
    (study / CELL / "up").symlink_to("..")
    (study / "again").symlink_to(CELL)
    (study.parent / "other").mkdir()
    (study.parent / "other" / "linked").symlink_to(study / CELL)
    assert len(record_paths(study)) == CELLS
    assert all(path.parent.parent == study for path in record_paths(study))
    assert len(record_paths(study.parent / "other")) == 1, "a link out of a study counts"
    status, printed, _ = commands(study, capsys)["verify"]
    assert status == 0 and f"{CELLS} of {CELLS} records recomputed" in printed


def test_sync_names_what_it_cannot_read_and_projects_the_others(output_dir, capsys):
    study = output_dir / "study"
    for path in sorted(STUDY.glob("*/"))[:4]:
        shutil.copytree(path, study / path.name)
    damaged, piped, *_ = sorted(path.parent for path in record_paths(study))
    content = json.loads((damaged / "record.json").read_text())
    content["series"]["x"] = [["inf", 1.0]]
    (damaged / "record.json").write_text(json.dumps(content))
    put_pipe(piped / "record.json")
    (study / "loop").symlink_to(".")
    assert launch_main(["sync", str(study)]) == 1
    printed, said = capsys.readouterr()
    assert printed == "2 runs written to MLflow, 0 there before, 2 not written\n"
    assert (
        f"{damaged}/record.json: record {content['name']} cannot be written to MLflow: series x has a step inf"
        in said
    )
    assert f"{piped}/record.json: no readable record" in said and said.count("\n") == 2
