"""What a report tells of benchmarks that train nothing; tables come from records, so anything may be in them."""

import re

import pytest
from build import EVIL, record, study
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import report

from analysis.findings.examine import Findings
from analysis.report import summary
from analysis.report.build import benchmark_sections
from analysis.report.charts import window
from analysis.report.figure import style
from analysis.study.intervals import Estimate
from analysis.study.study import open_study

UNTRAINED = {
    "model": {"name": "none", "builder": "none"},
    "strategy": {"name": "none"},
    "nccl": {},
    "labels": [],
}


def of(number, benchmark, gpus, metrics, tables, name=""):
    made = record(number, gpus, 1.0, cell=UNTRAINED | {"benchmark": {"name": benchmark}})
    words = f"{benchmark} · gpus {','.join(map(str, gpus))}{name}"
    return made | {"name": words, "metrics": metrics, "tables": tables}


def sentences(known):
    return summary.sentences(known, Findings(), benchmark_sections(known, Findings()))


def run(ranks, busbws):
    rows = []
    for power, busbw in enumerate(busbws):
        measured = {"time_us": 10.0 * power + 5, "algbw": busbw, "busbw": busbw, "wrong": 0}
        rows.append({"bytes": 4**power * 1024, "out_of_place": measured})
    table = {"collective": "all_reduce", "ranks": ranks, "rows": rows, "avg_busbw": 3.5}
    return {"nccl-tests": {"runs": [table]}}


LINK = {"rows": [
    {"operation": "both", "memory": "pinned", "at_once": 2, "gb_per_s": [30.0, 31.0], "sum_gb_per_s": 60.0},
    {"operation": EVIL, "memory": "host", "at_once": 1, "gb_per_s": [float("nan"), 5.0], "sum_gb_per_s": None},
]}  # fmt: skip
COPIES = [{"gb_per_s": 30.0, "alone_gb_per_s": 40.0}, {"gb_per_s": 39.0, "alone_gb_per_s": 40.0}]
ROUND = {"pattern": "matching", "number": 0, "total_gb_per_s": 69.0, "copies": COPIES}
TOGETHER = {"p2p_concurrent": {"rows": [ROUND]}}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = [
        of(1, "host_link", [0, 1], {"host_link/all_both_gb_per_s": 60.0}, {"host_link": LINK}),
        of(2, "collectives", [0, 1], {"collectives/busbw_gb_per_s": 4.0, "collectives/alpha_us": 5.0}, run(2, [1.0, 2.0, 4.0])),
        of(3, "collectives", [0, 1], {"collectives/busbw_gb_per_s": 5.0}, run(2, [1.0, 3.0, 5.0]), " · ALGO=Ring"),
        of(4, "p2p", [0, 1], {"p2p/unidirectional_enabled_gb_per_s": 38.0}, TOGETHER),
        of(5, "jacobi", [0, 1], {"jacobi/efficiency": 0.965, "jacobi/speedup": 1.93, "jacobi/seconds": 2.0}, {}),
    ]  # fmt: skip
    made[2]["cell"]["nccl"] = {"NCCL_ALGO": "Ring"}
    folder = study(tmp_path_factory.mktemp("links") / "links", made)
    return folder, report(folder, folder / "report")


def test_the_first_numbers_are_the_finding(written):
    assert sentences(open_study(written[0])) == [
        "Copies between the host and 2 GPUs, in GB/s. All GPUs at once, in total: 60.0 each way with "
        "both directions at once.",
        "Busbw of the largest message on 2 GPUs: ALGO=Ring 5.00 GB/s; then the default 4.00 GB/s.",
        "Copies between 2 GPUs (median of the pairs): P2P enabled: 38.0 GB/s one way.",
        "Jacobi on 2 GPUs: 2.00 s, 1.93 times as fast as one, efficiency 96.5\N{NO-BREAK SPACE}%.",
        "4 benchmarks ran on 2 GPUs of a machine with 4 × NVIDIA H200.",
    ]
    page = written[1].read_text()
    assert "All GPUs at once, in total: 60.0 each way" in page
    assert 'id="scaling"' not in page and 'id="waterfall"' not in page, "nothing was trained"
    assert not re.search(r"</h2>\s*</section>", page), "a heading alone"


def said(folder, records):
    lines = sentences(open_study(study(folder, records)))
    *found, what, following = [line.replace("\u00a0", " ") for line in lines]
    assert what.endswith(" of a machine with 4 × NVIDIA H200.") and following.startswith("To ")
    return found


