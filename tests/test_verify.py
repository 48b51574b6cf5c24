"""`python -m analysis verify`: raw lines of every benchmark and strategy give what records say."""

import dataclasses
import json
import shutil
import sys

import pytest
from build import DATA, files_with_auto, without_entry
from derived_results import write_record
from rank_cases import COLLECTIVE, EXCHANGE, HOST_LINK, JACOBI, P2P

from analysis.__main__ import main
from analysis.validity.checks import judged, limits_of
from benchmarks.derived import derived_values
from benchmarks.record import CellFolder, read, read_lines, write
from benchmarks.record.metrics import entry_of
from conf import groups
from launch.study.study_folder import assemble


@pytest.fixture(scope="session")
def study(forked, tmp_path_factory):
    """A study of every cell that forked ranks measured, of every benchmark."""
    cells = []
    for name in ("measuring", *EXCHANGE, *COLLECTIVE, *HOST_LINK, *JACOBI, *P2P):
        forked(name)
        cells += sorted((forked.folder / name).glob("**/cells/*"))
    folder = tmp_path_factory.mktemp("forked-study")
    for number, cell in enumerate(cells):
        shutil.copytree(cell, folder / f"{number:03d}")
        write_record(CellFolder(folder / f"{number:03d}"), number)
    return folder


@pytest.fixture
def one(study, tmp_path):
    """A study of one cell of benchmark=throughput: (its folder, the study's)."""
    paths = study.glob("*/record.json")
    source = next(path.parent for path in paths if "strategy/cost_ms" in read(path).metrics)
    return shutil.copytree(source, tmp_path / "study" / "cell"), tmp_path / "study"


@pytest.fixture
def declares(tmp_path):
    """Have a YAML of the user's own name a derive function."""

    def declare(dotted):
        (tmp_path / "conf" / "benchmark").mkdir(parents=True, exist_ok=True)
        name = f"mine_{dotted.replace('.', '_')}"
        text = f"name: {name}\n_target_: a.b\ncode: {{derive: {dotted}}}\n"
        (tmp_path / "conf" / "benchmark" / f"{name}.yaml").write_text(text)
        groups.add_config_dir([tmp_path / "conf"])

    yield declare
    groups.add_config_dir([])


def assembled(folder, **declared):
    """The record that a cell's lines give, where its benchmark declares something else."""
    if declared:
        cell = json.loads((folder / "cell.json").read_text())
        cell["declared"]["benchmark"] |= declared
        (folder / "cell.json").write_text(json.dumps(cell))
    return assemble(CellFolder(folder), "finished", None, 2e9, [], CellFolder)


def verified(capsys, study):
    """(exit status, the JSON object)."""
    status = main(["verify", str(study), "--json"])
    return status, json.loads(capsys.readouterr().out)


def edit(folder, change):
    content = json.loads(CellFolder(folder).record.read_text())
    change(content)
    CellFolder(folder).record.write_text(json.dumps(content))


def test_records_of_every_benchmark_and_strategy_are_what_their_lines_give(study, capsys):
    made = [read(path) for path in study.glob("*/record.json")]
    assert {record.state for record in made} == {"finished"}
    cells = [json.loads(path.read_text()) for path in study.glob("*/cell.json")]
    measured = {cell["benchmark"]["name"] for cell in cells}
    assert measured == {*groups.choices("benchmark")} - {"script"}  # tests/test_scripts.py
    strategies = (
        "nccl_allreduce cpu_staged kvstore_device kvstore_dist_sync kvstore_dist_async none"
    )
    assert {cell["strategy"]["name"] for cell in cells} >= set(strategies.split())
    assert files_with_auto(study) == [], "every file says a number"
    assert without_entry(made) == set()
    status, found = verified(capsys, study)
    assert (status, found["differences"]) == (0, [])
    assert (found["not_recomputed"], found["not_compared"]) == ([], {})
    assert found["recomputed"] == found["records"] == len(made) > 50
    assert found["values"] > 10 * len(made)


def test_tables_from_another_source_are_no_difference(one, capsys):
    folder, study = one
    edit(folder, lambda record: record["tables"].update(trace={"ranks": []}))
    status, found = verified(capsys, study)
    assert (status, found["differences"]) == (0, [])


