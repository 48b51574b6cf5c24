"""`python -m analysis verify` finds every edit of a published record, its samples and its logs."""

import gzip
import json
import re
import shutil

import pytest
from planted import LOC, PAIR_OF_FOUR, edit_json, edit_lines, gpu_cell, made

from analysis.__main__ import main
from analysis.report.build import examine
from analysis.verification import verify_study
from analysis.verification.verify_study import numbers_of, verify
from benchmarks.record import CellFolder, read


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A study of two cells of two H200s, as a sweep leaves it."""
    study = tmp_path_factory.mktemp("published") / "study"
    first = made(gpu_cell(study))
    made(gpu_cell(study, LOC), [first])
    return study


@pytest.fixture
def copy(published, tmp_path):
    """(A copy of the study, the folder of its first cell)."""
    study = shutil.copytree(published, tmp_path / "study")
    return study, CellFolder(next(study.glob("*1320f9f3be")))


def verified(capsys, *arguments):
    """(Exit status, the JSON object)."""
    status = main(["verify", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_study_that_was_not_edited_is_right_plain_and_packed(copy, capsys):
    study, _ = copy
    status, found = verified(capsys, study)
    assert (status, found["right"]) == (0, True)
    assert found["differences"] == found["not_recomputed"] == []
    assert found["recomputed"] == found["records"] == 2 and found["files"] == 16
    status, packed = verified(capsys, study, "--pack")
    assert status == 0 and packed.pop("bytes_saved") > 0 and packed == found
    assert not list(study.rglob("ranks/*.jsonl"))
    assert len(list(study.rglob("ranks/*.jsonl.gz"))) == 4
    assert verified(capsys, study) == (0, found)
    assert main(["verify", str(study)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("2 of 2 records recomputed from raw samples; ")


def scaled(factor, *names):
    def change(record):
        for name in names:
            record["metrics"][name] *= factor

    return change


def inside(*names, clear=False, **values):
    """The change that updates, clears or (without values) reverses what lies inside a record."""

    def change(record):
        for name in names:
            record = record[name]
        if clear:
            record.clear()
        elif values:
            record.update(values)
        else:
            record.reverse()

    return change


RATE = "throughput/images_per_second"
RATES = (RATE, f"{RATE}_per_gpu")
IMAGES, SECONDS, BUSBW = "throughput/images", "throughput/seconds", "comm/busbw_gb_per_s"
EDITS = [
    (scaled(1.5, RATE), f"metrics {RATE}"),
    (scaled(1.1, *RATES, IMAGES), f"metrics {RATE}|metrics {IMAGES}"),
    (scaled(2 / 3, SECONDS), f"metrics {SECONDS}"),
    (scaled(1000**3 / 1024**3, BUSBW), f"metrics {BUSBW}"),
    (scaled(2, BUSBW), f"metrics {BUSBW}"),
    (scaled(1.02, "gpu/sm_mhz"), "metrics gpu/sm_mhz"),
    (inside("metrics", **{"comm/hidden_share": 0.9}), "metrics comm/hidden_share"),
    (inside("metrics", **{"strategy/cost_ms": "nan"}), "metrics strategy/cost_ms"),
    (inside("validity", verdict="suspect"), "validity verdict"),
    (inside("validity", "not_applicable", clear=True), "validity not_applicable.not_compiled"),
    (inside("effective", channels=12), "effective channels"),
    (
        inside("effective", "nccl", "settings", clear=True),
        "effective nccl.settings.NCCL_NVLS_ENABLE",
    ),
    (inside("environment", "planned_uuids"), "environment planned_uuids.0"),
    (inside("environment", "versions", torch="2.12"), "environment versions.torch"),
    (inside("ranks"), "ranks 0.uuid|ranks 1.uuid"),
    (inside("cell", gpus=[1, 0]), "cell_key"),
    (inside("cell", batch_size=128), "cell_key"),
    (inside("checks", "gpu_samples", foreign_pids=[7]), "checks gpu_samples.foreign_pids.length"),
]


@pytest.mark.parametrize(("change", "fields"), EDITS, ids=[fields for _, fields in EDITS])
def test_a_record_that_was_edited_is_found_and_the_field_is_named(copy, capsys, change, fields):
    study, folder = copy
    edit_json(folder.record, change)
    status, found = verified(capsys, study)
    assert status == 1 and {one["file"] for one in found["differences"]} == {"record.json"}
    assert {one["record"] for one in found["differences"]} == {folder.path.name}
    assert {*fields.split("|")} <= {one["field"] for one in found["differences"]}


def test_a_sentence_may_have_other_words_and_no_other_number(copy, capsys):
    """A record says it in codes and numbers; its words are of the version that measured."""
    study, folder = copy

    def told(sentence):
        change = inside("validity", "not_applicable", not_compiled=sentence)
        edit_json(folder.record, change)
        status, found = verified(capsys, study)
        return status, [one["field"] for one in found["differences"]]

    assert told("in the words of another version") == (0, [])
    assert told("of 24 channels") == (1, ["validity not_applicable.not_compiled"])
    one = "P2P_LEVEL=PIX: level 1 is ±8.8%, 24 channels"
    other = "24 channels at P2P_LEVEL=PIX, level 1 (±8.8%)"
    assert numbers_of(one) == numbers_of(other)
    assert numbers_of(one) != numbers_of(other.replace("8.8", "8.9"))


def halve(folder):
    edit_lines(folder, 0, lambda line: line.update(ms=[ms / 2 for ms in line["ms"]]), kind="block")


def goes_on_at(line):
    """The change that has a rank's lines go on at another than the sixth."""

    def change(folder):
        texts = folder.rank_lines(1).read_text().splitlines(keepends=True)
        folder.rank_lines(1).write_text("".join(texts[:5] + texts[line:]))

    return change


