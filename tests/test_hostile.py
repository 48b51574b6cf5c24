"""Hostile requests (tests/hostile.py): each is refused in one line, or planned and does no harm.

No harm: no traceback, an end in time, bounded memory, no character that a terminal obeys, nothing
opened for writing outside TMPDIR, nothing executed, and every file beside TMPDIR as it was.
"""

import hashlib
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hostile import MODULE, OBEYED, REQUESTS, Request, wrong_requests
from hypothesis import given, seed, settings
from omegaconf import OmegaConf

from benchmarks.record.safe_text import visible

CPU_SECONDS = 20.0  # of one request; planning one takes one
MEMORY_BYTES = 1 << 30  # beside what the tests hold already
LONGEST_REFUSAL = 6000  # characters
LONGEST_SENTENCE = 700
CAMPAIGN = 500
CHANGES = "rename remove mkdir rmdir link symlink truncate chmod system exec posix_spawn"
CHANGES = {f"os.{name}" for name in CHANGES.split()} | {"socket.connect", "socket.bind"}
watched = []  # what is done while a request runs: (event, detail)
is_watching = False


def _watch(event, arguments):
    """An audit hook: it cannot be taken away again, so it looks at a switch."""
    if not is_watching:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            watched.append((event, path if isinstance(path, int) else os.fspath(path)))
    elif event == "subprocess.Popen":
        watched.append((event, arguments[1]))
    elif event in CHANGES:
        watched.append((event, arguments[0]))


sys.addaudithook(_watch)


class TooLong(BaseException):
    """No `except Exception` swallows it."""


def _too_long(number, frame):
    raise TooLong


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with what hostile requests may want to reach; TMPDIR lies beside it."""
    world, scratch = tmp_path / "world", tmp_path / "scratch"
    (world / "study").mkdir(parents=True)
    scratch.mkdir()
    (world / "file").write_text("precious")
    (world / "link").symlink_to(world / "file")
    (world / "mlflow.db").write_text("precious")
    (world / "obey.py").write_text(MODULE)
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("HOME", str(world))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(world))
    return world


def _state(folder):
    """Every path below a folder: kind, mode, time of change and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = ""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def complaints(request, launch, world):
    """What a request did that it must not; empty if it was refused in one line or harmless."""
    global is_watching
    for name, content in request.files.items():
        path = world / "study" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    os.chdir(world)
    before, scratch = _state(world), world.parent / "scratch"
    memory, hard = resource.getrlimit(resource.RLIMIT_DATA)  # a low RLIMIT_AS is refused by itself
    held = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
    watched.clear()
    handler = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY_BYTES, hard))
    is_watching = True
    try:
        code, out, err = launch("dry_run=true", *request.arguments)
    except TooLong:
        return [f"more than {CPU_SECONDS} s of CPU"]
    except BaseException as error:
        return [f"{type(error).__name__}: {error}"[:500]]
    finally:
        is_watching = False
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        after = _state(world)
    wrong = []
    if code not in (0, 2):
        wrong.append(f"status {code}")
    if code == 2 and (err.count("\n") != 1 or len(err) > LONGEST_REFUSAL):
        wrong.append(f"{err.count(chr(10))} lines of {len(err)} characters on stderr")
    if code == 0 and err:
        wrong.append(f"status 0, and said: {err[:200]}")
    if "Traceback" in out + err:
        wrong.append("a traceback")
    if visible(out + err) != out + err:
        wrong.append("a character that a terminal obeys")
    if after != before:
        wrong.append(f"changed {dict(before.items() ^ after.items()).keys()}")
    if left := list(scratch.iterdir()):
        wrong.append(f"left in TMPDIR: {left}")
    for event, what in watched:
        if not _is_allowed(event, what, scratch):
            wrong.append(f"{event} {what}")
    if OBEYED in after or "obey" in sys.modules:
        wrong.append("executed something")
    return wrong


def _is_allowed(event, what, scratch):
    if event in ("subprocess.Popen", "os.posix_spawn"):
        program = what[0] if isinstance(what, list) else what
        return Path(program).name in ("nvidia-smi", "nsys", "git", "uname")
    return isinstance(what, int) or str(what).startswith((str(scratch), "/dev/null"))


def examine(asked, launch, world):
    """Run a request, and put the world back for the next one."""
    wrong = complaints(asked, launch, world)
    for name in asked.files:
        (world / "study" / name).unlink()
    sys.modules.pop("obey", None)
    (world / OBEYED).unlink(missing_ok=True)
    assert wrong == [], ascii((asked.arguments, {**asked.files}))[:3000]


def hostile(count, number, launch, world):
    """Examine requests that are drawn from a seed."""

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None)
    @given(REQUESTS)
    def each(asked):
        examine(asked, launch, world)

    each()


def test_ten_hostile_requests_are_refused_or_harmless(launch, world):
    hostile(10, 7, launch, world)


def test_a_value_that_is_no_plain_one_is_refused(launch, world):
    """Found by seed 1: a Path as an option ended in a traceback."""
    content = b"name: mine\n_target_: obey.build\nx: !!python/object/apply:pathlib.Path [obeyed]\n"
    asked = Request(("--config-dir=study", "strategy=mine"), {"strategy/mine.yaml": content})
    examine(asked, launch, world)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_hostile_request_is_refused_or_harmless(launch, world, request):
    hostile(CAMPAIGN, request.config.getoption("seed"), launch, world)


def wrong_answer(option, arguments, launch):
    """What is wrong with the answer to a wrong value: neither one sentence nor planned as asked."""
    typed = ("dry_run=true", "device=cpu", *arguments)
    try:
        code, out, err = launch(*typed)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if code == 2:
        is_sentence = err.startswith("launch.py: ") and err.count("\n") == 1 and not out
        is_shown = len(err) < LONGEST_SENTENCE and visible(err) == err
        return "" if is_sentence and is_shown else f"{out}{err}"
    code, out, err = launch("--cfg", "job", *typed)
    if (code, err) != (0, "") or option is None:
        return f"status {code}: {err}"
    composed = OmegaConf.select(OmegaConf.create(out), option)
    if OmegaConf.is_config(composed):
        composed = OmegaConf.to_container(composed)
    asked = arguments[-1].partition("=")[2].strip("'")
    is_asked = str(composed) in (asked, str([asked]))  # YAML has no control characters
    is_asked = is_asked or str(composed) == str(yaml.safe_load(asked))
    is_asked = is_asked or (isinstance(composed, float) and composed == float(asked))
    return "" if is_asked else f"planned with {composed}"


def wrong_values(count, number, launch):
    """Ask for one wrong value or name at a time."""
    answers = {}
    for option, arguments in wrong_requests(count, number):
        answers[ascii(arguments)[:300]] = wrong_answer(option, arguments, launch)[:300]
    assert {arguments: answer for arguments, answer in answers.items() if answer} == {}


def test_wrong_values_are_one_sentence_or_planned_as_asked(launch):
    wrong_values(15, 3, launch)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_600_wrong_values_are_one_sentence_or_planned_as_asked(launch, request):
    wrong_values(600, request.config.getoption("seed"), launch)
