"""`python -m analysis trace`: tables, comparison, drawing, reports through nsys; and scrubbing of exports."""

import gzip
import shutil
import sqlite3
import stat
import xml.etree.ElementTree as ElementTree
from contextlib import closing

import pytest
from traces import LOC, STEPS, two_ranks

from analysis.__main__ import main
from analysis.input_files import UnreadableInput
from analysis.trace.scrub import scrub
from analysis.trace.source import read_trace
from analysis.trace.timeline import draw_timeline
from analysis.trace.trace_summary import summarize

SVG = "{http://www.w3.org/2000/svg}"


def test_drawing(tmp_path, capsys):
    target = tmp_path / "timeline.svg"
    assert main(["trace", str(STEPS), "--svg", str(target)]) == 0
    assert f"drawn: {target}" in capsys.readouterr().out
    text = target.read_text()
    trace = read_trace(str(STEPS))
    assert draw_timeline(trace) == text  # the same trace, the same bytes
    assert len(text) < 60_000
    words = [one.text for one in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert "rank 1 · GPU 1 (NVIDIA H200)" in words
    assert words.count("exposed") == 2
    assert any(word.startswith("stream ") for word in words)


def test_the_drawing_shows_the_step_its_waits_and_what_was_exposed(tmp_path):
    ranges = []
    for pid in (10, 11):
        ranges += [(pid, 0, 17, "step"), (pid, 1, 9, "forward")]
    # rank 0's second gemm is of no step
    calls = [(10, 0, 1), (10, 1, 3), (10, 18, 2), (11, 1, 1), (11, 2, 2)]
    trace = read_trace(str(two_ranks(tmp_path / "a.sqlite", ranges=ranges, calls=calls)))
    text = draw_timeline(trace)
    words = [one.text for one in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert "step 0 of 0 to 0, the one of median time, 16.000 ms" in words
    assert "communication 8.000 ms, exposed 4.000 ms, waiting 4.000 ms" in words
    assert "communication 4.000 ms, exposed 4.000 ms, waiting 0.000 ms" in words
    assert words.count("forward") == 2
    boxes = {
        (one.get("fill"), one.get("d")) for one in ElementTree.fromstring(text).iter(f"{SVG}path")
    }
    wait = [path for fill, path in boxes if fill == "url(#wait)" and path.startswith("M")]
    assert len(wait) == 1
    assert wait[0].startswith("M390.00 ")  # 8 of 16 ms
    assert "h140.20v" in wait[0] or "h140.00v" in wait[0]  # 4 ms, and what joins neighbours


def test_a_report_goes_through_nsys(tmp_path, monkeypatch, refusal):
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"report")
    monkeypatch.delenv("NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither on PATH nor named by the variable NSYS" in refusal("trace", report)
    export = two_ranks(tmp_path / "made.sqlite")
    nsys = tmp_path / "fake-nsys"
    nsys.write_text(
        f'#!/bin/sh\nfor one; do case "$one" in --output=*) /bin/cp {export} "${{one#--output=}}";; esac; done\n'
    )
    nsys.chmod(nsys.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("NSYS", str(nsys))
    assert [rank.rank for rank in read_trace(str(report)).ranks] == [0, 1]
    nsys.write_text("#!/bin/sh\necho importer missing >&2\nexit 3\n")
    assert "export` failed with status 3: importer missing" in refusal("trace", report)
    monkeypatch.setenv("NSYS", str(tmp_path / "absent"))
    assert "cannot be run" in refusal("trace", report)


def test_the_folder_of_a_cell_is_read_as_the_profile_inside_it(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    (tmp_path / "profile").mkdir()
    two_ranks(tmp_path / "profile" / "trace.sqlite")
    assert [rank.rank for rank in read_trace(str(tmp_path)).ranks] == [0, 1]


def test_a_report_with_its_export_beside_it_is_read_once(tmp_path):
    (tmp_path / "run.nsys-rep").write_bytes(b"report")
    two_ranks(tmp_path / "run.sqlite")
    assert len(read_trace(str(tmp_path)).ranks) == 2
    shutil.copy(tmp_path / "run.sqlite", tmp_path / "node1.sqlite")
    trace = read_trace(str(tmp_path))
    assert [rank.rank for rank in trace.ranks] == [0, 1, 2, 3]
    assert not trace.one_clock


SECRET = "hunter2-planted-secret"


def planted(path):
    """An export with a secret wherever nsys puts the environment and the command line, and in places it might."""
    tables = {"ranges": [(10, 0, 30, "step")], "calls": [(10, 0, 1), (10, 1, 2)]}
    two_ranks(path, **tables, gpus=[(0, "H200", "0000:06")], cuda=[(0, 0, 10)])
    with closing(sqlite3.connect(path)) as made:
        for statement in (
            f"INSERT INTO StringIds VALUES (900, 'TOKEN={SECRET}')",
            "CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid, devStateName, name, nameEnum, value)",
            f"INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'CLI', 'TOKEN', 2, '{SECRET}')",
            "CREATE TABLE META_DATA_CAPTURE (name, value)",
            f"INSERT INTO META_DATA_CAPTURE VALUES ('COMMAND_LINE', 'train --token {SECRET}')",
            f"INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_COMMAND', '--token {SECRET}')",
            f"INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_HOST', '{SECRET}')",
            "CREATE TABLE PROCESSES (globalPid, pid, name)",
            f"INSERT INTO PROCESSES VALUES (1, 10, 'python train.py {SECRET}')",
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp, text)",
            f"INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 'launched with TOKEN={SECRET}')",
            "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN odd",
            f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET odd = '{SECRET}'",
            "ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText",
            f"UPDATE NVTX_EVENTS SET jsonText = '{SECRET}'",
            "CREATE TABLE gone (value)",
            f"INSERT INTO gone VALUES ('{SECRET}')",
            "DROP TABLE gone",  # its page stays in the file
        ):
            made.execute(statement)
        made.commit()
    assert path.read_bytes().count(SECRET.encode()) > 10
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_planted_secret_is_gone_and_the_numbers_are_the_same(tmp_path, suffix):
    source, target = planted(tmp_path / "full.sqlite"), tmp_path / f"public.sqlite{suffix}"
    scrub(source, target)
    content = gzip.decompress(target.read_bytes()) if suffix else target.read_bytes()
    assert SECRET.encode() not in content
    assert b"TOKEN" not in content
    assert b"train" not in content
    before, after = read_trace(str(source)), read_trace(str(target))
    assert summarize(after).to_json() == summarize(before).to_json()
    assert after.ranks[0].compute["launch"].tolist()[0] == 0
    assert not list(tmp_path.glob(".scrub*"))


def test_scrubbing_a_packed_capture_and_what_is_none(tmp_path):
    scrub(LOC, tmp_path / "a.sqlite")
    scrubbed, whole = (read_trace(str(path)) for path in (tmp_path / "a.sqlite", LOC))
    assert summarize(scrubbed).ranks == summarize(whole).ranks
    foreign = tmp_path / "x.json"
    foreign.write_text("{}")
    (tmp_path / "cut.gz").write_bytes(LOC.read_bytes()[:9000])
    for source in (foreign, tmp_path / "cut.gz"):
        with pytest.raises(UnreadableInput, match=source.name):
            scrub(source, tmp_path / "never.sqlite")
    with pytest.raises(OSError):
        scrub(tmp_path / "absent.sqlite", tmp_path / "never.sqlite")
    assert not (tmp_path / "never.sqlite").exists()
