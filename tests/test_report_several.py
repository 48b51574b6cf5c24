"""A report of several studies: real records of two machines, nothing merged, names that tell, and the page in a browser."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from pages import picture, printed, widths
from records import EVIL, record, study

from analysis.__main__ import main
from analysis.findings.between_studies import Asked, differing, open_sides
from analysis.findings.examine import findings_of
from analysis.report.build import write
from analysis.report.several.build import default_folder, examine_several
from analysis.study.names import legend_names
from analysis.study.study import open_study

DATA = Path(__file__).parent / "data"
TWO, FOUR = DATA / "h200_x2" / "scaling", DATA / "h200_x4" / "waterfall"
NAMES = ("2 × H200 on vm", "4 × H200 on vm")


def rows(folder, table):
    with (folder / "tables" / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of two machines, as files."""
    out = tmp_path_factory.mktemp("several") / "report"
    told, _ = examine_several([Asked.of(str(TWO)), Asked.of(str(FOUR))])
    write(told, out)
    return out


def test_what_differs_comes_first_and_then_curves_and_cells(written):
    text = (written / "report.md").read_text(encoding="utf-8").replace("\u00a0", " ")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == ["The finding", "What differs between them", "Efficiency on each", "The same cells beside each other",
                      "Each by itself", "What was read"]  # fmt: skip
    one, other = rows(written, "differs")
    assert (one["side"], other["side"]) == NAMES and (one["GPUs"], other["GPUs"]) == (
        "2 × NVIDIA H200",
        "4 × NVIDIA H200",
    )
    assert one["date"] == "2026-11-21" and "driver" not in one and "driver 580.159.04" in text
    finding = text[text.index("## The finding") : text.index("## What differs")]
    assert (
        "99.5 % (99.0 to 99.9) with 2 GPUs on 2 × H200 on vm" in finding
        and "slower in 4" in finding
    )
    assert "not measured in turn" in finding
    for name in ("efficiency-1", "efficiency-2", "cells", "differences"):
        assert (
            ET.parse(written / "figures" / f"{name}.svg")
            and (written / "figures" / f"{name}.pdf").exists()
        )


def test_every_number_is_that_of_its_own_study(written):
    """Curves, intervals and floors are what each study says alone: nothing is shared."""
    found = {(row["side"], row["curve"], row["gpus"]): row for row in rows(written, "points")}
    assert len(found) == 6 + 10
    for name, folder in zip(NAMES, (TWO, FOUR), strict=True):
        own = open_study(folder)
        for curve in findings_of(own).scaling.curves:
            for point in curve.points:
                row = found[
                    name, f"resnet50 · {point.key['strategy.name']}", ",".join(map(str, point.gpus))
                ]
                assert float(row["images_per_second"]) == point.rate.value
                assert float(row["images_per_second_low"]) == point.rate.low
                if point.efficiency is not None:
                    assert float(row["efficiency"]) == point.efficiency.value
                    assert float(row["efficiency_high"]) == point.efficiency.high
    cells = rows(written, "cells")
    assert [row["verdict"] for row in cells] == ["", "slower"] * 4 and {
        row["runs"] for row in cells
    } == {"3"}
    assert all(float(row["difference_high"]) < 0 for row in cells if row["verdict"])


V100, A100 = "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-40GB"


def machine(host, name, nccl):
    """The environment of an eight-GPU machine."""
    gpus = [{"id": number, "uuid": f"GPU-{host}-{number}", "name": name} for number in range(8)]
    return {"host": host, "topology": "", "links": {"0-1": "NV1", "0-2": "NV2"}, "versions": {"torch": "2.8.0", "nccl": nccl},
            "gpu": {"driver": "550.1", "gpus": gpus}}  # fmt: skip


def of(host, name, nccl, cells):
    made = []
    for number, (gpus, rate) in enumerate(cells, 1):
        made.append(record(number, gpus, rate, environment=machine(host, name, nccl)))
        made[-1]["environment"]["planned_uuids"] = [f"GPU-{host}-{gpu}" for gpu in gpus]
        made[-1] |= {"ranks": [], "record_id": f"{host}{number}".encode().hex().zfill(32)}
    return made


def test_machines_have_telling_names_and_borrow_no_baseline(tmp_path):
    """DGX-1 against DGX A100; only the first has one-GPU cells, so the second has no efficiency."""
    old = of("dgx1", V100, "2.18.0", [([0], 400.0), ([1], 402.0), ([0, 1], 760.0)])
    new = of("a100", A100, "2.28.9", [([0, 1], 2000.0)])
    first, second = study(tmp_path / "old", old), study(tmp_path / "new", new)
    told, sides = examine_several([Asked.of(str(first)), Asked.of(str(second))])
    assert [side.name for side in sides] == [
        "8 × Tesla V100-SXM2-32GB on dgx1",
        "8 × A100-SXM4-40GB on a100",
    ]
    (cells,) = [one for section in told.sections for one in section.tables if one.name == "cells"]
    efficiencies = [row[5] for row in cells.rows]
    assert efficiencies[0] == pytest.approx(760 / 800) and efficiencies[1] is None
    assert [row[10] for row in cells.rows] == ["", "cannot tell"], "single runs: no verdict"
    (differs,) = [
        one for section in told.sections for one in section.tables if one.name == "differs"
    ]
    assert [column.heading for column in differs.columns] == [
        "machine or study",
        "GPUs",
        "NCCL",
        "host",
        "GPU UUIDs",
    ]
    # The same records copied into one folder are split again.
    both = study(tmp_path / "both", [*old, *new])
    assert {side.name for side in open_sides([Asked.of(str(both))])[0]} == {
        side.name for side in sides
    }


