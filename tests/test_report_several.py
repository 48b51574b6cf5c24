"""A report of several studies: the sections of one, each study with its own baselines."""

import json
import re
import shutil
from pathlib import Path

import pytest
from build import DATA, EVIL, record, study
from pages import rows_of as rows
from pages import widths

from analysis.__main__ import main
from analysis.findings.examine import findings_of
from analysis.report.build import default_folder, examine_several
from analysis.report.report_files import write
from analysis.study.names import legend_names
from analysis.study.study import open_study
from analysis.study.study_inputs import StudyPath, differing, open_inputs

TWO, FOUR = DATA / "h200_x2" / "scaling", DATA / "h200_x4" / "waterfall"
NAMES = ("2 × H200 on vm", "4 × H200 on vm")


def examined(*folders):
    return examine_several([StudyPath.of(str(folder)) for folder in folders])[0]


def table(content, name):
    (found,) = [each for each in content.tables if each.name == name]
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of two machines, as files."""
    out = tmp_path_factory.mktemp("several") / "report"
    write(examined(TWO, FOUR), out)
    return out


def test_what_differs_comes_first_and_then_the_sections_of_one_study(written):
    text = (written / "report.md").read_text(encoding="utf-8").replace("\u00a0", " ")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:3] == ["The finding", "The studies side by side", "Configurations"]
    facts = {row["fact"]: (row["study_1"], row["study_2"]) for row in rows(written, "differs")}
    assert facts["GPUs"] == ("2 × NVIDIA H200", "4 × NVIDIA H200") and "driver" not in facts
    assert facts["ranks.threads"] == ("16", "32"), "what only the records of the cells say"
    finding = text[text.index("## The finding") : text.index("## The studies")]
    compared = "4 × H200 on vm against 2 × H200 on vm, 4 configurations: slower in 3, not significant in 1."
    assert compared in finding
    cells = rows(written, "cells-1")
    assert {row["runs"] for row in cells} == {"3, 3"}
    for row in cells:
        assert (row["verdict"] == "slower") == (float(row["difference_high"]) < 0)
        assert (row["verdict"] == "slower") == (not row["smallest"]), "what was seen needs none"


def test_every_number_is_that_of_its_own_study(written):
    points = {(row["curve"], row["gpus"]): row for row in rows(written, "points")}
    assert len(points) == 6 + 10
    for name, folder in zip(NAMES, (TWO, FOUR), strict=True):
        for curve in findings_of(open_study(folder)).scaling.curves:
            for point in curve.points:
                gpus = ",".join(map(str, point.gpus))
                row = points[f"{point.key['strategy.name']} · {name}", gpus]
                assert float(row["images_per_second"]) == point.rate.value
                assert float(row["images_per_second_low"]) == point.rate.low
                if point.efficiency is not None:
                    assert float(row["efficiency"]) == point.efficiency.value
                    assert float(row["efficiency_high"]) == point.efficiency.high


def of_machine(host, name, nccl, cells):
    """Records of an eight-GPU machine."""
    gpus = [{"id": number, "uuid": f"GPU-{host}-{number}", "name": name} for number in range(8)]
    made = []
    for number, (subset, rate) in enumerate(cells, 1):
        environment = {"host": host, "topology": "", "links": {"0-1": "NV1", "0-2": "NV2"}}
        environment |= {"gpu": {"driver": "550.1", "gpus": gpus}}
        environment |= {"versions": {"torch": "2.8.0", "nccl": nccl}}
        made.append(record(number, subset, rate, environment=environment))
        made[-1]["environment"]["planned_uuids"] = [f"GPU-{host}-{gpu}" for gpu in subset]
        made[-1] |= {"ranks": [], "record_id": f"{host}{number}".encode().hex().zfill(32)}
    return made


def test_machines_have_telling_names_and_borrow_no_baseline(tmp_path):
    """DGX-1 against DGX A100; only the first has one-GPU cells, so the second has no efficiency."""
    cells = [([0], 400.0), ([1], 402.0), ([0, 1], 760.0)]
    old = of_machine("dgx1", "Tesla V100-SXM2-32GB", "2.18.0", cells)
    new = of_machine("a100", "NVIDIA A100-SXM4-40GB", "2.28.9", [([0, 1], 2000.0)])
    first, second = study(tmp_path / "old", old), study(tmp_path / "new", new)
    content = examined(first, second)
    names = ["8 × Tesla V100-SXM2-32GB on dgx1", "8 × A100-SXM4-40GB on a100"]
    assert content.study == " and ".join(names)
    rows = table(content, "points").to_json()
    points = {(row["curve"], row["gpus"]): row["efficiency"] for row in rows}
    assert points[names[0], "0,1"] == pytest.approx(760 / 800) and points[names[1], "0,1"] is None
    verdicts = [row["verdict"] for row in table(content, "cells-1").to_json()]
    assert verdicts == ["cannot tell"], "single runs: no verdict"
    facts = [row["fact"] for row in table(content, "differs").to_json()]
    assert facts == ["GPUs", "NCCL", "host", "GPU UUIDs"]
    # The same records copied into one folder are split again.
    both = study(tmp_path / "both", [*old, *new])
    assert {side.name for side in open_inputs([StudyPath.of(str(both))])[0]} == set(names)


def test_two_studies_of_cpu_workers_have_no_gpus(tmp_path):
    no_gpu = {"gpu": {}, "links": {}, "topology": "", "cpu": {"model": "EPYC", "cores": 2}}
    made = []
    for number, (gpus, rate) in enumerate((([0], 100.0), ([1], 101.0), ([0, 1], 180.0)), 1):
        made.append(record(number, gpus, rate, cell={"device": "cpu"}, environment=no_gpu))
    folders = [study(tmp_path / name, made) for name in ("a", "b")]
    by_folder = open_inputs([StudyPath.of(str(folder)) for folder in folders])
    sides = [side for of_folder in by_folder for side in of_folder]
    apart, shared = differing(sides)
    assert shared["GPUs"] == "none" and "CPU worker" not in f"{apart}{shared}"
    headings = {column.heading for each in examined(*folders).tables for column in each.columns}
    assert "CPU workers" in headings


def test_labels_of_the_user_name_the_studies_and_an_output_dir_gives_its_studies(tmp_path, capsys):
    for name in ("eager_a", "eager_b"):
        shutil.copytree(DATA / "h200_x2" / name, tmp_path / "outputs" / name)
    cell = next((tmp_path / "outputs" / "eager_a").glob("*/record.json")).parent
    # MLflow's copy of a record
    shutil.copytree(cell, tmp_path / "outputs" / "mlartifacts" / ("a" * 32) / "artifacts")
    studies = [f"before={tmp_path}/outputs/eager_a", f"after={tmp_path}/outputs/eager_b"]
    assert main(["report", *studies, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["study"] == "before and after"
    compared = "after against before, 6 configurations: cannot tell in 6."
    assert summary["finding"][1].startswith(compared)
    page = Path(summary["report"])
    assert page.parent.parent == tmp_path / "outputs"
    assert page.parent.name.startswith("report-eager_a-eager_b-")
    folder = StudyPath.of(str(tmp_path / "outputs"))
    names = [side.name for side in open_inputs([folder])[0]]
    assert names == ["2 × H200 on vm · eager_a", "2 × H200 on vm · eager_b"]
    assert default_folder([folder]).parent == (tmp_path / "outputs").resolve()


def test_the_default_folder_is_of_these_studies_alone(tmp_path):
    """Equal names, other folders: another report."""
    made = [study(tmp_path / name / "scaling", [record(1, [0], 100.0)]) for name in "abc"]
    inputs = [StudyPath.of(str(folder)) for folder in made]
    first, other = default_folder(inputs[:2]), default_folder([inputs[0], inputs[2]])
    assert first.parent == other.parent == (tmp_path / "a").resolve() and first != other
    assert first == default_folder(inputs[:2]) and first.name.startswith("report-scaling-scaling-")


def test_a_legend_cuts_what_is_common_and_not_what_tells_apart():
    gpus = ("GPU-bee7a704", "GPU-709d8bee")
    machines = [f"resnet50 · eager · machine 2 × H200 on vm · {gpu}" for gpu in gpus]
    assert [*legend_names(machines, 24).values()] == [*gpus]
    mixed = [*machines, "resnet50 · compile · machine 2 × H200 on vm · GPU-bee7a704"]
    names = legend_names(mixed, 24)
    assert len(set(names.values())) == 3 and names[mixed[2]].startswith("compile")
    alike = [f"a very long name that is the same up to here {number}" for number in (1, 2)]
    assert len(set(legend_names(alike, 24).values())) == 2


def test_studies_with_nothing_in_common_and_hostile_names_give_a_page(tmp_path):
    invalid = {"verdict": "invalid", "codes": {}, "unchecked": {}}
    first = study(tmp_path / "one", [record(1, [0], 100.0, strategy=EVIL)])
    other = study(tmp_path / "other", [record(1, [1], 5.0, validity=invalid)])
    content, _ = examine_several([StudyPath(EVIL, first), StudyPath(EVIL + " again", other)])
    page = write(content, tmp_path / "out").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "have no configuration in common" in page


@pytest.mark.needs("chromium")
def test_the_page_fits_a_phone(written, tmp_path):
    for wide, room in widths(written / "index.html", tmp_path):
        assert wide <= room
