"""Files of ours are written safely: what stands in their place stays, and no writer waits."""

import ast
import functools
import os
import stat
import time

import pytest
from build import ROOT, make_cell

from analysis.report.report_files import write_folder
from analysis.topology.drawing import write_drawing
from benchmarks.agent import processes
from benchmarks.rank.ranks import Reporter
from benchmarks.record import CellFolder, Lines, RecordError, read, read_lines, safe_files
from benchmarks.record.safe_files import NotOurs
from conf.host import UMASK
from conf.options import Refused
from launch.study.background import update_noise_floor
from launch.study.study_folder import StudyFolder
from launch.tracking.store import store_lock

pytestmark = pytest.mark.timeout(20)  # a writer that waits for a pipe waits for ever
DETAILS = {
    "environment": {"topology": "GPU0"}, "sweep_id": "s", "overrides": [], "drift": False,
    "study": "s",
}  # fmt: skip
# What a user may have where a file of ours belongs: planted at a path, with links to the user's.
IN_THE_WAY = {
    "link": lambda path, mine: path.symlink_to(mine / "file"),
    "link to nothing": lambda path, mine: path.symlink_to(mine / "nothing"),
    "link to a folder": lambda path, mine: path.symlink_to(mine),
    "pipe": lambda path, mine: os.mkfifo(path),
    "folder": lambda path, mine: path.mkdir(),
    "second name": lambda path, mine: path.hardlink_to(mine / "file"),
}


def locked(path):
    with safe_files.locked(path) as ours:
        assert ours


def moved(path):
    made = path.with_name("made")
    made.write_bytes(b"{}")
    try:
        safe_files.put_in_place(made, path)
    finally:
        made.unlink(missing_ok=True)


WRITERS = {
    "append": lambda path: Lines(path).write("begin", 1.0),
    "lock": locked,
    "write": lambda path: safe_files.write_whole(path, b"{}"),
    "move": moved,
    # It alone follows a link, as the user named it; the user's text at its end is not a drawing.
    "draw": lambda path: write_drawing(path, b"<svg></svg>"),
}
# Nothing of the user's changes.
RIGHT = {("write", "second name"), ("move", "second name"), ("draw", "link to nothing")}


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("my thesis")
    return folder