def test_two_studies_of_cpu_workers_have_no_gpus(tmp_path):
    no_gpu = {"gpu": {}, "links": None, "topology": "", "cpu": {"model": "EPYC", "cores": 2}}
    asked = []
    for name in ("a", "b"):
        cells = [([0], 100.0), ([1], 101.0), ([0, 1], 180.0)]
        made = [
            record(n, *cell, cell={"device": "cpu"}, environment=no_gpu)
            for n, cell in enumerate(cells, 1)
        ]
        asked.append(Asked.of(str(study(tmp_path / name, made))))
    told, sides = examine_several(asked)
    apart, shared = differing(sides)
    assert shared["GPUs"] == "none" and "CPU worker" not in f"{apart}{shared}"
    headings = {
        column.heading
        for section in told.sections
        for table in section.tables
        for column in table.columns
    }
    captions = [one.caption for section in told.sections for one in section.pictures]
    assert "CPU workers" in headings and any(
        "of all CPU workers of the cell" in one for one in captions
    )


def test_labels_of_the_user_name_the_sides_and_an_output_dir_gives_its_studies(tmp_path, capsys):
    for name in ("eager_a", "eager_b"):
        shutil.copytree(DATA / "h200_x2" / name, tmp_path / "outputs" / name)
    cell = next((tmp_path / "outputs" / "eager_a").glob("*/record.json")).parent
    shutil.copytree(
        cell, tmp_path / "outputs" / "mlartifacts" / ("a" * 32) / "artifacts"
    )  # MLflow's copy of a record
    before, after = (
        f"{label}={tmp_path / 'outputs' / name}"
        for label, name in (("before", "eager_a"), ("after", "eager_b"))
    )
    assert main(["report", before, after, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [side["name"] for side in told["sides"]] == ["before", "after"]
    assert any(
        "Against before, 6 cells: no difference seen in 6." in one for one in told["finding"]
    )
    page = Path(told["report"])
    assert page.parent.parent == tmp_path / "outputs" and page.parent.name.startswith(
        "report-eager_a-eager_b-"
    )
    folder = Asked.of(str(tmp_path / "outputs"))
    assert [side.name for side in open_sides([folder])[0]] == [
        "2 × H200 on vm · eager_a",
        "2 × H200 on vm · eager_b",
    ]
    assert default_folder([folder]).parent == (tmp_path / "outputs").resolve()


def test_the_default_folder_is_of_these_studies_alone(tmp_path):
    """Equal names, other folders: another report."""
    made = [
        study(tmp_path / where / "scaling", [record(1, [0], 100.0)]) for where in ("a", "b", "c")
    ]
    asked = [Asked.of(str(one)) for one in made]
    first, other = default_folder(asked[:2]), default_folder([asked[0], asked[2]])
    assert first.parent == other.parent == (tmp_path / "a").resolve() and first != other
    assert first == default_folder(asked[:2]) and first.name.startswith("report-scaling-scaling-")


def test_a_legend_cuts_what_is_common_and_not_what_tells_apart():
    machines = [
        f"resnet50 · eager · machine 2 × H200 on vm · {gpu}"
        for gpu in ("GPU-bee7a704", "GPU-709d8bee")
    ]
    assert [*legend_names(machines, 24).values()] == ["GPU-bee7a704", "GPU-709d8bee"]
    mixed = [*machines, "resnet50 · compile · machine 2 × H200 on vm · GPU-bee7a704"]
    found = legend_names(mixed, 24)
    assert len(set(found.values())) == 3 and found[mixed[2]].startswith("compile")
    alike = [
        "a very long name that is the same up to here 1",
        "a very long name that is the same up to here 2",
    ]
    assert len(set(legend_names(alike, 24).values())) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "nowhere"), "nowhere: no such folder"),
        (("a", "empty"), "empty: holds no record; accepted is the folder of a study"),
        (("a", "b", "a"), "a: named twice; accepted are different studies"),
        ((".", "a"), "a: named twice; accepted are different studies"),
        (("a", "b", "--bundle"), "--bundle takes one study, not 2"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments, said, tmp_path, capsys):
    for name in ("a", "b"):
        study(tmp_path / name, [record(1, [0], 100.0)])
    (tmp_path / "empty").mkdir()
    given = [one if one.startswith("-") else str(tmp_path / one) for one in arguments]
    assert main(["report", *given]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and told.err.count("\n") == 1


def test_studies_with_nothing_in_common_and_hostile_names_give_a_page(tmp_path):
    one = study(tmp_path / "one", [record(1, [0], 100.0, strategy=EVIL)])
    other = study(
        tmp_path / "other",
        [record(1, [1], 5.0, validity={"verdict": "invalid", "codes": {}, "unchecked": {}})],
    )
    told, _ = examine_several([Asked(EVIL, one), Asked(EVIL + " again", other)])
    page = write(told, tmp_path / "out").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "No cell was measured by two of them" in page


@pytest.mark.needs("chromium")
def test_the_page_fits_a_phone_a_dark_screen_and_paper(written, tmp_path):
    page = written / "index.html"
    for wide, room in widths(page, tmp_path):
        assert wide <= room
    light = picture(page, "report_several", tmp_path)
    dark = picture(page, "report_several_dark", tmp_path, dark=True)
    phone = picture(page, "report_several_phone", tmp_path, phone=True)
    corners = [one.getpixel((1, 1)) for one in (light, dark, phone)]
    assert corners[0] == corners[2] == (255, 255, 255) and max(corners[1]) < 64
    for one, name in ((light, "light"), (dark, "dark"), (phone, "phone")):
        ink = len(one.getcolors(1 << 24))
        assert ink > 200, f"{name}: a blank page"
    assert (
        printed(page, tmp_path).startswith(b"%PDF")
        and printed(page, tmp_path).count(b"/Type /Page\n") < 12
    )
