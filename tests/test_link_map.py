"""The map of links in the report: what ranks timed is the link, and forecasts rest on one host."""

import dataclasses
import shutil
import statistics

import pytest
from build import ROOT, make_cell, make_record, strategy_of

from analysis.findings.examine import findings_of
from analysis.report.figure import style
from analysis.report.sections.link_map_section import (
    FORECAST_GB_PER_S,
    FORECAST_MS,
    where_each_wins,
)
from analysis.study.study import Study
from benchmarks.record import read_study

GRADIENT_BYTES, BARE_MS, PERIOD = 10_000_000, 100.0, 8
WAYS = {
    "nccl_allreduce": {"name": "nccl_allreduce"},
    "local_sgd": {"name": "local_sgd", "period": PERIOD},
    "fp8": {"name": "nccl_allreduce", "comm_hook": "fp8"},
}


def record(number, study, hosts, way, step_ms, link=None):
    """A run of one rank on each host; `link` is GB/s and the ms of one message."""
    cell = make_cell((0,), strategy_of(WAYS[way]), 16, hosts=hosts)
    rows = []
    for size in (65_536, GRADIENT_BYTES) if link else ():
        rows.append({"bytes": size, "ms": 2 * link[1] + size / link[0] / 1e6})
    return make_record(
        cell=cell, cell_key=cell.key, record_id=f"{number:032x}", study=study, failure=None,
        model={"gradient_bytes": GRADIENT_BYTES}, started_at=1.8e9 + number,
        tables={"bucket_exchange": {"operation": "all_reduce", "rows": rows}} if rows else {},
        metrics={
            "throughput/images_per_second": 16e3 * len(hosts) / step_ms,
            "step/ms_median": step_ms, "strategy/cost_ms": step_ms - BARE_MS,
        },
    )  # fmt: skip


def records_of(*links):
    """A study of one host, and one of each link: (GB/s, ms, {way: how much longer than it says})."""
    records = [record(at, "alone", ("a",), way, BARE_MS) for at, way in enumerate(WAYS)]
    for gb_per_s, ms, longer in links:
        wire_ms = 2 * ms + GRADIENT_BYTES / gb_per_s / 1e6
        for way, share in {"nccl_allreduce": 1, "local_sgd": PERIOD, "fp8": 4}.items():
            step_ms = (BARE_MS + wire_ms / share) * longer.get(way, 1.0)
            link = None if way == "fp8" else (gb_per_s, ms)
            name = f"{gb_per_s:g} {ms:g}"
            records.append(record(len(records), name, ("a", "b"), way, step_ms, link))
    return records


def map_of(records):
    study = Study.of(records, by_study=True)
    with style():
        return where_each_wins(study, findings_of(study))


SLOW, FAST = (0.01, 1.0, {}), (10.0, 0.1, {"local_sgd": 1.05})  # slower than it should be


def test_the_fastest_of_each_link_stands_where_its_ranks_measured_it():
    section = map_of(records_of(SLOW, FAST))
    ((figure,), (table,)) = section.figures, section.tables
    assert section.finding == (
        "Fastest: local_sgd behind 1 link and nccl_allreduce (comm_hook=fp8) behind 1 link; "
        "as forecast behind 1 of 2.",
    )
    measured = {row[3]: row for row in figure.data.rows if row[3]}
    ratio, ms, fastest, _ = measured["0.01 1"]
    assert ratio == pytest.approx(0.1, rel=0.02) and ms == pytest.approx(1.0, rel=0.01)
    assert "local_sgd" in fastest and "nccl_allreduce" in measured["10 0.1"][2]
    grid = [row for row in figure.data.rows if not row[3]]
    assert len(grid) == len(FORECAST_GB_PER_S) * len(FORECAST_MS)
    assert "local_sgd" in min(grid)[2]  # where wires are slowest
    assert len(table.rows) == 6 and table.columns[-1].key == "error"
    for _, name, *_, error in table.rows:  # no forecast knows fp8
        assert error is None if "fp8" in name else abs(error) < 0.06, name


def test_another_one_than_was_forecast_is_crossed():
    for second, crosses in (((0.1, 1.0, {}), 0), (FAST, 1)):
        axes = map_of(records_of(SLOW, second)).figures[0].figure.axes[0]
        assert sum(line.get_marker() == "x" for line in axes.lines) == crosses


def test_without_two_links_or_one_host_there_is_no_map():
    records = records_of(SLOW, FAST)
    assert map_of(records_of(SLOW)) is None
    assert map_of([each for each in records if each.study != "alone"]) is None
    for lacking in ({"tables": {}}, {"model": {"gradient_bytes": 0}}):
        assert map_of([dataclasses.replace(each, **lacking) for each in records]) is None


def test_the_map_of_forty_links_says_what_results_say(tmp_path):
    """Measured by `FULL=1 launch/recipes/where_each_wins.sh` on two cores."""
    shutil.unpack_archive(ROOT / "tests" / "data" / "where_each_wins.tar.xz", tmp_path)
    records = []
    for folder in sorted(tmp_path.iterdir()):
        records += read_study(folder)[0]
    section = map_of(records)
    errors = [abs(row[-1]) for row in section.tables[0].rows]
    as_forecast = section.finding[0].rpartition("behind ")[2]
    assert (len(records), len(errors), as_forecast) == (205, 200, "38 of 40.")
    within = sum(error <= 0.2 for error in errors)
    page = " ".join((ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").split())
    assert f"behind 38; {within} of 200 rates lie within 20 %" in page
    assert f"half of them within {100 * statistics.median(errors):.1f} %" in page