EDITED = [
    ("within_run", ("step/ms_median", "low"), 7.0), ("metrics", ("strategy/cost_ms",), "nan"),
    ("metrics", ("step/ms_p95",), "absent"), ("series", ("step/ms_median", 0, 1), 1.5),
    ("model", ("arrays",), 9), ("checks", ("replicas_equal",), False),
]  # fmt: skip


@pytest.mark.parametrize(("part", "path", "recorded"), EDITED)
def test_a_value_that_was_edited_by_hand_is_found_and_named(one, capsys, part, path, recorded):
    def change(record):
        *inner, last = path
        content = record[part]
        for key in inner:
            content = content[key]
        content[last] = recorded
        if recorded == "absent":
            del content[last]

    value, (folder, study) = f"{part} {'.'.join(map(str, path))}", one
    edit(folder, change)
    status, found = verified(capsys, study)
    (difference,) = found["differences"]
    assert (status, difference["record"], difference["file"]) == (1, "cell", "record.json")
    assert (difference["field"], difference["recorded"]) == (value, recorded)
    assert difference["recomputed"] != recorded
    assert main(["verify", str(study)]) == 1
    printed = capsys.readouterr().out
    assert value in printed and str(recorded) in printed and "1 differ, in 1 record" in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_of_a_rank_that_is_cut_is_told(one, capsys, rank):
    folder, study = one
    path = folder / "ranks" / f"{rank}.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 20])  # within the last line
    status, found = verified(capsys, study)
    assert status == 1 and found["recomputed"] == 0
    (omission,) = found["not_recomputed"]
    assert (omission["record"], omission["wrong"]) == ("cell", True)
    assert omission["reason"] == f"ranks/{rank}.jsonl is cut: its last line is not `done`"


def test_a_line_that_is_lost_within_a_file_is_told(one, capsys):
    folder, study = one
    path = folder / "ranks" / "1.jsonl"
    texts = path.read_text().splitlines(keepends=True)
    lost = [text for text in texts if json.loads(text).get("purpose") == "without exchange"]
    texts.remove(lost[0])
    path.write_text("".join(texts))
    status, found = verified(capsys, study)
    assert status == 1
    reason = found["not_recomputed"][0]["reason"]
    assert reason == "rank 1 has 1 lines `block without exchange`, rank 0 has 2"
    record = assembled(folder)
    assert record.state == "failed" and record.failure.message.endswith(reason)


def test_what_has_no_lines_or_no_derive_function_is_named_and_not_counted_as_equal(
    one, study, capsys
):
    folder, of_one = one
    shutil.copytree(folder, of_one / "without")
    shutil.rmtree(of_one / "without" / "ranks")
    shutil.copytree(folder, of_one / "users")
    edit(of_one / "users", lambda record: record["cell"]["declared"]["benchmark"].pop("derive"))
    (of_one / "users" / "cell.json").unlink()  # it has the function
    for number, copy in enumerate(("without", "users")):
        edit(of_one / copy, lambda record, own=f"{number:032x}": record.update(record_id=own))
    status, found = verified(capsys, of_one)
    assert (status, found["recomputed"], found["records"]) == (0, 1, 3)
    assert {(one["record"], one["reason"]) for one in found["not_recomputed"]} == {
        ("without", "no raw samples"),
        ("users", "benchmark=throughput declares no derive function"),
    }
    shutil.rmtree(folder)
    assert main(["verify", str(of_one)]) == 0, "nothing differs; a line says what is not proved"
    printed = capsys.readouterr().out.splitlines()
    assert "not recomputed: 1 record: no raw samples" in printed
    summary = "0 of 2 records recomputed from raw samples, 2 could not be (see above); "
    assert printed[-1].startswith(summary)


def test_a_limit_that_was_moved_with_its_verdict_is_said(one, capsys):
    folder, study = one
    assert verified(capsys, study)[1]["limits"] == {}, "all are the defaults"

    record = read(folder / "record.json")
    limits = dataclasses.replace(limits_of(record), noise_limit=9.0)
    write(CellFolder(folder), judged(record, limits))
    status, found = verified(capsys, study)
    moved = "validity.noise_limit=9 (default 0.05)"
    assert (status, found["differences"], found["limits"]) == (0, [], {moved: 1})
    assert main(["verify", str(study)]) == 0
    assert f"judged by another limit in 1 record: {moved}" in capsys.readouterr().out


