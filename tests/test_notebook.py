"""`from analysis import open_study`: tables, figures and sentences of committed studies, and the example notebook."""

import io
import math
from pathlib import Path

import pytest
from build import record
from build import study as written

import analysis
from analysis import notebook, open_study
from analysis.report.figure import style
from benchmarks.record import metrics

DATA = Path(__file__).parent / "data" / "h200_x2"
FOLDER = Path(analysis.__file__).parent
RATE = "throughput_images_per_second"


@pytest.fixture(scope="module")
def scaling():
    """Two GPUs, each alone and together, with and without an exchange; three runs of each, and the first once more."""
    return open_study(DATA / "scaling")


@pytest.fixture
def odd(tmp_path):
    """A cell with an interval in its run, one whose runs all failed, one that is invalid, and metrics of the user's own."""
    bad = {
        "verdict": "invalid", "codes": {"wrong_sum": "x"}, "unchecked": {}, "limits": {},
        "not_applicable": {},
    }  # fmt: skip
    failure = {"cause": "oom", "rank": 1, "message": "memory ran out \udc80", "log_tail": ""}
    failed = {
        "state": "failed",
        "failure": failure,
        "validity": bad | {"codes": {"failed": "x"}},
        "metrics": {},
    }
    own = {"verdict": 7.0, "a/b": 1.0, "a_b": 2.0}
    records = [
        record(1, [0], 100.0, metrics=own),
        record(2, [0, 1], 1.0) | failed,
        record(3, [0, 1, 2], 300.0, validity=bad),
    ]
    return open_study(written(tmp_path / "odd", records))


def test_a_row_for_each_run_is_its_record(scaling):
    runs = scaling.runs()
    assert list(runs["record_id"]) == [one.record_id for one in scaling.records] and len(runs) == 19
    for column, metric in ((RATE, "throughput/images_per_second"), ("step_ms_p95", "step/ms_p95")):
        assert list(runs[column]) == [one.metrics[metric] for one in scaling.records]
    (drift,) = runs[~runs["counts"]].to_dict("records")
    assert drift["run"].endswith("drift")
    assert "drift" in drift["left_out"]
    assert math.isnan(float(drift["repeat"] or "nan"))
    assert set(runs["cell"]) == set(scaling.cells()["cell"])


def test_what_is_unknown_is_na_and_types_say_what_a_column_holds(scaling, odd):
    cells = scaling.cells()
    kinds = {name: str(kind) for name, kind in cells.dtypes.items()}
    assert {kinds[name] for name in ("cell", "gpus", "verdict", "codes", "strategy", "driver")} == {
        "string"
    }
    assert {kinds[name] for name in ("world_size", "runs", "batch_size", "channels")} == {"Int64"}
    assert kinds["channels_last"] == "boolean"
    assert kinds["scaling_efficiency_share"] == kinds[RATE] == "float64"
    assert str(scaling.runs()["started_at"].dtype) == "datetime64[us, UTC]"
    without = cells[cells["strategy"] == "none"]
    assert without["comm_exchange_ms"].isna().all() and without["strategy_comm_hook"].isna().all()
    assert cells["scaling_efficiency_share"].isna().sum() == 4  # on one GPU there is none

    cells = odd.cells().set_index("gpus")
    assert list(cells["runs"]) == [1, 0, 0] and list(cells["codes"]) == ["", "failed", "wrong_sum"]
    assert (
        cells.loc[["0,1", "0,1,2"], [RATE, "scaling_efficiency_share", "a_b"]].isna().all(axis=None)
    )
    assert cells.loc["0", f"{RATE}_low" : f"{RATE}_high"].isna().all()  # one run
    runs = odd.runs().set_index("gpus")
    assert list(runs["state"]) == ["finished", "failed", "finished"]
    assert list(runs["counts"]) == [True, False, False]
    assert "memory ran out" in runs.loc["0,1", "left_out"]
    assert runs.loc["0,1,2", "codes"] == "wrong_sum"
    assert runs.loc["0", f"{RATE}_within_run_low"] == pytest.approx(99.9)


