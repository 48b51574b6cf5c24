"""Sweeps with engine.start=warm whose cells harm the ranks that the next ones would go on in: no record is wrong for it."""

import pytest
from own_user import QUIET, SHORT, user

from benchmarks.record import read_study
from benchmarks.record.cell_folder import CellFolder

HARMFUL = """
import os
import signal
import threading
import time

from torch import nn

BUILT = []  # a cell that was built in this process before


class Harmful(nn.Linear):
    def __init__(self, classes, channels, does):
        super().__init__(channels * 32 * 32, classes)
        self.does, self.steps = does, 0
        if does == "fails after another" and BUILT:
            raise RuntimeError("planted: another cell was here")
        if does == "leaves a thread":
            threading.Thread(target=time.sleep, args=(600,), name="planted", daemon=True).start()
        BUILT.append(does)

    def forward(self, images):
        self.steps += 1
        if self.does == "dies after another" and len(BUILT) > 1 and self.steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images.flatten(1))


def build(classes, channels, does):
    return Harmful(classes, channels, does)
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(What the launcher said, {what the model does: its record}, the study's folder) of a sweep on one worker."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "src").mkdir()
    (folder / "src" / "harmful.py").write_text(HARMFUL)
    asked = [
        "nothing",
        "fails after another",
        "leaves a thread",
        "nothing at all",
        "dies after another",
        "nothing more",
    ]
    done = user(folder)(
        "-m", "gpus=0", *(one for one in SHORT if not one.startswith("model=")), *QUIET, "engine.start=warm", "noise_pairs=0",
        "model.library=python", "model.builder=harmful:build", "model.name=harmful", "image_size=32",
        "+model.options.does=" + ",".join(f"'{one}'" for one in asked),
    )  # fmt: skip
    study = folder / "outputs" / "default"
    records, unreadable = read_study(study)
    assert (done.returncode, unreadable) == (0, []), done.stdout + done.stderr
    found = {(record.cell.model.options["does"], record.cell.repeat): record for record in records}
    return done.stdout, found, study


def how(record):
    """How the only rank of a record began, and with which cell of its pool this was."""
    (rank,) = record.ranks
    return rank["started"], rank["place"]


def test_every_cell_is_measured_in_the_end(swept):
    _, records, _ = swept
    assert len(records) == 7 and {record.state for record in records.values()} == {"finished"}
    assert {record.validity.verdict for record in records.values()} <= {"valid", "suspect"}


def test_a_cell_that_fails_after_another_is_measured_in_new_ranks(swept):
    said, records, study = swept
    for does, cause in (("fails after another", "exception"), ("dies after another", "killed")):
        record = records[does, 0]
        assert how(record) == ("fork", 0), does
        (earlier,) = CellFolder(study / record.cell.folder).earlier_attempts()
        failed = next(one for one in read_study(earlier.path.parent)[0] if one.state == "failed")
        assert failed.failure.cause == cause and failed.ranks[0]["started"] == "warm"
    # The second also began a pool, so it is measured, and dies, once more at its end.
    assert said.count("its ranks had measured another cell, so it is measured again in new ones") == 3


def test_ranks_that_kept_something_measure_no_other_cell(swept):
    said, records, _ = swept
    record = records["leaves a thread", 0]
    assert how(record)[0] == "warm"
    (back,) = record.checks["given_back"]
    assert back["kept"] == ["left 1 thread (planted) running"]
    assert how(records["nothing at all", 0]) == ("fork", 0)
    assert "its ranks are ended, for they kept what they should not: rank 0 left 1 thread (planted) running" in said


def test_a_cell_that_goes_on_in_living_ranks_has_no_spawn(swept):
    _, records, _ = swept
    for record in records.values():
        found = {row["part"]: row["seconds"] for row in record.tables["seconds"]["rows"]}
        assert sum(found.values()) == pytest.approx(record.ended_at - record.started_at, abs=0.1)
        warm = record.ranks[0]["started"] == "warm"
        assert ("spawn" in found, "take over" in found) == (not warm, warm)
        assert ("give back" in found) == ("pool" in record.ranks[0]), (
            "ranks that end with their cell keep nothing for another"
        )
