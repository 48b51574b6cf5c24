"""The table of metrics: it names every metric that anything logs."""

import re

from build import DATA, make_record, without_entry

from benchmarks.record import metrics, read
from benchmarks.record.metrics import METRICS


def test_the_table_has_every_metric_of_the_records_of_gpus():
    paths = sorted(DATA.rglob("record.json"))
    assert len(paths) > 100 and without_entry(map(read, paths)) == set()


def test_a_metric_that_is_not_in_the_table_is_found(tmp_path):
    path = next(iter(sorted(DATA.rglob("record.json"))))
    changed = re.sub(
        r'"metrics": \{', r'"metrics": {"throughput/made_up": 1.0, ', path.read_text(), count=1
    )
    (tmp_path / "record.json").write_text(changed)
    assert without_entry([read(tmp_path / "record.json")]) == {"throughput/made_up"}


def test_every_entry_is_whole_and_names_are_found_by_one_entry():
    for name, one in METRICS.items():
        assert one.title and one.title == one.title.strip() and len(one.title) <= 70, name
        assert name == one.name and (
            re.search("[{<]", name) or metrics.position_of(name) < len(METRICS)
        )
    for name in (
        "reference/ring_ms",
        "stage/all_at_once_ms",
        "p2p/latency_cpu_enabled_reads_most_us",
    ):
        found = [one for pattern, one in metrics._patterns().items() if pattern.fullmatch(name)]
        assert len(found) == 1, (name, found)
    assert metrics.known("reference/RING_ms") is None
    assert metrics.known("p2p/made_up_gb_per_s") is None


def test_a_metric_of_own_code_has_an_entry_from_its_name():
    mine = metrics.entry_of("mine/wasted_share")
    assert (mine.title, mine.unit, mine.less_is_better) == ("wasted", "%", None)
    made = make_record(within_run={mine.name: {"low": 0.1, "high": 0.2}})
    assert made.ends_within_run(mine.name) == (0.1, 0.2)


def test_an_interval_has_two_ends():
    made = make_record(within_run={"step/ms_median": {"low": 1.0}})
    assert made.ends_within_run("step/ms_median") is None
    assert made.ends_within_run("comm/ideal_ratio") is None