def seen(folder):
    """Everything below a folder: its kind, and what it holds or leads to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode, holds = path.lstat().st_mode, None
        if stat.S_ISREG(mode):
            holds = path.read_bytes()
        elif stat.S_ISLNK(mode):
            holds = path.readlink()
        found[str(path.relative_to(folder))] = stat.S_IFMT(mode), holds
    return found


@pytest.mark.parametrize("thing", IN_THE_WAY)
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_in_the_way_stays_as_it_is(tmp_path, mine, writer, thing):
    place = tmp_path / "ours" / "file"
    place.parent.mkdir()
    IN_THE_WAY[thing](place, mine)
    before = seen(tmp_path)
    if (writer, thing) in RIGHT:
        WRITERS[writer](place)
        assert (mine / "file").read_text() == "my thesis" and place.read_bytes()
        return
    with pytest.raises(NotOurs, match=r"it is left as it is$") as refused:
        WRITERS[writer](place)
    assert str(tmp_path) in str(refused.value) and seen(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_device_is_not_opened(tmp_path, writer):
    place = tmp_path / "device"
    os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    with pytest.raises(NotOurs, match="is not a regular file"):
        WRITERS[writer](place)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_is_a_link_is_not_entered(tmp_path, mine, writer):
    (tmp_path / "ours").symlink_to(mine)
    before = seen(mine)
    if writer == "draw":
        write_drawing(tmp_path / "ours" / "x.svg", b"<svg/>")  # the user named it
        assert (mine / "x.svg").read_bytes() == b"<svg/>"
        return
    with pytest.raises((NotOurs, FileNotFoundError), match="ours"):
        WRITERS[writer](tmp_path / "ours" / "new")
    assert seen(mine) == before


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
@pytest.mark.parametrize("sticky", [False, True], ids=["", "sticky"])
def test_the_umask_decides_who_may_read(tmp_path, mask, sticky):
    if sticky:
        tmp_path.chmod(0o1777)
    before = os.umask(mask)
    try:
        folder = safe_files.make_folder(tmp_path / "a" / "b")
        for name, writer in WRITERS.items():
            writer(folder / name)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        most = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == most & ~mask, path
    assert {path.name for path in folder.iterdir()} == set(WRITERS), "nothing else is left"


def test_an_agent_behind_a_profiler_has_the_umask_of_the_launcher():
    before = os.umask(0o027)
    try:
        assert int(processes.started_by_me({}, through_profiler=True)[UMASK], 8) == 0o027
    finally:
        os.umask(before)


def test_a_drawing_takes_the_place_of_a_drawing_only(tmp_path):
    path = tmp_path / "x.svg"
    for drawing in (b'<?xml version="1.0"?>\n<svg>1</svg>', b"<svg>2</svg>"):
        write_drawing(path, drawing)
        assert path.read_bytes() == drawing
    path.write_text("capture of nvidia-smi")
    with pytest.raises(NotOurs, match="holds something else than a drawing"):
        write_drawing(path, b"<svg>3</svg>")


def test_a_lock_is_waited_for_and_told_and_holds_nothing(tmp_path):
    path = tmp_path / ".lock"
    with safe_files.locked(path) as first, safe_files.locked(path, 0.1) as second:
        assert (first, second) == (True, False)
    with safe_files.locked(path) as again:
        assert again
    path.write_text("text")
    with pytest.raises(NotOurs, match="holds something"), safe_files.locked(path):
        pass
    assert path.read_text() == "text"


def test_a_write_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = safe_files.write_whole(tmp_path / "x.json", b"1")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*x.json'"):
        safe_files.write_whole(path, b"2")
    assert path.read_bytes() == b"1" and list(tmp_path.iterdir()) == [path]


def test_a_process_that_ends_at_once_leaves_no_file_that_it_has_begun(tmp_path, monkeypatch):
    path = safe_files.write_whole(tmp_path / "x.json", b"1")
    monkeypatch.setattr(os, "fsync", lambda descriptor: safe_files.remove_unfinished())
    with pytest.raises(FileNotFoundError):  # this process goes on to rename it
        safe_files.write_whole(path, b"2")
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"1"


FILES = (".lock", ".aside", "record.json", "attempt.json", "cell.json", "topology.txt")


@pytest.fixture
def begun(tmp_path):
    """(A study, a cell of it, the cell's folder)."""
    study, cell = StudyFolder(str(tmp_path / "out"), "s"), make_cell()
    return study, cell, CellFolder(study.folder / cell.folder)


@pytest.mark.parametrize("part", ["", *FILES, "ranks", "logs", "nccl"])
@pytest.mark.parametrize("thing", ["link", "link to nothing", "link to a folder"])
def test_a_cell_with_a_link_in_it_is_not_begun(begun, mine, part, thing):
    """Made between the plan and the cell. Nothing is written behind it, and the study goes on."""
    study, cell, folder = begun
    if part:
        folder.path.mkdir()
    IN_THE_WAY[thing](folder.path / part if part else folder.path, mine)
    before = seen(mine)
    with pytest.raises(NotOurs, match="is a link"), study.lock(cell):
        study.begin(cell, "t" * 32, DETAILS)
    assert seen(mine) == before and (folder.path / part).is_symlink()


@pytest.mark.parametrize("part", ["record.json", "attempt.json", "ranks", "attempt-1"])
@pytest.mark.parametrize("thing", ["pipe", "folder"])
def test_what_else_is_in_a_cell_is_set_aside_or_stays(begun, mine, part, thing):
    study, cell, folder = begun
    folder.path.mkdir()
    IN_THE_WAY[thing](folder.path / part, mine)
    kind = stat.S_IFMT((folder.path / part).lstat().st_mode)
    assert study.finished(cell) is None
    with study.lock(cell) as ours:
        assert ours
        study.begin(cell, "t" * 32, DETAILS)
    kept = folder.path / part if part == "attempt-1" else folder.path / "attempt-1" / part
    assert stat.S_IFMT(kept.lstat().st_mode) == kind and folder.attempt.is_file()


def report_of_a_rank(root):
    Reporter(CellFolder(root / "cell"), 0)


def enter_store_lock(root):
    with store_lock(root / ".mlflow.db.lock"):
        pass


LEFT = "is left as it is"
UNWRITABLE = r"output_dir=.*: cannot be written \(.*journal.jsonl (is a|is not a|has a|has no) .*\)"
# Who writes a file, by its path: how, and what is raised with which words.
CALLERS = {
    "s/journal.jsonl": (lambda root: StudyFolder(str(root), "s"), Refused, UNWRITABLE),
    "cell/ranks/0.jsonl": (report_of_a_rank, NotOurs, LEFT),
    "cell/ranks/0.count": (report_of_a_rank, NotOurs, LEFT),
    ".mlflow.db.lock": (enter_store_lock, NotOurs, LEFT),
}


@pytest.mark.parametrize("thing", IN_THE_WAY)
@pytest.mark.parametrize("name", CALLERS)
def test_who_cannot_write_says_so_and_leaves_what_is_there(tmp_path, mine, name, thing):
    call, error, words = CALLERS[name]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    IN_THE_WAY[thing](tmp_path / name, mine)
    before = seen(mine)
    with pytest.raises(error, match=words):
        call(tmp_path)
    assert seen(mine) == before
    assert (tmp_path / name).lstat()


@pytest.mark.parametrize("thing", IN_THE_WAY)
@pytest.mark.parametrize("name", ["noise_floor.json", ".noise_floor.json.lock"])
def test_the_noise_floor_is_a_note_where_something_else_is(tmp_path, mine, name, thing):
    IN_THE_WAY[thing](tmp_path / name, mine)
    before, notes = seen(mine), []
    update_noise_floor(tmp_path / "s", [], notes.append)
    assert seen(mine) == before and (tmp_path / name).lstat()
    assert notes or name == "noise_floor.json", "a study that shows nothing writes nothing"


@pytest.mark.parametrize("thing", IN_THE_WAY)
@pytest.mark.parametrize("name", ["", "index.html", "report.md"])
def test_a_report_replaces_its_own_files_only(tmp_path, mine, name, thing):
    report = tmp_path / "report"
    page = b'<meta name="ringside-files" content="[&quot;report.md&quot;]">'
    if name:
        write_folder(report, {"index.html": page, "report.md": b"1"})
        (report / name).unlink()
        IN_THE_WAY[thing](report / name, mine)
    else:
        IN_THE_WAY[thing](report, mine)
    before, of_user = seen(tmp_path), seen(mine)
    try:
        write_folder(report, {"index.html": page, "report.md": b"2"})
    except OSError:
        assert seen(tmp_path) == before
    else:  # an empty folder, or a second name of the user's file: its first name keeps what it held
        assert thing in ("folder", "second name")
        assert seen(mine) == of_user


def test_readers_of_a_study_do_not_wait_for_a_pipe(tmp_path):
    begun = time.monotonic()
    for name in ("record.json", "0.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(RecordError, match="is not a regular file"):
        read(tmp_path / "record.json")
    with pytest.raises(NotOurs):
        list(read_lines(tmp_path / "0.jsonl"))
    assert time.monotonic() - begun < 10


# --- no other module writes by itself -------------------------------------------------------------

MAKING = {
    "FileLock", "NamedTemporaryFile", "TemporaryDirectory", "chmod", "copy2", "copyfile",
    "copytree", "export_chrome_trace", "ftruncate", "hardlink_to", "link", "makedirs", "mkdir",
    "mkdtemp", "mkstemp", "move", "rename", "save", "savefig", "symlink", "symlink_to", "touch",
    "truncate", "write_bytes", "write_text",
}  # fmt: skip
# Calls outside safe_files that make, replace or move a file, and why they may.
ALLOWED = {
    # Lines of a rank, in processes of a script that import nothing of ours.
    "benchmarks/script/hooks/sitecustomize.py": "open",
    "benchmarks/script/exchanges.py": "os.open",
    "benchmarks/script/tracer.py": "self._profiler.export_chrome_trace",
    # In a new folder of a random name, from which the archive is put in place; a scratch folder.
    "analysis/bundle.py": "archive.open path.parent.mkdir path.write_bytes root.mkdir"
    " tempfile.TemporaryDirectory",
    # A new folder of a random name is swapped with the earlier report's: it appears as a whole.
    "analysis/report/report_files.py": "(new/path).parent.mkdir (new/path).write_bytes new.rename"
    " old.rename os.link shutil.copy2 target.rename",
    "analysis/report/figure.py": "figure.savefig",  # into memory
    "analysis/topology/drawing.py": "figure.savefig",
    "analysis/trace/nsys_export.py": "sqlite3.connect",  # mode=ro
    # In scratch folders, which are removed.
    "analysis/trace/scrub.py": "packed.open sqlite3.connect tempfile.TemporaryDirectory",
    "analysis/trace/source.py": "plain.open tempfile.TemporaryDirectory",
    "benchmarks/timing/c_calls.py": "source.write_text tempfile.TemporaryDirectory",
    # mkdir fails where anything is; the lock of a folder of ours, never through a link.
    "benchmarks/agent/scratch.py": "folder.mkdir os.open",
    "benchmarks/rank/host_agent.py": "os.open",  # /dev/null
    "benchmarks/record/safe_text.py": "os.open",  # /dev/null
    # mkdir fails where anything is; moves inside a cell's folder.
    "benchmarks/record/folder.py": "(self.path/part).mkdir aside.rename path.rename",
    "benchmarks/training/passes.py": "profiler.export_chrome_trace",  # by torch, in a new folder
    "launch/engines/hosts.py": "open",  # a descriptor that safe_files opened
    "launch/engines/slurm.py": "folder.mkdir",  # safe_files then looks whether it is a folder
    "launch/run_cell.py": "folder.profile.nccl_conf.parent.rename",  # inside a cell's folder
    # MLflow and SQLite write the store, in the user's folder; os.link fails where anything is.
    "launch/tracking/store.py": "os.link path.parent.mkdir sqlite3.connect",
    "trainers/memory.py": "os.open",  # in /dev/shm: anew with O_EXCL, for this user alone
}


@functools.cache
def calls():
    """{module: its calls} of everything that Ringside runs."""
    paths = [ROOT / "launch.py"]
    for package in ("conf", "trainers", "benchmarks", "launch", "analysis"):
        paths += (ROOT / package).rglob("*.py")
    found = {}
    for path in paths:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        found[str(path.relative_to(ROOT))] = calls
    return found


def makes_a_file(node):
    """Whether a call makes, replaces or moves a file."""
    last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
    if last in MAKING:
        return True
    if last == "connect":
        return ast.unparse(node.func) == "sqlite3.connect"
    if last == "replace":  # of a path; text has two arguments
        of_one = len(node.args) == 1 and not node.keywords
        return of_one and ast.unparse(node.func) != "dataclasses.replace"
    if last != "open":
        return False
    for given in (*node.args, *(keyword.value for keyword in node.keywords)):
        mode = getattr(given, "value", None)
        if isinstance(mode, str) and {*mode} & {*"wax+"} and {*mode} <= {*"rwaxbt+"}:
            return True
    return "os.O_" in ast.unparse(node)


def test_no_other_module_makes_files_by_itself():
    found = {}
    for module, nodes in calls().items():
        making = {ast.unparse(node.func).replace(" ", "") for node in nodes if makes_a_file(node)}
        if making and not module.endswith("/safe_files.py"):
            found[module] = making
    assert found == {module: {*names.split()} for module, names in ALLOWED.items()}


def test_no_text_of_a_file_is_what_the_locale_makes_of_it():
    reads = 0
    for module, nodes in calls().items():
        for node in nodes:
            if not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("read_text", "write_text"):
                continue
            reads += 1
            words = {keyword.arg for keyword in node.keywords}
            positional = node.func.attr == "read_text" and node.args
            assert "encoding" in words or positional, (module, node.lineno)
    assert reads