def test_a_derive_function_that_fails_ends_its_cell_only(one, declares):
    folder, _ = one
    for dotted in ("os.path.nothing", "json.loads"):
        declares(dotted)
        record = assembled(folder, derive=dotted)
        assert (record.state, record.failure.cause, record.metrics) == ("failed", "exception", {})
        assert "the lines of the ranks are incomplete" in record.failure.message
    lines = read_lines(folder / "ranks" / "0.jsonl")
    facts = next(line for line in lines if line["kind"] == "result")
    assert assembled(folder, derive=None).checks == facts["checks"] | {"versions_differ": {}}


def test_numbers_of_ones_own_derive_are_checked_where_its_yaml_is_named(
    one, declares, monkeypatch, capsys
):
    folder, study = one
    text = "from benchmarks.training.derive import throughput as derive\n"
    (study.parent / "users_own.py").write_text(text)
    monkeypatch.syspath_prepend(study.parent)
    declares("users_own.derive")
    write(CellFolder(folder), assembled(folder, derive="users_own.derive"))
    sys.modules.pop("users_own")
    status, found = verified(capsys, study)
    assert (status, found["recomputed"]) == (0, 0) and "users_own" not in sys.modules
    (omission,) = found["not_recomputed"]
    said = "users_own.derive is not run (a record names it, and no YAML of this installation does"
    assert omission["reason"].startswith(said)
    assert main(["verify", str(study), "--config-dir", str(study.parent / "conf")]) in (0, 1)
    assert "1 of 1 record recomputed" in capsys.readouterr().out
    sys.modules.pop("users_own")


@pytest.mark.parametrize(
    ("derive", "said"),
    [
        ("return None", "derive returned NoneType, not Derived"),
        ("return {'metrics': {}}", "derive returned dict, not Derived"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return Derived(metrics={'a': 'fast'})", "could not convert string to float"),
        ("return Derived(metrics=[1])", "'list' object is not a mapping"),
        ("return Derived(tables={'a': object()})", "not JSON serializable"),
        ("return Derived(series={'a': [1, 2]})", "$.series"),
        ("return Derived(output=3)", "$.output"),
        ("return Derived(checks=lines)", ""),
    ],
)
def test_what_no_record_can_hold_ends_its_cell_only(one, declares, monkeypatch, derive, said):
    declares("users_derive.derive")
    folder, _ = one
    head = "from benchmarks.derived import Derived\n\n\ndef derive(lines, cell):\n    "
    (folder.parent / "users_derive.py").write_text(f"{head}{derive}\n")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "users_derive", raising=False)
    record = assembled(folder, derive="users_derive.derive")
    assert record.state == ("failed" if said else "finished")
    assert read(write(CellFolder(folder), record)).state == record.state
    assert said in (record.failure.message if said else "")
    assert (folder / "ranks" / "0.jsonl").exists()


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("raw_lines/*/*/record.json")), ids=lambda path: path.parent.name
)
def test_migrated_records_have_the_metrics_that_their_lines_give(path):
    """Lines of schema 3: their records name no raw file, so `verify` does not compare them."""
    record, folder = read(path), CellFolder(path.parent)
    lines = {}
    for rank in range(record.cell.world_size):
        lines[rank] = list(read_lines(folder.rank_lines(rank)))
    derived = derived_values(lines, record.cell)
    assert derived["metrics"]
    for part in ("metrics", "model"):
        for name, value in derived[part].items():
            if part == "metrics" and entry_of(name).since > 3:
                continue
            stored = getattr(record, part).get(name)
            assert stored == pytest.approx(value, rel=1e-9, nan_ok=True), name


def test_a_record_that_names_no_raw_file_cannot_be_checked(tmp_path, capsys):
    shutil.copytree(DATA / "raw_lines" / "h200_x4", tmp_path / "study")
    status, found = verified(capsys, tmp_path / "study")
    assert (status, found["recomputed"]) == (0, 0)
    assert {omission["reason"] for omission in found["not_recomputed"]} == {"it names no raw file"}


def test_a_table_that_is_younger_than_the_record_is_not_missed(tmp_path, capsys):
    study = shutil.copytree(DATA / "h200_x2" / "eager_a", tmp_path / "study")
    assert verified(capsys, study)[0] == 0, "schema 4 has no table residuals"
    for path in study.glob("*/record.json"):
        edit(path.parent, lambda record: record.update(schema_version=5))
    status, found = verified(capsys, study)
    fields = {difference["field"].split(".")[0] for difference in found["differences"]}
    assert (status, fields) == (1, {"tables residuals"})
