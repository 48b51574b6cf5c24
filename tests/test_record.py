"""Records and lines: whole or absent, never torn; damage is one kind of error."""

import dataclasses
import json
import math
import os
import resource
import signal
import subprocess
import sys

import pytest
from build import ROOT, make_record

from benchmarks.record import (
    SCHEMA_VERSION,
    CellFolder,
    Lines,
    Record,
    RecordError,
    Validity,
    read,
    read_lines,
    read_study,
    write,
)
from conf.cell import Cell


@pytest.mark.parametrize("servers", [-1, 10**9, "2", True])
def test_no_cell_has_servers_without_end(servers):
    plain = make_record().cell.to_dict()
    with pytest.raises(ValueError, match=f"strategy.servers={servers!r}"):
        Cell.from_dict({**plain, "strategy": {**plain["strategy"], "servers": servers}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 10**400},
        {"gpus": [10**20]},
        {"accumulate": 0},
        {"data": {"name": 1}},
        {"data": {"name": "text"}},
    ],
)
def test_no_cell_lacks_what_its_readers_need(wrong):
    with pytest.raises(ValueError):
        Cell.from_dict({**make_record().cell.to_dict(), **wrong})


def damaged(tmp_path, change):
    """Read a record whose JSON was changed."""
    content = json.loads(write(CellFolder(tmp_path), make_record()).read_text())
    change(content)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(content))
    return read(path)


def test_what_is_written_is_read_again(tmp_path):
    record = make_record()
    assert read(write(CellFolder(tmp_path), record)) == record
    assert read(write(CellFolder(tmp_path), make_record(failure=None))).failure is None
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_record_is_frozen():
    record = make_record()
    for thing, name in ((record, "state"), (record.validity, "verdict"), (record.failure, "cause")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, "finished")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_come_back_as_numbers(tmp_path, value):
    record = make_record(
        metrics={"x": value},
        model={"y": value},
        series={"s": [[1, value]]},
        checks={"losses": [value, 1.0], "half_width": value, "deep": {"er": [value]}},
    )
    back = read(write(CellFolder(tmp_path), record))
    found = [back.metrics["x"], back.model["y"], back.series["s"][0][1], back.checks["half_width"]]
    found += [back.checks["losses"][0], back.checks["deep"]["er"][0]]
    Lines(tmp_path / "lines.jsonl").write("result", 1.0, metrics={"a": value})
    found.append(next(read_lines(tmp_path / "lines.jsonl"))["metrics"]["a"])
    assert all(type(each) is float and repr(each) == repr(value) for each in found)
    # Strict JSON all the same: a reader that is not Python's must accept it.
    json.loads(
        (tmp_path / "record.json").read_text(), parse_constant=lambda word: pytest.fail(word)
    )


def test_bytes_that_are_no_utf8_come_back(tmp_path):
    odd = os.fsdecode(b"caf\xe9 \xff")
    record = make_record(overrides=[odd], environment={"variables": {"NCCL_X": odd}})
    assert read(write(CellFolder(tmp_path), record)) == record
    lines = Lines(tmp_path / "lines.jsonl")
    lines.write("note", 1.0, text=odd)
    assert next(read_lines(tmp_path / "lines.jsonl"))["text"] == odd


def test_a_newer_schema_is_refused_with_both_versions(tmp_path):
    newer = {"schema_version": SCHEMA_VERSION + 1, "something": "new"}
    sentence = f"schema_version={SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}"
    with pytest.raises(RecordError, match=sentence):
        damaged(tmp_path, lambda content: content.update(newer))


