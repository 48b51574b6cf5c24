"""Rates against an option that is a number: which lines are drawn, what the caption says, and when there is no figure."""

import csv
from pathlib import Path

import pytest
from build import EVIL, record, study
from pages import report

from analysis.findings.examine import findings_of
from analysis.report.figure import style
from analysis.report.sections.scaling_section import rates_by_option as by_option
from analysis.study.study import Study, open_study

GRAPHS = Path(__file__).parent / "data" / "h200_x1" / "graphs"


def section(found):
    with style():
        return by_option(found, findings_of(found))


def cells(tmp_path, *rows):
    """Return a study of single runs: (GPUs, images per second, what else the cell asks for)."""
    made = [
        record(number, gpus, rate, cell=asked) for number, (gpus, rate, asked) in enumerate(rows)
    ]
    return open_study(study(tmp_path, made))


def batches(*sizes, gpus=(0,), **asked):
    return [(list(gpus), 10.0 * size, {"batch_size": size, **asked}) for size in sizes]


def test_ways_of_making_steps_fast_by_batch_size():
    inception, resnet = section(Study.of(open_study(GRAPHS).records)).figures
    assert resnet.caption.startswith(
        "Images per second by batch size, resnet50 on gpus 0. Hollow markers: suspect runs. Highest: "
    )
    assert "eager 4,683 (batch 256); graph 4,782 (batch 256)" in resnet.caption
    assert len(resnet.data.rows) == len(inception.data.rows) == 20
    low, high = resnet.figure.axes[0].get_xlim()
    assert 8 < low < 16 and 256 < high < 512, "the curves fill the axes"


WITHOUT_FIGURE = {
    "two values make no line": batches(8, 16),
    "words": [([0], 1.0, {"optimize": how}) for how in ("eager", "compile", "max")],
    "two seeds": [([0], 10.0, {"seed": seed, "batch_size": 8 + seed}) for seed in (1, 2)],
    "it follows from the batch of all": [
        ([0, 1], 10.0 * size, {"batch_size": size, "global_batch_size": 2 * size})
        for size in (8, 16, 32)
    ],
}


@pytest.mark.parametrize("rows", WITHOUT_FIGURE.values(), ids=WITHOUT_FIGURE)
def test_what_is_no_number_or_asks_nothing_has_no_figure(rows, tmp_path):
    assert section(cells(tmp_path, *rows)) is None


def test_lines_are_of_the_gpus_with_most_cells_and_the_rest_is_told(tmp_path):
    several = [
        one
        for px in range(7)
        for one in batches(8, 16, 32, gpus=(0, 1), channels_last=px % 2 == 0, precision=f"p{px}")
    ]
    found = section(cells(tmp_path, *batches(8, 16, 32), *several))
    (picture,) = found.figures
    assert (
        "on gpus 0,1." in picture.caption
        and "1 more line is only in points.csv." in picture.caption
    )
    assert len({row[0] for row in picture.data.rows}) == 6


def test_accumulation_is_an_axis_though_the_images_of_a_step_grow_with_it(tmp_path):
    rows = [([0, 1], 900.0 + k, {"batch_size": 64 * k, "accumulate": k}) for k in (1, 2, 4)]
    (picture,) = section(cells(tmp_path / "accumulate", *rows)).figures
    assert picture.caption.startswith("Images per second by accumulate, resnet50 on gpus 0,1.")
    assert [row[1] for row in picture.data.rows] == [1, 2, 4]
    periods = [{"strategy": {"name": "local_sgd", "period": period}} for period in (1, 4, 16)]
    rows = [([0, 1], 900.0, asked) for asked in periods]
    (picture,) = section(cells(tmp_path / "period", *rows)).figures
    assert picture.caption.startswith("Images per second by period, ")


def test_two_options_have_a_figure_each_and_names_stay_text(tmp_path):
    asked = [(size, cap) for size in (8, 16, 32) for cap in (1.0, 2.0, 25.0)]
    strategy = {"name": EVIL}
    rows = [
        ([0], size + cap, {"batch_size": size, "strategy": {**strategy, "bucket_cap_mb": cap}})
        for size, cap in asked
    ]
    folder = study(
        tmp_path / "study",
        [record(n, gpus, rate, cell=one) for n, (gpus, rate, one) in enumerate(rows)],
    )
    report(folder, tmp_path / "out")
    of_files = sorted((tmp_path / "out" / "figures").glob("by-option-*.csv"))
    keys = [next(csv.reader(path.read_text(encoding="utf-8").splitlines()))[1] for path in of_files]
    assert keys == ["strategy.bucket_cap_mb", "batch_size"]
    assert EVIL not in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
