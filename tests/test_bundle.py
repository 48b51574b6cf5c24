"""`python -m analysis report STUDY --bundle`: one archive that others can open, check and make the report of again."""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pages import contents

from analysis.__main__ import main
from analysis.bundle import bundle
from analysis.study.noise_floor import as_json
from analysis.study.study import open_study
from benchmarks.record import CellFolder, record_paths
from conf.secrets import without_secrets

DATA = Path(__file__).parent / "data" / "h200_x4"
NAME = "settings_again"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """An output_dir: a study with raw samples, another, and what a third showed of the scatter."""
    folder = tmp_path_factory.mktemp("outputs")
    for name in (NAME, "links"):
        shutil.copytree(DATA / name, folder / name)
    floors = open_study(DATA / "waterfall").floors.own()
    content = json.loads(json.dumps(as_json({"waterfall": floors})))
    for row in content["studies"]["waterfall"]:
        if row["world_size"] == 4:
            row["world_size"] = 2  # as the cells of the study have
    (folder / "noise_floor.json").write_text(json.dumps(content))
    logs = folder / NAME / record_paths(folder / NAME)[0].parent.name / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("what a user's code printed")
    return folder


@pytest.fixture(scope="module")
def archive(outputs):
    return bundle(outputs / NAME)


@pytest.fixture(scope="module")
def original(archive, tmp_path_factory):
    """The unpacked bundle."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(archive), str(folder)], check=True)
    return folder / f"{NAME}.bundle"


@pytest.fixture
def unpacked(original, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(original, tmp_path / "bundle")


def verified(capsys, path):
    """(Exit status, {study: result})."""
    status = main(["verify", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    return status, {one["study"].rpartition("/")[2]: one for one in found.get("studies", [found])}


def test_a_bundle_verifies_packed_and_unpacked(archive, original, capsys):
    for path in (archive, original):
        status, found = verified(capsys, path)
        assert status == 0
        assert set(found) == {NAME}
        assert not any(one["differences"] for one in found.values())
        assert (
            found[NAME]["records"]
            == found[NAME]["recomputed"]
            == len(record_paths(DATA / NAME))
            > 3
        )
    sums = subprocess.run(
        ["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=original, capture_output=True, text=True
    )
    assert (sums.returncode, sums.stdout) == (0, "")


def test_the_report_made_from_a_bundle_is_the_one_in_it_and_the_studys_own(
    outputs, original, tmp_path
):
    assert main(["report", str(original / NAME), "-o", str(tmp_path / "again")]) == 0
    assert main(["report", str(outputs / NAME), "-o", str(tmp_path / "own")]) == 0
    inside = contents(original / NAME / "report")
    assert inside == contents(tmp_path / "again") == contents(tmp_path / "own")
    page = inside["index.html"].decode()
    assert "for the next run, each from" in page


def test_it_holds_what_others_need_and_nothing_else(outputs, original):
    folder, cell = original / NAME, CellFolder(record_paths(outputs / NAME)[0].parent)
    inside = folder / cell.path.name
    assert (inside / "record.json").read_bytes() == cell.record.read_bytes()
    assert len(list(inside.glob("ranks/*.jsonl.gz"))) == len(cell.all_rank_lines()) == 2
    assert not list(original.rglob("logs")) and not list(folder.rglob("*.jsonl"))
    assert not (original / "links").exists(), "another study"
    assert set(json.loads((original / "noise_floor.json").read_text())["studies"]) == {
        "other studies"
    }
    assert "python launch.py" in (original / "commands.sh").read_text()
    readme = (original / "README.md").read_text()
    assert "matplotlib " in readme
    assert f"python -m analysis report BUNDLE/{NAME} -o again" in readme and "resnet50" in readme


def test_no_secret_is_in_it(original):
    texts = (
        gzip.decompress(text) if path.endswith(".gz") else text
        for path, text in contents(original).items()
        if not path.endswith(".pdf")  # packed bytes, no text
    )
    words = {word for text in texts for word in text.decode(errors="replace").split()}
    assert len(words) > 1000 and [word for word in words if without_secrets(word) != word] == []


def test_nothing_of_when_and_where_it_was_made_is_in_it(outputs, archive):
    with zipfile.ZipFile(archive) as read:
        names = [entry.filename for entry in read.infolist()]
        assert names == sorted(names)
        assert {entry.date_time[0] for entry in read.infolist()} == {1980}
        assert not [name for name in names if str(outputs).encode() in read.read(name)]
    assert not [path for path in outputs.iterdir() if path.name.startswith(".")]


def change_samples(folder):
    """Change one byte of one rank's samples, and pack them again as a forger would."""
    path = sorted(folder.glob("*/ranks/0.jsonl.gz"))[0]
    text = gzip.decompress(path.read_bytes())
    at = text.index(b'"ms": [') + 8 if b'"ms": [' in text else text.index(b'"ms":[') + 6
    digit = b"9" if text[at : at + 1] != b"9" else b"8"
    path.write_bytes(gzip.compress(text[:at] + digit + text[at + 1 :], mtime=0))
    return path