DEEP = json.loads("[" * 70 + "]" * 70)
WRONG = {
    "started_at": ("yesterday", "nan", 1e400, 10**400, -1),
    "ended_at": (None, 1e300, True),
    "state": ("done", 1),
    "name": (None,),
    "cell": ([], {}, {"gpus": "0,3"}, {"gpus": [0, "3"]}),
    "overrides": ("gpus=0", [1]),
    "metrics": ({"x": "fast"}, {"x": None}, {"x": 10**400}, []),
    "model": ({"parameters": [1]},),
    "series": ({"s": [1, 2]}, {"s": [["a", 1]]}),
    "failure": (
        "broken",
        {"cause": 1, "rank": None, "message": ""},
        {"cause": "hang", "rank": "1", "message": ""},
        {"cause": "hang"},
    ),
    "validity": (None, {"verdict": "fine"}, {"verdict": "valid", "codes": {"a": 1}}),
    "ranks": ({}, [1]),
    "drift": ("no",),
    "schema_version": (True, 0, "1", None),
    "environment": ({"a": DEEP},),
    "tables": ({"a": DEEP},),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_a_record_error(tmp_path, field):
    for value in WRONG[field]:
        with pytest.raises(RecordError, match=r"record\.json"):
            damaged(tmp_path, lambda content, value=value: content.update({field: value}))


def test_a_field_that_is_not_known_is_passed_over(tmp_path):
    assert damaged(tmp_path, lambda content: content.update(surprise=1)) == make_record()


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("tables", {"p2p": {"matrices": {"a": [[1.0, "2"]]}}}, "$.tables.p2p.matrices[...][0][1]"),
        ("tables", {"nccl-tests": {"runs": 3}}, "$.tables.nccl-tests.runs"),
        ("effective", {"nccl": {"settings": ["NCCL_ALGO"]}}, "$.effective.nccl.settings"),
        ("checks", {"gradient_error": None}, "$.checks.gradient_error"),
        ("checks", {"losses": [10**400]}, "$.checks.losses[0]"),
        ("checks", {"sent": {"early": "7"}}, "$.checks.sent.early"),
        ("environment", {"gpu": {"gpus": [{"id": [0]}]}}, "$.environment.gpu.gpus[0].id"),
        ("environment", {"hosts": [3]}, "$.environment.hosts[0]"),
        ("predicted", {"step_ms": "fast"}, "$.predicted.step_ms"),
        ("ranks", [{"done": True}], "$.ranks[0]"),
    ],
)
def test_a_wrong_value_inside_a_field_is_named(tmp_path, field, value, place):
    with pytest.raises(RecordError) as refusal:
        damaged(tmp_path, lambda content: content.update({field: value}))
    assert str(tmp_path / "record.json") in str(refusal.value) and place in str(refusal.value)


def test_what_a_benchmark_of_the_users_own_adds_comes_back(tmp_path):
    record = make_record(
        tables={"mine": [{"a": None}], "p2p": {"mine": {"b": [1]}}}, checks={"mine": ["x", 1]}
    )
    assert read(write(CellFolder(tmp_path), record)) == record


REQUIRED = [
    field.name
    for field in dataclasses.fields(Record)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
]


@pytest.mark.parametrize(
    "field", [*REQUIRED, "validity", "metrics", "series", "checks", "schema_version"]
)
def test_a_missing_field_is_a_record_error(tmp_path, field):
    with pytest.raises(RecordError):
        damaged(tmp_path, lambda content: content.pop(field))


NO_RECORDS = [b"", b"{", b"null", b"[]", b"\xff\xfe", b"\0" * 100, b"[" * 100_000]
NO_RECORDS += [b'{"a":' * 100_000, b'"' + b"x" * 10_000_000]


def test_what_is_no_record_is_a_record_error(tmp_path):
    path = tmp_path / "record.json"
    for absent in (path, tmp_path):
        with pytest.raises(RecordError):
            read(absent)
    for data in NO_RECORDS:
        path.write_bytes(data)
        with pytest.raises(RecordError):
            read(path)


CHILD = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.record import CellFolder, Lines, read, write
folder, given = Path(sys.argv[1]), sys.argv[2]
"""
FULL_DISK = """
new = read(folder.parent / "new" / "record.json")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(given), int(given)))
try:
    write(CellFolder(folder), new)
except OSError as error:
    sys.exit(3)
"""
WRITE_ON = """
big = read(folder / "record.json")
print("go", flush=True)
while True:
    write(CellFolder(folder), big)
"""
JOURNAL = """
lines = Lines(folder / "journal.jsonl")
for n in range(200):
    lines.write("sweep", 1.0, who=given, order=[given] * 3000)