def test_metrics_of_the_users_own_take_no_column_of_ours(odd):
    first = odd.cells().iloc[0]
    assert (first["verdict"], first["metric_verdict"]) == ("valid", 7.0)
    assert {first["a_b"], first["metric_a_b"]} == {1.0, 2.0}


def test_a_study_without_records_has_empty_tables(tmp_path):
    empty = open_study(tmp_path)
    assert len(empty.cells()) == len(empty.runs()) == 0 and empty.figures == {} and empty.sentences


def test_every_metric_has_a_column_of_its_own_with_its_unit():
    names = {
        name: notebook.column_of_metric(name)
        for name in metrics.METRICS
        if not {"{", "<"} & set(name)
    }
    assert len(set(names.values())) == len(names)
    assert all(one.isidentifier() for one in names.values())
    assert names["comm/exchange_ms"] == "comm_exchange_ms"
    assert names["ranks/spread"] == "ranks_spread_share"
    units = {
        "%": "share ratio fraction", "GB/s": "gb_per_s", "ms": "ms", "µs": "us", "W": "w",
        "MHz": "mhz", "images": "images",
    }  # fmt: skip
    for name, column in names.items():
        words = units.get(metrics.METRICS[name].unit, "").split()
        assert not words or any(word in column for word in words), name
    assert notebook.column_of_option("nccl.NCCL_P2P_LEVEL") == "NCCL_P2P_LEVEL"
    assert notebook.column_of_option("model.name") == "model"


def test_numbers_beyond_pandas_whole_numbers_stay_numbers():
    assert notebook.kind_of([1, None], "string") == "Int64"
    assert notebook.kind_of([2**70], "string") == "float64"
    assert notebook.kind_of([None], "float64") == "float64"
    assert notebook.kind_of([1, "auto"], "float64") == "string"


def test_figures_and_sentences_are_those_of_the_report(scaling):
    assert scaling.sentences == scaling.report.finding
    assert any("99.5" in one for one in scaling.sentences)
    pictures = {picture.name: picture for picture in scaling.report.figures}
    assert (
        set(scaling.figures)
        == set(pictures)
        == set(scaling.captions)
        >= {"rates", "scaling-1", "efficiency-1", "topology-1"}
    )
    assert scaling.figures["efficiency-1"].axes[0].get_ylabel() == "efficiency"
    with style():
        scaling.figures["efficiency-1"].savefig(
            saved := io.BytesIO(), format="svg", metadata={"Date": None}
        )
    assert saved.getvalue().decode() == pictures["efficiency-1"].svg


def test_an_unknown_table_is_named_with_those_that_there_are(scaling):
    with pytest.raises(KeyError, match="no table 'x': the report of scaling has points, fits"):
        scaling.table("x")


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a study"):
        open_study(tmp_path / "none")


FORMATS = ("image/png", "image/svg+xml", "text/html")
NOTEBOOKS = [("example", [2, 0, 3]), ("bootcamp", [2, 2, 5])]
# Numbers of their texts, and what begins the line of an output that has them at its end.
SAID = {
    "example": {"nccl_allreduce": 1.41},
    "bootcamp": {"LOC": 1.24, "2  (c) 0 and 3, PIX     P2P/IPC": 4},
}


@pytest.mark.needs("jupyter")
@pytest.mark.parametrize(("name", "counts"), NOTEBOOKS)
def test_a_notebook_runs_and_shows_its_figures_and_tables(name, counts, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, kernel_name="python3", timeout=200, resources=where).execute()
    outputs = [out for cell in code for out in cell.outputs]
    shown = [out["data"] for out in outputs if "data" in out]
    assert [sum(kind in data for data in shown) for kind in FORMATS] == counts
    assert not [out for out in outputs if out.output_type == "stream" and out.name == "stderr"]
    lines = "\n".join(data["text/plain"] for data in shown).splitlines()
    for start, value in SAID[name].items():
        numbers = [float(line.split()[-1]) for line in lines if line.startswith(start)]
        assert value in numbers, (start, numbers)