@pytest.mark.parametrize("forger_knows_the_list", [False, True])
def test_a_changed_byte_of_a_sample_is_found(unpacked, capsys, forger_knows_the_list):
    path = change_samples(unpacked / NAME)
    if forger_knows_the_list:
        sums, name = unpacked / "SHA256SUMS", path.relative_to(unpacked).as_posix()
        lines = [line for line in sums.read_text().splitlines() if not line.endswith(name)]
        sums.write_text(
            "\n".join([*lines, f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}"]) + "\n"
        )
    status, found = verified(capsys, unpacked)
    differing = [one["file"] for one in found[NAME]["differences"]]
    assert status == 1
    assert (path.relative_to(unpacked).as_posix() in differing) != forger_knows_the_list
    assert "ranks/0.jsonl" in differing  # the record has its hash too


@pytest.mark.parametrize("what", ["README.md", f"{NAME}/report/index.html"])
def test_a_changed_missing_or_further_file_is_found(unpacked, capsys, what):
    (unpacked / what).write_bytes((unpacked / what).read_bytes().replace(b"e", b"E", 1))
    (unpacked / "notes.txt").write_text("of the reader's own")
    status, found = verified(capsys, unpacked)
    named = {
        one["file"]: (one["recorded"], one["recomputed"])
        for result in found.values()
        for one in result["differences"]
    }
    assert status == 1 and "notes.txt" not in named
    assert set(named) == {what}


def test_a_study_that_does_not_verify_is_not_bundled(outputs, tmp_path, capsys):
    study = shutil.copytree(outputs / NAME, tmp_path / "study")
    change_samples(study)
    assert main(["report", str(study), "--bundle"]) == 1
    assert "does not say what its samples say, so nothing was bundled" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study"]


def test_the_command_prints_where_it_is_and_the_same_study_gives_the_same_bytes(tmp_path, capsys):
    study = shutil.copytree(DATA / "feet", tmp_path / "feet")
    assert main(["report", str(study), "--bundle"]) == 0
    said = capsys.readouterr().out
    digest = hashlib.sha256((tmp_path / "feet.bundle.zip").read_bytes()).hexdigest()
    assert f"({(tmp_path / 'feet.bundle.zip').stat().st_size / 1e3:,.0f} kB)" in said
    assert digest in said and "python -m analysis verify feet.bundle.zip" in said
    (study / "thesis.txt").write_text("of the user's own")
    for path in study.glob("*/record.json"):
        path.touch()
    assert (
        main(["report", str(study), "--bundle", "--json", "-o", str(tmp_path)]) == 0
    )  # in place of the earlier one
    assert json.loads(capsys.readouterr().out)["sha256"] == digest
    assert {path.name for path in tmp_path.iterdir()} == {"feet", "feet.bundle.zip"}


def test_what_is_no_bundle_is_left_as_it_is(outputs, tmp_path, refusal):
    (tmp_path / "thesis.zip").write_text("my thesis")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as photos:
        photos.writestr("a.jpg", "photo")
    for name in ("thesis.zip", "photos.zip"):
        before = (tmp_path / name).read_bytes()
        said = refusal("report", outputs / NAME, "--bundle", "-o", tmp_path / name)
        assert "holds something else than a bundle; it is left as it is" in said
        assert (tmp_path / name).read_bytes() == before
        assert refusal("verify", tmp_path / name)


def test_a_damaged_archive_is_refused_in_one_line(archive, tmp_path, capsys):
    whole = archive.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    nameless = whole.replace(NAME.encode(), b"\0" + NAME.encode()[1:])
    for number, content in enumerate(
        (whole[:-100], whole[1000:], flipped, nameless, b"", b"PK\x05\x06" + 18 * b"\0")
    ):
        path = tmp_path / f"{number}.zip"
        path.write_bytes(content)
        assert main(["verify", str(path)]) in (1, 2)
        captured = capsys.readouterr()
        assert len(captured.err.splitlines()) == 1 or "differ" in captured.out


def test_an_archive_writes_nothing_outside_of_its_own_folder(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as evil:
        for name in ("../../outside", "/tmp/outside-ringside", "b/SHA256SUMS", "b/s/c/record.json"):
            evil.writestr(name, f"{64 * '0'}  ../../../etc/passwd\n")
    status, found = verified(capsys, tmp_path / "evil.zip")
    assert not (tmp_path.parent / "outside").exists() and not Path("/tmp/outside-ringside").exists()
    named = {one["file"]: one["recomputed"] for one in found["s"]["differences"]}
    assert status == 1 and named["../../../etc/passwd"] == "absent", (
        "what a list names elsewhere is not read"
    )
