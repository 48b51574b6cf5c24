"""An edit of any value of a record, and of any of its files, is found by `verify` or stands in a list.

In the suite of every eighth value; of all with `pytest -m campaign tests/test_edited_records.py`.
"""

import json
import re

import pytest
from planted import PAIR_OF_FOUR, gpu_cell, made

from analysis.verification.verify_study import verify

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
