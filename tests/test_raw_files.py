"""The raw files of a cell: read alike plain and packed, hashed by what they hold, and packed without a loss."""

import gzip
import hashlib

import pytest

from benchmarks.record import CellFolder, Lines, read_lines
from benchmarks.record.folder import ABSENT, UNREADABLE, changed, pack, read_text, sha256


@pytest.fixture
def folder(tmp_path):
    """A cell's folder with every sort of raw file."""
    cell = CellFolder(tmp_path / "cell").make()
    cell.cell.write_text("{}")
    cell.attempt.write_text("{}")
    cell.topology.write_text("\tGPU0\n")
    for rank in (0, 1):
        cell.rank_count(rank).write_text("50")
        lines = Lines(cell.rank_lines(rank))
        for number in range(50):
            lines.write("beat", float(number), iterations=number)
    Lines(cell.gpu_samples).write("sample", 1.0, gpus=[{"sm_mhz": 1980}])
    (cell.path / "nccl" / "host.1.log").write_text("NCCL INFO é\n")
    for inside in (cell.tuning, cell.profile):
        inside.make()
    (cell.tuning.path / "nccl" / "host.2.log").write_text("NCCL INFO tuned\n")
    with gzip.open(cell.profile.path / "trace.sqlite.gz", "wb") as file:
        file.write(b"a trace")
    return cell


RAW = [
    "cell.json", "attempt.json", "ranks/0.jsonl", "ranks/1.jsonl", "gpus.jsonl", "nccl/host.1.log", "tuning/nccl/host.2.log",
    "profile/trace.sqlite", "topology.txt", "ranks/0.count", "ranks/1.count",
]  # fmt: skip


def test_every_raw_file_has_the_hash_of_what_it_holds(folder):
    hashes = folder.raw_sha256()
    assert list(hashes) == RAW
    assert hashes["ranks/0.jsonl"] == hashlib.sha256(folder.rank_lines(0).read_bytes()).hexdigest()
    assert hashes["profile/trace.sqlite"] == hashlib.sha256(b"a trace").hexdigest()
    assert list(changed(folder.path, hashes)) == []


def test_what_is_published_keeps_every_raw_file_and_the_attempt(folder):
    (folder.path / "logs" / "rank0.log").write_text("what a user's code printed")
    published = {path.relative_to(folder.path).as_posix() for path in folder.published()}
    assert published == set(RAW)


def test_packing_changes_neither_hashes_nor_what_readers_see(folder):
    hashes, lines = folder.raw_sha256(), list(read_lines(folder.rank_lines(1)))
    logs = [read_text(path) for path in folder.nccl_logs()]
    assert folder.pack() > 0
    assert not folder.rank_lines(1).exists()
    assert folder.rank_lines(1).with_name("1.jsonl.gz").exists()
    assert folder.raw_sha256() == hashes
    assert list(read_lines(folder.rank_lines(1))) == lines and len(lines) == 50
    assert [read_text(path) for path in folder.nccl_logs()] == logs == ["NCCL INFO é\n"]
    assert folder.all_rank_lines() == [folder.rank_lines(0), folder.rank_lines(1)]
    assert {"ranks/0.jsonl.gz", "gpus.jsonl.gz"} <= {
        path.relative_to(folder.path).as_posix() for path in folder.artifacts()
    }
    packed = folder.rank_lines(1).with_name("1.jsonl.gz").read_bytes()
    assert folder.pack() == 0
    assert folder.rank_lines(1).with_name("1.jsonl.gz").read_bytes() == packed
    folder.set_aside()  # a new attempt finds no sample of the packed one
    assert folder.raw_files() == []
    assert len(CellFolder(folder.path / "attempt-1").raw_files()) == len(RAW)


def test_the_same_content_packs_to_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("line\n" * 100)
        pack(tmp_path / name)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_file_that_was_edited_removed_or_damaged_is_named(folder):
    hashes = folder.raw_sha256()
    folder.pack()
    packed = folder.rank_lines(0).with_name("0.jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-12])
    (folder.path / "nccl" / "host.1.log.gz").unlink()
    folder.attempt.write_text("{ }")
    assert dict(changed(folder.path, hashes)) == {
        "attempt.json": sha256(folder.attempt),
        "ranks/0.jsonl": UNREADABLE,
        "nccl/host.1.log": ABSENT,
    }
    assert 0 < len(list(read_lines(folder.rank_lines(0)))) <= 50  # the lines before the damage


def test_a_file_that_cannot_be_packed_stays(folder, monkeypatch):
    monkeypatch.setattr(gzip, "decompress", lambda data: b"something else")
    with pytest.raises(OSError, match="does not hold what"):
        folder.pack()
    assert folder.rank_lines(0).exists()
    assert not folder.rank_lines(0).with_name("0.jsonl.gz").exists()
