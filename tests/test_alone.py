"""A study of cells of one GPU alone: its report asks nothing about links, losses and scaling, which it cannot answer."""

import pytest
from build import record, study

from analysis.report.build import examine

SAID = {"step_ms": 54.0, "null_step_ms": 55.0, "made_at": 0.0, "low": None, "high": None, "cost_ms": 0.5,
        "null_cost_ms": 0.4, "basis": "interpolated", "widest": "step of one GPU"}  # fmt: skip
OTHER = {"model": {"name": "vgg16"}}


def told(folder, records):
    """The report of some records, and its sections by their anchors."""
    found, _ = examine(study(folder / "alone", records))
    return found, {one.anchor: one for one in found.sections}


def of_batches(**changes):
    """A record of one GPU for each of three batch sizes."""
    return [
        record(place, [0], 900.0, cell={"batch_size": size}, **changes)
        for place, size in enumerate((16, 8, 32))
    ]


def test_no_section_asks_what_one_gpu_alone_cannot_answer(tmp_path):
    found, sections = told(tmp_path, of_batches())
    assert not sections.keys() & {"waterfall", "wires", "strategies", "forecasts"}
    (table,) = (one for one in sections["scaling"].tables if one.rows)
    assert "Efficiency" not in table.caption
    assert (
        not {"scaling", "how many"} & {one.heading for one in table.columns if one.shown}
        and len(table.rows) == 3
    )
    assert [row[0] for row in table.rows] == ["batch 8", "batch 16", "batch 32"], (
        "in whatever order they ran"
    )
    assert [one.name for one in found.figures] == ["by-option-1", "topology-1"], (
        "nothing is drawn against numbers of GPUs"
    )
    assert not any("waterfall=true" in command for command in found.unsaid.values())


def test_what_was_not_measured_is_one_list_with_a_command_for_each_option(tmp_path):
    """No section stands empty."""
    pair = record(9, [0, 3], 1800.0, overrides=["-m", "gpus=0+3", "repeats=1", "study=s"])
    found, sections = told(tmp_path, [pair])
    assert not sections.keys() & {"waterfall", "wire-lines", "settings"}
    commands = dict(zip(found.unsaid.values(), found.unsaid, strict=True))
    missing = "python launch.py -m gpus=0+3 study=s repeats=5"
    assert commands[missing] == "Run-to-run variation: every configuration ran once."
    each = commands["python launch.py -m repeats=1 study=s gpus=each"]
    assert each.startswith("Efficiency of ") and "Exposed communication of " in each


def test_forecasts_made_before_cells_of_one_gpu_are_shown(tmp_path):
    records = of_batches(predicted=SAID)
    _, sections = told(tmp_path, records)
    (line,) = sections["forecasts"].lines
    assert line.startswith("Forecast: 3 of 3 runs before they ran: steps were off by ")
    assert len(sections["forecasts"].tables[0].rows) == 3


def test_every_model_of_one_gpu_has_its_rate_on_the_first_screen(tmp_path):
    found, _ = told(tmp_path, [record(0, [0], 900.0), record(1, [0], 300.0, cell=OTHER)])
    assert (
        found.finding[0]
        == "1 GPU trains resnet50 at 900 images/s. Also measured: vgg16 at 300 images/s."
    )
    pairs = [record(0, [0, 3], 900.0), record(1, [0, 3], 300.0, cell=OTHER)]
    several, _ = told(tmp_path / "more", pairs)
    assert several.finding[0].endswith(". Also measured: vgg16 at 300 images/s.")
    several, _ = told(tmp_path / "apart", [pairs[0], record(1, [1], 300.0, cell=OTHER)])
    assert several.finding[0].endswith(". Also measured: resnet50 at 900 images/s on gpus 0,3.")


@pytest.mark.parametrize(("gpus", "offered"), [(1, False), (2, True)])
def test_more_gpus_are_offered_where_the_machine_has_more(tmp_path, gpus, offered):
    listed = [
        {"id": number, "uuid": f"GPU-{number}", "name": "NVIDIA H200"} for number in range(gpus)
    ]
    found, _ = told(tmp_path, [record(0, [0], 900.0, environment={"gpu": {"gpus": listed}})])
    assert any("gpus=scale" in line for line in found.finding) == offered