def test_each_benchmark_of_links_has_a_sentence_with_the_spread_of_its_runs(tmp_path):
    words = {
        "p2p": {"words": {"enabled": "peer access", "disabled": "copies that the driver stages"}}
    }
    one_way, small = (
        f"p2p/{name}" for name in ("unidirectional_disabled_gb_per_s", "latency_cpu_disabled_us")
    )
    made = [
        *(of(n, "jacobi", [0, 1], {"jacobi/seconds": s, "jacobi/speedup": 1 / s, "jacobi/efficiency": 0.5 / s}, {})
          for n, s in ((1, 0.5), (2, 0.52), (3, 0.51), (6, 0.51))),
        of(4, "jacobi", [0], {"jacobi/seconds": 1.0, "jacobi/copy_share": 0.98}, {}),
        of(5, "p2p", [0, 1], {one_way: 38.0, small: 17.0, "p2p/matching_gb_per_s": 70.0, "p2p/matching_share": 0.9}, words),
    ]  # fmt: skip
    for n in range(4):
        made[n]["cell"]["repeat"] = n
    assert said(tmp_path / "links", made) == [
        "Jacobi on 2 GPUs: 0.510 (0.481 to 0.540) s, 1.96 (1.85 to 2.08) times as fast as one, "
        "efficiency 98.0 % (92.5 to 103.9).",
        "Copies between 2 GPUs (median of the pairs): copies that the driver stages: 38.0 GB/s one way, 17.0 µs for a small copy.",
        "Simultaneous copies, total rate (slowest copy, in % of its rate alone): each GPU in one pair 70.0 GB/s (90.0 %).",
    ]
    foreign = of(6, "mine", [0, 1], {"mine/both_gb_per_s": 3.0, "mine/other": 1.0}, {})
    assert said(tmp_path / "input_files", [foreign]) == ["mine · gpus 0,1: both 3.00 GB/s."]
    alone = "Jacobi on one GPU: 1.00 s, the stencil at 98.0 % of a copy's rate."
    assert said(tmp_path / "one", made[4:5]) == [alone]


def test_a_curve_for_each_cell_of_collectives(written):
    drawing = (written[0] / "report" / "figures" / "collectives.svg").read_text()
    assert "ALGO=Ring" in drawing and "the default" in drawing and "16 KiB" in drawing


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["rows", "runs", "copies", "gb_per_s", "bytes", "out_of_place", "time_us", "busbw", "at_once", "pattern"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def test_the_fastest_of_three_settings_is_drawn_at_each_size(tmp_path):
    busbws = {"": [1.0, 2.0, 6.0], "Ring": [0.9, 3.0, 5.0], "Tree": [0.5, 0.6, 0.7]}
    made = []
    for number, (algo, row) in enumerate(busbws.items(), 2):
        made.append(of(number, "collectives", [0, 1], {}, run(2, row), f" · ALGO={algo}"))
        made[-1]["cell"]["nccl"] = {"NCCL_ALGO": algo} if algo else {}
    for count, fastest in ((3, [1.0, 3.0, 6.0]), (2, [])):
        known = open_study(study(tmp_path / str(count), made[:count]))
        (figure,) = benchmark_sections(known, Findings())["collectives"].figures
        rows = [row for row in figure.data.rows if row[0] == "the fastest setting"]
        assert [row[2].value for row in rows] == fastest


TABLES = [("host_link", "host_link"), ("collectives", "nccl-tests"), ("p2p", "p2p_concurrent")]


@settings(derandomize=True, max_examples=60)
@given(
    st.sampled_from(TABLES), st.dictionaries(st.sampled_from(["rows", "runs"]), JSON, max_size=2)
)
def test_any_table_gives_a_section_or_a_damaged_record(tmp_path_factory, kind, content):
    made = of(1, kind[0], [0, 1], {}, {kind[1]: content})
    known = open_study(study(tmp_path_factory.mktemp("any") / "any", [made]))
    # It may hold something else than such a table: `$.tables[...].rows` is not a list.
    if not known.records:
        assert "$.tables" in str(known.unreadable[0])
        return
    with style():
        (section,) = benchmark_sections(known, Findings()).values()
    is_made = section.title == "Links measured alone"
    assert is_made or section.lines[0].startswith("This section cannot be made: ")


@pytest.mark.parametrize(
    ("estimates", "expected"),
    [
        ([Estimate(10.0, 9.0, 10.5), Estimate(20.0, 19.0, 22.0)], (8.35, 22.65)),
        ([Estimate(10.0, -100, 100), Estimate(20.0)], (-110.0, 110.0)),
        ([Estimate(0.0)], (-1.0, 1.0)),
    ],
)
def test_an_axis_holds_every_value_and_every_interval(estimates, expected):
    assert window(estimates) == pytest.approx(expected)