"""


def child(code, folder, given):
    command = [sys.executable, "-c", CHILD + code, folder, str(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_leaves_the_old_record_or_none(tmp_path, before):
    old, new = make_record(name="old"), make_record(name="new " * 100)
    (tmp_path / "new").mkdir()
    write(CellFolder(tmp_path / "new"), new)
    folders = {limit: tmp_path / str(limit) for limit in (0, 1, 100, 700, 1300)}
    for folder in folders.values():
        folder.mkdir()
        if before:
            write(CellFolder(folder), old)
    children = [child(FULL_DISK, folder, limit) for limit, folder in folders.items()]
    assert [process.wait() for process in children] == [3] * len(children)
    for folder in folders.values():
        assert [path.name for path in folder.iterdir()] == (["record.json"] if before else [])
        if before:
            assert read(folder / "record.json") == old
        write(CellFolder(folder), new)
        assert read(folder / "record.json") == new


def test_a_process_killed_while_it_writes_leaves_a_whole_record(tmp_path):
    series = {"s": [[number, number / 3] for number in range(3000)]}
    write(CellFolder(tmp_path), make_record(series=series))
    for delay in (0.0, 0.003, 0.007):
        with child(WRITE_ON, tmp_path, "") as process:
            assert process.stdout.readline() == b"go\n"
            signal.sigtimedwait([], delay)
            process.kill()
        assert process.returncode == -9, "it wrote until it was killed"
        assert read(tmp_path / "record.json").state == "finished"


def test_a_torn_last_line_is_dropped_and_the_next_one_is_not_lost(tmp_path):
    path = tmp_path / "0.jsonl"
    lines = Lines(path)
    lines.write("start", 1.0, rank=0)
    lines.write("beat", 2.0, iterations=5)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        expected = 2 if cut == len(whole) - 1 else 1  # only the newline is missing
        kinds = ["start", "beat"][:expected]
        assert [line["kind"] for line in read_lines(path)] == kinds
        Lines(path).write("begin", 3.0, cell="c")
        assert [line["kind"] for line in read_lines(path)] == [*kinds, "begin"]


def test_a_line_torn_by_a_full_disk_does_not_take_the_next_one_along(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = Lines(path)
    lines.write("first", 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
        with pytest.raises(OSError):
            lines.write("torn", 2.0, text="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    lines.write("second", 3.0)
    assert [line["kind"] for line in read_lines(path)] == ["first", "second"]


def test_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    deep = b'{"kind": "deep", "time": 1, "a": ' + b"[" * 70 + b"]" * 70 + b"}"
    foreign = [b"", b"null", b"[1]", b"{}", b"\xff\xfe", b"\0" * 8, b"[" * 50_000, deep]
    foreign += [b'{"kind": 1, "time": 1}', b'{"kind": "x"}', b'{"kind": "x", "time": "now"}']
    good = b'{"kind": "good", "time": 1.5}', b'{"kind": "torn", "ti'
    path.write_bytes(b"\n".join([*foreign, *good]))
    assert list(read_lines(path)) == [{"kind": "good", "time": 1.5}]
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_two_writers_of_one_journal_never_mix_their_lines(tmp_path):
    writers = [child(JOURNAL, tmp_path, name) for name in ("a", "b")]
    assert [writer.wait() for writer in writers] == [0, 0]
    lines = list(read_lines(tmp_path / "journal.jsonl"))
    assert len(lines) == 400
    assert all(line["order"] == [line["who"]] * 3000 for line in lines)


def test_a_study_is_read_in_order_of_start_with_earlier_attempts(tmp_path):
    for number, folder in enumerate(["b", "a/attempt-1", "a", "c"]):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write(
            CellFolder(tmp_path / folder),
            make_record(record_id=f"{number:032x}", started_at=100.0 - number),
        )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "record.json").write_text("{")
    (tmp_path / "record.json").write_text("{")  # not in a cell
    found, unreadable = read_study(tmp_path)
    assert [record.started_at for record in found] == [97.0, 98.0, 99.0, 100.0]
    assert len(unreadable) == 1 and str(tmp_path / "d") in str(unreadable[0])
    assert read_study(tmp_path / "absent") == ([], [])


def test_words_of_a_record_are_checked():
    with pytest.raises(ValueError, match="expected finished, failed, interrupted"):
        make_record(state="done")
    with pytest.raises(ValueError, match="expected valid, suspect, invalid"):
        make_record(validity=Validity("ok"))
