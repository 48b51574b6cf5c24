"""Small packed files that hold much: refused in a sentence, with neither the time nor the memory they ask for."""

import gzip
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from build import DATA, ROOT

from analysis import bundle, input_files
from analysis.__main__ import main
from benchmarks.record import folder as cell_folder

STUDY = DATA / "h200_x2" / "eager_a"
CELL = "resnet50-nccl_allreduce-gpus0-1-b00fa85d23"
LINES = f"{CELL}/ranks/0.jsonl.gz"
TRACE = "kineto_h200_x2/rank0.json.gz"


@pytest.fixture
def study(tmp_path):
    return shutil.copytree(STUDY, tmp_path / "study")


def refusals(capsys, *arguments):
    status = main(list(map(str, arguments)))
    printed, said = capsys.readouterr()
    assert "Traceback" not in printed + said
    return status, printed, said


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("MOST_UNPACKED_BYTES", 1 << 20, "more than 1 MiB"),
        ("MOST_UNPACKED_VALUES", 50_000, "more than 50,000 values and lines"),
    ],
)
def test_a_cell_that_unpacks_to_much_is_named_and_the_others_are_checked(
    study, capsys, monkeypatch, limit, value, said
):
    text = gzip.decompress((study / LINES).read_bytes())
    (study / LINES).write_bytes(gzip.compress(text + b'{"kind": "x", "time": 1}\n' * 60_000))
    monkeypatch.setattr(cell_folder, limit, value)
    status, printed, _ = refusals(capsys, "verify", study)
    lines = [line for line in printed.splitlines() if line.startswith("wrong: ")]
    assert status == 1 and len(lines) == 1
    assert lines[0].startswith(f"wrong: {CELL}: ") and ".gz: with it the packed files" in lines[0]
    assert said in lines[0] and "8 of 9 records recomputed" in printed
    status, _, _ = refusals(capsys, "report", study)
    page = (study / "report" / "report.md").read_text()
    assert status == 0 and said in page


def test_a_plain_file_of_that_size_is_read(study, capsys, monkeypatch):
    monkeypatch.setattr(cell_folder, "MOST_UNPACKED_BYTES", 0)
    for path in study.rglob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert refusals(capsys, "verify", study)[0] == 0


@pytest.mark.parametrize("file", [TRACE, "nsys_h200_x2.sqlite.gz"])
def test_a_trace_that_unpacks_to_much_is_refused(capsys, monkeypatch, file):
    assert refusals(capsys, "trace", DATA / file)[0] == 0
    monkeypatch.setattr(input_files, "PACKED_BYTES", 1 << 16)
    monkeypatch.setattr(input_files, "PACKED_TIMES", 1)
    status, _, said = refusals(capsys, "trace", DATA / file)
    assert status == 2 and Path(file).name in said and said.count("\n") == 1
    assert "no packed file of its size holds so much" in said


@pytest.mark.parametrize(("limit", "value"), [("PACKED_BYTES", 1000), ("MOST_FILES", 3)])
def test_an_archive_that_unpacks_to_much_is_refused(tmp_path, capsys, monkeypatch, limit, value):
    file = tmp_path / "study.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(4):
            archive.writestr(f"study/{number}", b"\0" * 1_000_000)
    monkeypatch.setattr(bundle if limit == "MOST_FILES" else input_files, limit, value)
    status, _, said = refusals(capsys, "verify", file)
    assert status == 2 and f"{file}: holds 4 MB in 4 files; expected from an archive" in said


def test_too_little_memory_is_a_sentence(study, capsys, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr("analysis.commands.verify.verify", exhausted)
    status, _, said = refusals(capsys, "verify", study)
    assert (status, said) == (1, "python -m analysis verify: there is too little memory\n")


def bomb(path, piece, pieces):
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(pieces):
            file.write(piece)


def limited():
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "piece", "pieces"),
    [
        ("lines", b'{"kind": "x", "time": 1}\n' * 40_000, 1000),  # 40 million
        ("lines", b"\0" * (1 << 20), 8000),  # 8 GB
        ("lines", b"[],[]," * 200_000, 1000),
        ("trace", b'{"traceEvents": [' + b'{"ph": "X"},' * 80_000, 1000),
        ("zip", b"\0" * (1 << 20), 4000),
    ],
)
def test_a_bomb_takes_neither_memory_nor_time(study, tmp_path, kind, piece, pieces):
    command = ["verify", str(study)]
    if kind == "lines":
        bomb(study / LINES, piece, pieces)
    elif kind == "trace":
        bomb(tmp_path / "rank0.json.gz", piece, pieces)
        command = ["trace", str(tmp_path / "rank0.json.gz")]
    else:
        with (
            zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("study/file", "w", force_zip64=True) as file,
        ):
            for _ in range(pieces):
                file.write(piece)
        command = ["verify", str(tmp_path / "a.zip")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "analysis", *command],
        cwd=ROOT, capture_output=True, text=True, preexec_fn=limited,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert "Traceback" not in done.stderr and done.returncode in (1, 2), done.stderr
    assert "more than" in done.stdout + done.stderr or "expected from an archive" in done.stderr
    assert spent < 5.0