def swap_two_files(folder):
    first, second = folder.rank_lines(0), folder.rank_lines(1)
    was = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(was)


def add_a_log(folder):
    (folder.path / "nccl" / "vm.7.log").write_text("NCCL INFO\n")


def edit_a_log(folder):
    path = folder.nccl_logs()[0]
    path.write_text(path.read_text().replace("P2P/CUMEM", "SHM/direct/direct"))


DAMAGES = [
    (halve, {"ranks/0.jsonl", "record.json"}),
    (goes_on_at(6), {"ranks/1.jsonl"}),  # a line is missing
    (goes_on_at(4), {"ranks/1.jsonl"}),  # a line is there twice
    (swap_two_files, {"ranks/0.jsonl", "ranks/1.jsonl"}),
    (edit_a_log, {"nccl/vm.600.log", "record.json"}),
    (lambda folder: folder.nccl_logs()[1].unlink(), {"nccl/vm.601.log"}),
    (add_a_log, {"nccl/vm.7.log"}),
]


@pytest.mark.parametrize(("change", "files"), DAMAGES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_raw_file_that_was_edited_is_found_and_named(copy, capsys, change, files, packed):
    study, folder = copy
    change(folder)
    if packed:  # what a reader downloads; it could be repacked by anybody
        folder.pack()
    status, found = verified(capsys, study)
    assert status == 1 and found["differences"]
    assert files <= {one["file"] for one in found["differences"]}
    assert {one["record"] for one in found["differences"]} == {folder.path.name}


def test_a_packed_file_that_is_damaged_is_found(copy, capsys):
    study, folder = copy
    folder.pack()
    path = folder.rank_lines(0).with_name("0.jsonl.gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()))[:-9])
    status, found = verified(capsys, study)
    seen = [(one["file"], one["recomputed"]) for one in found["differences"]]
    assert status == 1 and ("ranks/0.jsonl", "unreadable") in seen


def test_what_differs_is_not_packed(copy, capsys):
    study, folder = copy
    halve(folder)
    assert main(["verify", str(study), "--pack"]) == 1
    printed = capsys.readouterr().out
    assert "ranks/0.jsonl" in printed and " differ, in 1 record" in printed
    assert "nothing was packed, because the study is not right" in printed
    assert not list(study.rglob("*.gz"))


def test_a_study_published_without_samples_is_counted_and_proves_nothing(copy, capsys):
    study, folder = copy
    for path in folder.raw_files():
        path.unlink()
    status, found = verified(capsys, study)
    assert (status, found["recomputed"], found["records"]) == (0, 1, 2)
    without = {"record": folder.path.name, "reason": "no raw samples", "wrong": False}
    assert found["not_recomputed"] == [without]
    edit_json(folder.record, scaled(1.5, *RATES))  # and yet images ÷ seconds is the rate
    status, found = verified(capsys, study)
    assert status == 1 and found["differences"][0]["recorded"] == read(folder.record).metrics[RATE]
    assert main(["verify", str(study)]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("1 of 2 records recomputed from raw samples, 1 could not be (see above)")
    assert last.endswith("1 differ, in 1 record")


def test_what_was_asked_may_be_left_out_of_a_publication(copy, capsys):
    """The record holds what cell.json and attempt.json say."""
    study, folder = copy
    folder.cell.unlink()
    folder.attempt.unlink()
    status, found = verified(capsys, study)
    assert (status, found["not_compared"]) == (0, {"cell.json": 1, "attempt.json": 1})


def test_one_record_under_two_names_is_wrong(copy, capsys):
    study, folder = copy
    shutil.copytree(folder.path, study / "again")
    status, found = verified(capsys, study)
    assert status == 1 and [one["wrong"] for one in found["not_recomputed"]] == [True, True]


def section(told, anchor):
    return next(one for one in told.sections if one.anchor == anchor)


def raise_the_rate(folder):
    edit_json(folder.record, scaled(1.5, RATE))


def raise_the_images(folder):
    edit_json(folder.record, scaled(1.1, *RATES, IMAGES))


COMPARED = "Runs compared with their raw samples"
MARKED = [
    (raise_the_rate, f"{RATE} is 13940.3, and 9293.55 by other metrics"),
    (raise_the_images, f"{IMAGES} is 40550.4, and 36864 by the lines of the ranks"),
    (halve, "ranks/0.jsonl is not what it was when the record was made"),
    (edit_a_log, "nccl/vm.600.log is not what it was when the record was made"),
]


@pytest.mark.parametrize(("change", "why"), MARKED)
@pytest.mark.parametrize("packed", [False, True])
def test_the_report_marks_what_does_not_verify_and_leaves_it_out(copy, change, why, packed):
    study, folder = copy
    change(folder)
    if packed:
        folder.pack()
    told, _ = examine(study)
    validity = section(told, "validity")
    said = f"{COMPARED}: 2; 1 do not agree."
    assert said in validity.lines
    (left_out,) = validity.tables[0].rows
    assert left_out[1] == "invalid" and left_out[2].startswith(why)
    cells = section(told, "cells").tables[0]
    column = [column.heading for column in cells.columns].index("codes")
    assert [row[column] for row in cells.rows] == ["does_not_verify", ""]
    assert read(folder.record).validity.verdict == "valid"  # the record itself stays


def test_the_report_says_how_many_cells_it_compared(copy, monkeypatch):
    study, _ = copy
    lines = section(examine(study)[0], "validity").lines
    assert f"{COMPARED}: 2; all agree." in lines
    monkeypatch.setattr(verify_study, "MOST_FILES", 1)
    lines = section(examine(study)[0], "validity").lines
    more = "1 of 2; all agree. `python -m analysis verify` compares all."
    assert f"{COMPARED}: {more}" in lines
    for path in study.glob("*/ranks"):
        shutil.rmtree(path)
    lines = section(examine(study)[0], "validity").lines
    assert "No run has its raw samples here, so none was compared with them." in lines


# An edit of any value of a record, and of any of its files, is found by `verify` or stands in a list:
# in the suite of every eighth value, of all with `pytest -m campaign`.
EVERY = 8
# What `verify` cannot tell, as a pattern of the path of a value, and why.
SILENT = {
    r"edit (validity (codes|unchecked|not_applicable) |effective findings \d+ sentence).*": (
        "a later version may word a sentence otherwise; its numbers are compared"
    ),
    r"edit ended_at": "the launcher alone knows when it closed the record",
    r"(edit|drop) cell optimizer (beta1|beta2|epsilon)": "an option of another optimizer",
    r"drop cell (model inputs|optimizer name|data|hosts|server_hosts)": "absent, it is the default",
    r"drop cell (cuda_device_max_connections|accumulate)": "absent, it is the default",
    r"drop predicted": "absent and empty are the same",
}
# Files that may be left out where a study is published; an edit of each is found.
MAY_BE_ABSENT = {"attempt.json", "cell.json", "topology.txt", "ranks/0.count", "ranks/1.count"}


@pytest.fixture
def folder(tmp_path):
    """The folder of a cell of two GPUs with a setting, in a study of its own that verifies."""
    setting = {"NCCL_P2P_LEVEL": "NVL"}
    folder = gpu_cell(tmp_path / "study", PAIR_OF_FOUR, cell={"nccl": setting}, name="pair")
    folder.topology.write_text("\tGPU0\tGPU1\n")
    for rank in (0, 1):
        folder.rank_count(rank).write_text("5")
    made(folder)
    assert verify(tmp_path / "study").right
    return folder


def inner(value):
    """The (key, value) pairs of a JSON value."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def paths_of(value, path=()):
    """Yield the path of every number, word and empty container."""
    if not inner(value):
        yield path
    for key, item in inner(value):
        yield from paths_of(item, (*path, key))


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + type(value)(1)
    if value is None:
        return 1
    return {str: f"{value}x", dict: {"x": 1}, list: ["x"]}[type(value)]


def silent_edits(folder, paths):
    """Edit and drop each of these values alone; return what neither differs nor is said."""
    text, silent = folder.record.read_text(), []
    for *outer, last in paths:
        for how in ("edit", "drop"):
            record = json.loads(text)
            content = record
            for key in outer:
                content = content[key]
            if how == "edit":
                content[last] = other(content[last])
            else:
                del content[last]
            folder.record.write_text(json.dumps(record))
            found = verify(folder.path.parent)
            if found.right and not found.limits:
                silent.append(f"{how} {' '.join(map(str, (*outer, last)))}")
    folder.record.write_text(text)
    return silent


def unlisted(silent):
    return [edit for edit in silent if not any(re.fullmatch(known, edit) for known in SILENT)]


def test_an_edit_of_a_value_is_found_or_listed(folder):
    paths = list(paths_of(json.loads(folder.record.read_text())))
    assert len(paths) > 400
    assert unlisted(silent_edits(folder, paths[::EVERY])) == []


@pytest.mark.campaign
def test_an_edit_of_every_value_is_found_or_listed(folder):
    paths = list(paths_of(json.loads(folder.record.read_text())))
    silent = silent_edits(folder, paths)
    assert unlisted(silent) == []
    assert len(silent) < 0.03 * 2 * len(paths)


def test_an_edit_of_any_file_is_found_and_so_is_a_lost_sample(folder):
    for path in sorted(folder.path.glob("**/*")):
        if not path.is_file() or path == folder.record:
            continue
        whole, name = path.read_bytes(), path.relative_to(folder.path).as_posix()
        path.write_bytes(whole[:-2] + b"7\n")
        assert not verify(folder.path.parent).right, name
        path.unlink()
        assert verify(folder.path.parent).right == (name in MAY_BE_ABSENT), name
        path.write_bytes(whole)
