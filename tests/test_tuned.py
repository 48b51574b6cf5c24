"""tune= and ask=gains: search, confirmation with new runs, and the files that a user takes over."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml
from build import ROOT, make_cell, run_of

from analysis.nccl.log import AlgorithmChoice
from analysis.report.sections.standings import sizes_table, standings_table
from analysis.study.asked import (
    BUSBW,
    Asked,
    answer,
    is_answered,
    questions_of,
    recommended,
    replay,
)
from benchmarks.record import Failure, read_study
from conf.question import GAINS, Question
from launch.study.study_folder import StudyFolder
from launch.study.tuned_files import OPTIONS, TUNER, tuner_csv, write_tuned

TOPOLOGY = f"topology={Path(__file__).parent}/data/topo_h200_x4.txt"
REFUSED = [
    (["tune=speed"], "tune=speed: expected buckets or nccl"),
    (["tune=buckets", "ask=fastest"], "tune=buckets ask=fastest: tune asks a question of its own"),
    (
        ["tune=buckets", "gpus=0"],
        "gpus=0: ask=gains and tune= need two or more GPUs or workers, as in gpus=0,1; one alone",
    ),
    (["tune=buckets", "strategy=none"], "unknown option of strategy=none"),
    (
        ["tune=nccl", "strategy=none,nccl_allreduce", TOPOLOGY],
        "differ in more than settings of NCCL",
    ),
    (["tune=nccl"], "CPU workers use gloo, which has no settings of NCCL; expected GPUs"),
]


@pytest.mark.parametrize(("typed", "sentence"), REFUSED)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(launch, typed, sentence):
    gpus = [] if "gpus=0" in typed else ["gpus=0,1"]
    code, out, err = launch(*gpus, *typed, "dry_run=true")
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1, err


def cells_of(values=(25, 5, 1)):
    cells = []
    for value in values:
        cell = make_cell(strategy=make_cell().strategy | {"bucket_cap_mb": value})
        cells.append(dataclasses.replace(cell, labels=(f"bucket_cap_mb={value}",)))
    return cells


def asked_of(cells, training=(), **changes):
    asked = Asked.of(Question(GAINS, 0.01), "2" * 32, cells, {}, ())
    changes["training_keys"] = tuple(cell.key for cell in training)
    return dataclasses.replace(asked, **changes)


def raced(asked, cells, rate):
    """Run what the race asks for, one by one. `rate` gives that of a candidate and a repeat; None:
    the run fails; a list: busbw by size."""
    by_key, records = {cell.key: cell for cell in cells}, []
    while (done := replay(asked, records)).pending:
        index = done.pending[0]
        cell, repeat = by_key[done.keys[index]], len(done.records[index])
        made = rate(index, repeat, cell)
        record = run_of(cell, repeat, made if isinstance(made, float) else 1.0)
        if made is None:
            failure = Failure("oom", 0, "", "")
            record = dataclasses.replace(record, state="failed", failure=failure)
        elif not isinstance(made, float):
            record = dataclasses.replace(record, series={BUSBW: made})
        records.append(dataclasses.replace(record, record_id=f"{len(records):032x}"))
    return done, records


def wobble(repeat):
    return 1 + 0.0004 * (-1) ** repeat + 0.0001 * repeat


def test_the_fastest_is_confirmed_with_new_runs_and_written(tmp_path):
    cells = cells_of()
    asked = asked_of(cells)
    rates = (1000.0, 1030.0, 900.0)
    done, records = raced(asked, cells, lambda index, repeat, cell: rates[index] * wobble(repeat))
    lines = answer(asked, done)
    assert is_answered(done) and recommended(asked, done) == {"strategy.bucket_cap_mb": "5"}
    assert lines[0] == "Use strategy.bucket_cap_mb=5."
    assert lines[1].startswith("bucket_cap_mb=5 is 3 % faster than bucket_cap_mb=25 (+")
    # A B B A, with repeats that the search did not have.
    confirmed = [(record.cell.strategy["bucket_cap_mb"], record.cell.repeat) for record in records]
    assert [name for name, _ in confirmed[-4:]] == [25, 5, 5, 25]
    assert len(set(confirmed)) == len(confirmed) == 9
    study = StudyFolder(str(tmp_path), "tune_buckets")
    (path,) = write_tuned(study, asked, done)
    assert path.name == OPTIONS and "# Use strategy.bucket_cap_mb=5.\n" in path.read_text()
    assert yaml.safe_load(path.read_text()) == {"strategy": {"bucket_cap_mb": 5}}
    # An interruption, or a budget, after any run: the same race goes on.
    for number, record in enumerate(records):
        state = replay(asked, records[:number])
        assert not is_answered(state) and answer(asked, state)[0].startswith("Undecided: ")
        key = dataclasses.replace(record.cell, repeat=0).key
        assert state.keys[state.pending[0]] == key and recommended(asked, state) == {}
        assert len(state.records[state.pending[0]]) == record.cell.repeat
    assert write_tuned(study, asked, replay(asked, records[:-1])) == [] and not path.exists()


@pytest.mark.parametrize(("lucky", "shown"), [(1000.0, "is"), (1030.0, "is shown to be")])
def test_nothing_is_to_gain_where_the_first_wins_or_new_runs_contradict(lucky, shown):
    cells = cells_of()
    asked = asked_of(cells)

    def rate(index, repeat, cell):
        if index == 1:
            return (lucky if repeat < 2 else 999.0) * wobble(repeat)
        return (1000.5, 0, 900.0)[index] * wobble(repeat)

    done, _ = raced(asked, cells, rate)
    lines = answer(asked, done)
    assert is_answered(done) and recommended(asked, done) == {}
    first = f"Nothing to gain: no setting {shown} more than 1 % faster than bucket_cap_mb=25."
    assert lines[0] == first
    assert ("bucket_cap_mb=5, the fastest of the search, is not" in lines[1]) == (lucky > 1001)


@pytest.mark.parametrize("lost", [(3,), (3, 4)])
def test_a_repeat_that_fails_is_tried_once_more(lost):
    cells = cells_of()
    asked = asked_of(cells)

    def rate(index, repeat, cell):
        failed = index == 1 and repeat in lost
        return None if failed else (1000.0, 1030.0, 900.0)[index] * wobble(repeat)

    done, _ = raced(asked, cells, rate)
    text = " ".join(answer(asked, done))
    assert ("Without a result: bucket_cap_mb=5 (oom)." in text) == (len(lost) == 2)
    assert bool(recommended(asked, done)) == is_answered(done) == (len(lost) == 1)
    assert ("Undecided: the fastest of the search failed in new runs." in text) == (len(lost) == 2)


SIZES = (1 << 16, 1 << 24)
TUNING = (
    "node-1:1:2 [0] NCCL INFO AllReduce: {} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{0..{}}}\n"
)
LINES = """\
allreduce,0,1048576,tree,ll,2,1,2,-1,-1
allreduce,1048577,4294967295,ring,simple,16,1,2,-1,-1
"""


def nccl_cells(benchmark):
    cell = dataclasses.replace(make_cell(), device="cuda", benchmark={"name": benchmark})
    if benchmark == "collectives":
        network = dataclasses.replace(cell.model, builder="none")
        cell = dataclasses.replace(cell, model=network)
    tree = {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"}
    return [cell, dataclasses.replace(cell, nccl=tree)]


@pytest.mark.parametrize("gain", [1.05, 1.0])
def test_nccl_is_searched_by_size_and_what_wins_is_tried_in_training(tmp_path, gain):
    cells, training = nccl_cells("collectives"), nccl_cells("throughput")
    asked = asked_of(cells, training, sizes_bytes=SIZES)
    study = StudyFolder(str(tmp_path), "tune_nccl")

    def rate(index, repeat, cell):
        if cell.trains:
            return (1000.0, 1000.0 * gain)[index] * wobble(repeat)
        by_size = (5.0 + index, 100.0 - index)
        return [[size, busbw * wobble(repeat)] for size, busbw in zip(SIZES, by_size, strict=True)]

    done, _ = raced(asked, [*cells, *training], rate)
    for cell, choice in zip(cells, (("RING", "SIMPLE", 15), ("TREE", "LL", 1)), strict=True):
        folder = study.folder_of(run_of(cell, 0, 1.0)).tuning.make()
        lines = "".join(TUNING.format(size, *choice) for size in SIZES)
        (folder.path / "nccl" / "host.1.log").write_text(lines)
    assert [stage.size_bytes for stage in done.stages] == [None, *SIZES]
    lines = answer(asked, done)
    assert is_answered(done)
    written = {path.name: path.read_text() for path in write_tuned(study, asked, done)}
    assert written[TUNER].endswith(LINES)
    if gain > 1:
        variables = "NCCL_ALGO=allreduce:tree NCCL_PROTO=LL"
        assert lines[0] == f"Use nccl.algo=allreduce:tree nccl.proto=LL ({variables})."
        assert yaml.safe_load(written[OPTIONS]) == {
            "nccl": {"algo": "allreduce:tree", "proto": "LL"}
        }
    else:
        assert lines[0].startswith("Training: Nothing to gain: ") and OPTIONS not in written


def test_a_message_size_that_is_too_noisy_is_left_open_and_holds_nothing_up():
    """On two H200s runs of 64 KiB differed by a tenth, and 20 runs of each decided nothing."""
    cells, training = nccl_cells("collectives"), nccl_cells("throughput")
    asked = asked_of(cells, training, sizes_bytes=SIZES)

    def rate(index, repeat, cell):
        if cell.trains:
            return (1000.0, 1050.0)[index] * wobble(repeat)
        noisy = (5.0, 5.01)[index] * (1.3 if repeat % 2 else 0.8)
        return [[SIZES[0], noisy], [SIZES[1], (100.0, 105.0)[index] * wobble(repeat)]]

    done, records = raced(asked, [*cells, *training], rate)
    noisy = done.stages[1]
    assert (noisy.size_bytes, noisy.pending) == (SIZES[0], ())
    assert max(map(len, noisy.records)) < 12 and len(records) < 30
    lines = answer(asked, done)
    assert not is_answered(done) and lines[0].startswith("Use nccl.algo=allreduce:tree")
    assert any(line.startswith("64 KiB: Undecided: ") for line in lines)


def test_what_two_h200s_showed_of_settings_of_nccl(tmp_path):
    """`.ci/gpu/study.sh tuned`, 42 runs: large messages gain, training does not, small ones are too
    noisy."""
    shutil.unpack_archive(ROOT / "tests" / "data" / "tuned_nccl.tar.xz", tmp_path)
    study = StudyFolder(str(tmp_path), "tuned_nccl")
    (asked,) = questions_of(study.folder).values()
    race = replay(asked, read_study(study.folder)[0])
    none = "Nothing to gain: no setting is shown to be more than 1 % faster than default."
    assert answer(asked, race)[:-1] == [
        f"Training: {none}",
        "Training: ALGO=allreduce:tree, the fastest of the search, is not in new runs (−0.63 % to "
        "+0.8 %).",
        "64 KiB: Undecided: ALGO=Ring against default (−20 % to +50 %).",
        "1 MiB: Undecided: ALGO=Ring · PROTO=LL against default (−1.9 % to +3.5 %).",
        f"16 MiB: {none}",
        "16 MiB: ALGO=Ring · PROTO=Simple, the fastest of the search, is not in new runs (−1.6 % "
        "to +0.99 %).",
        "256 MiB: ALGO=allreduce:tree is 3.4 % faster than default (+2.4 % to +4.4 %) in new runs.",
    ]
    assert not race.pending and not race.winner and recommended(asked, race) == {}
    rows = sizes_table(asked, race).rows
    assert [row[1] for row in rows] == [
        "ALGO=Ring", "ALGO=Ring · PROTO=LL", "ALGO=Ring · PROTO=Simple", "ALGO=allreduce:tree",
    ]  # fmt: skip
    assert [row[-1] for row in rows] == ["open", "open", "equal", "faster"]
    assert [row[0] for row in standings_table(asked, race).rows] == [asked.names[4], asked.names[0]]
    # The launcher wrote it beside the records.
    written = (study.folder / TUNER).read_text()
    assert write_tuned(study, asked, race) == [study.folder / TUNER]
    assert (study.folder / TUNER).read_text() == written


def test_the_lines_for_the_tuner_plugin_cover_all_sizes():
    choices = {}
    for size, words in (
        (1 << 16, "NVLSTree LL"),
        (1 << 20, "Ring LL128"),
        (1 << 28, "CollNetDirect Simple"),
    ):
        choices[size] = AlgorithmChoice("AllReduce", size, *words.split(), 4, 1)
    lines = tuner_csv(choices, 1, 8).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "allreduce,0,262144,nvls_tree,ll,4,1,8,-1,-1",
        "allreduce,262145,16777216,ring,ll128,4,1,8,-1,-1",
        "allreduce,16777217,4294967295,collnet_direct,simple,4,1,8,-1,-1",
    ]
