"""`analysis compare STUDY STUDY`: real studies of H200s, a planted regression, and what cannot be told."""

import json
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from build import DATA, ROOT, record, study
from coverage import across_studies, study_of_six
from slower import slower_study

from analysis.__main__ import main
from analysis.findings.between_studies import FAIL, INCONCLUSIVE, PASS, differences
from analysis.report.build import examine_several
from analysis.study.noise_floor import FILE, as_json
from analysis.study.study import open_study
from analysis.study.study_inputs import StudyPath, open_inputs

# Each cell three times.
FIRST, AGAIN = DATA / "h200_x2" / "scaling", DATA / "h200_x2" / "strategies"
ONCE = (DATA / "h200_x2" / "eager_a", DATA / "h200_x2" / "eager_b")  # once or twice
OWN = {"target": "mine:Model", "sha256": "a"}  # a user's own model
WITH_LINES, CELLS = DATA / "h200_x4" / "waterfall", 10  # each cell three times, with its raw lines


def compared(capsys, *arguments):
    """The exit status and the JSON object of a comparison."""
    status = main(["compare", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """The same study, with every step 3 % longer in its raw lines."""
    return slower_study(WITH_LINES, tmp_path_factory.mktemp("slower") / "slower", 1.03)


def test_a_planted_regression_of_3_percent_is_found(slower, capsys):
    status, found = compared(capsys, WITH_LINES, slower)
    assert (status, found["regressions"], found["verdicts"]) == (1, CELLS, {"slower": CELLS})
    for one in found["cells"]:
        change = one["change"]
        assert change["low"] < change["value"] < change["high"] < -0.02
        assert change["value"] == pytest.approx(1 / 1.03 - 1, abs=0.003)
        assert one["a"]["throughput/images_per_second"]["runs"] == 3
        before, after = (one[side]["throughput/images_per_second"]["value"] for side in "ab")
        real = after / before
        assert change["value"] == pytest.approx(real - 1)
    assert compared(capsys, WITH_LINES, slower, "--limit", "2%")[0] == 1
    assert compared(capsys, WITH_LINES, slower, "--limit", "0.05")[0] == 0
    assert compared(capsys, slower, WITH_LINES)[0] == 0, "what became faster is no regression"


def test_a_regression_of_the_exchange_alone_shows_in_efficiency_and_not_on_one_gpu(
    tmp_path, capsys
):
    several = slower_study(WITH_LINES, tmp_path / "slow", 1.03, lambda one: one.cell.world_size > 1)
    status, found = compared(capsys, WITH_LINES, several)
    assert (status, found["regressions"]) == (1, 2)
    for one in found["cells"]:
        on_several = len(one["gpus"]) > 1
        assert one["verdict"] == ("slower" if on_several else "no difference seen")
        if on_several:
            share = one["differences"]["scaling/efficiency"]
            assert share["high"] < -0.02 < 0 and share["unit"] == "share"


OPEN = "INCONCLUSIVE nccl_allreduce: these runs detect 0.68 % or more; about 4 runs"


@pytest.mark.parametrize(
    ("limit", "status", "headline"),
    [
        ("2 %", 0, "PASS no slowdown of 2 % in 2 configurations (these runs detect 0.59 %"),
        ("0.65 %", 3, OPEN),
        ("0", 0, "PASS no significant slowdown in 2 configurations"),
    ],
)
def test_the_first_word_is_the_outcome_and_a_limit_below_what_runs_show_is_status_3(
    limit, status, headline, capsys
):
    """The whole table is in tests/golden/shown.txt."""
    assert main(["compare", f"before={FIRST}", f"after={AGAIN}", "--limit", limit]) == status
    out = capsys.readouterr().out.replace("\u00a0", " ")
    assert out.startswith(headline) and f"A: before  ({FIRST}, 6 configurations)" in out
    assert "Environment and code: identical." in out


@pytest.mark.parametrize(
    ("noise", "verdict", "factor", "outcomes"),
    [
        (0.002, "valid", 1.0, {PASS, INCONCLUSIVE}),
        (0.002, "valid", 0.95, {FAIL}),
        (0.05, "valid", 1.0, {INCONCLUSIVE}),
        (0.002, "suspect", 0.9, {INCONCLUSIVE}),
        (0.02, "valid", 1.3, {PASS}),  # faster: so large a slowdown is excluded
    ],
)
def test_no_gate_is_green_where_the_limit_could_not_have_been_seen(
    noise, verdict, factor, outcomes
):
    """Equal studies and slower ones, of quiet and of loaded machines, at a limit of 2 %."""
    for seed in range(5):
        first = study_of_six(2 * seed, 3, 1.0, noise, verdict)
        result = differences([first], [study_of_six(2 * seed + 1, 3, factor, noise, verdict)])
        assert result.outcome(0.02) in outcomes
        if result.outcome(0.02) == PASS:
            assert all(cell.smallest <= 0.02 or factor > 1 for cell in result.cells)


def suspect_studies(folder, rates):
    """Studies `a` and `b` of one cell, of which every run is suspect; each has its own model."""
    for name, rate in zip("ab", rates, strict=True):
        runs = []
        for repeat, noise in enumerate((0.8, 1.0, 1.2)):
            runs.append(record(10 * repeat, [0], noise * rate, cell={"repeat": repeat}))
            runs[-1]["cell"]["declared"] = {"model": OWN | {"sha256": name * 64}}
            runs[-1]["validity"] |= {"verdict": "suspect", "codes": {"foreign_cpu": "half of it"}}
        study(folder / name, runs)


def test_suspect_runs_give_no_verdict_but_the_difference_and_what_to_do(tmp_path, capsys):
    suspect_studies(tmp_path, (1000.0, 130.0))
    arguments = [tmp_path / "a", tmp_path / "b", "--limit", "2%"]
    status, found = compared(capsys, *arguments)
    assert (status, found["cells"][0]["smallest"]) == (3, pytest.approx(1 - 1 / 2.806, abs=1e-3))
    assert main(["compare", *map(str, arguments)]) == 3
    out = capsys.readouterr().out.replace("\u00a0", " ")
    assert (
        "is 87.0 % (70.3 to 94.3) slower on B, but every run that is compared is suspect in A and B"
        in out
    )
    assert "(foreign_cpu): measure both again on an idle machine with resume=false" in out
    assert "detects" not in out, "what could have been seen is not a question where it was"


def test_a_report_of_suspect_runs_says_no_more_than_compare(tmp_path, capsys, monkeypatch):
    """It had "No significant difference" where compare was inconclusive."""
    suspect_studies(tmp_path, (1000.0, 980.0))
    folders = [str(tmp_path / name) for name in "ab"]
    assert main(["report", *folders, "-o", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out.replace("\u00a0", " ")
    assert out.startswith("Whether b differs from a cannot be told: every run is suspect.")
    assert "b against a, 1 configuration: cannot tell in 1." in out
    page = (tmp_path / "report" / "report.md").read_text()
    assert "aaaaaaaa" in page and 9 * "a" not in page, "of a hash eight digits"
    monkeypatch.setattr("analysis.console._WIDE", 60)
    main(["compare", *folders, "--limit", "2%"])
    assert " ○  resnet50 ·" in capsys.readouterr().out, "a narrow terminal leaves out a column"


@pytest.mark.parametrize("form", ["", "--github", "--json"])
def test_a_reader_that_has_seen_enough_changes_no_status(slower, form):
    command = f"{sys.executable} -m analysis compare {WITH_LINES} {slower} --limit 2% {form}"
    done = subprocess.run(["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], cwd=ROOT)
    assert done.returncode == 1


def test_repeats_that_are_said_to_do_would_do():
    """The number follows from the scatter that the runs show."""
    first, second = study_of_six(0, 3, 1.0, 0.01), study_of_six(1, 3, 1.0, 0.01)
    cell = differences([first], [second]).cells[0]
    assert cell.outcome(0.02) == INCONCLUSIVE and 3 < cell.repeats_for(0.02) < 30
    assert cell.repeats_for(0.2) == 3 and cell.repeats_for(0.0001) is None


def test_github_and_junit_have_the_outcome_of_each_configuration(slower, tmp_path, capsys):
    report = tmp_path / "gate.xml"
    arguments = ["compare", str(WITH_LINES), str(slower), "--limit", "2%"]
    assert main([*arguments, "--github", "--junit", str(report)]) == 1
    lines = capsys.readouterr().out.replace("\u00a0", " ").splitlines()
    assert lines[0].startswith("### ❌ FAIL ") and lines[0].endswith("(limit 2 %)")
    rows = [line for line in lines if line.startswith("| ❌ |")]
    assert len(rows) == CELLS and all(row.endswith("slower |") for row in rows)
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures")) == (str(CELLS), str(CELLS))
    assert suite.find("testcase/failure").get("message").startswith("−2.")


def test_rates_of_samples_are_headed_so(tmp_path, capsys):
    of_samples = record(0, [0], 900.0, cell={"model": {"inputs": "samples"}})
    folders = [str(study(tmp_path / name, [of_samples])) for name in "ab"]
    assert main(["compare", *folders]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "samples/s" in out and "images" not in out
    content, _ = examine_several(list(map(StudyPath.of, folders)))
    headings = [column.heading for column in content.sections[0].tables[1].columns]
    assert "a samples/s" in headings and "b samples/s" in headings


def test_studies_keep_their_own_baselines_repeats_and_floors():
    """A study beside itself is twice the same cells, never cells with twice the runs."""
    ((one,), (other,)) = open_inputs([StudyPath.of(str(FIRST)), StudyPath.of(str(AGAIN))])
    for side, records, runs in ((one, 19, 7), (other, 25, 4)):
        floor = side.study.runs[0].floor("throughput/images_per_second")
        assert (len(side.study.records), floor.runs) == (records, runs)
    assert (one.name, other.name) == ("2 × H200 on vm · scaling", "2 × H200 on vm · strategies")


def test_other_studies_of_the_folder_lend_their_floor_but_not_those_compared(tmp_path):
    for name, source in (("a", FIRST), ("b", AGAIN), ("c", AGAIN)):
        shutil.copytree(source, tmp_path / name)
    rows = {name: open_study(tmp_path / name).floors.own() for name in ("a", "b", "c")}
    (tmp_path / FILE).write_text(json.dumps(as_json(rows)))
    sides = open_inputs([StudyPath.of(str(tmp_path / name)) for name in ("a", "b")])
    numbers = []
    for (side,) in sides:
        runs = {(runs.strategy, runs.gpus): runs for runs in side.study.runs}["none", (0, 1)]
        numbers.append(runs.floor("throughput/images_per_second").runs)
    assert numbers == [7, 8], "each its own three or four runs and the four of c"


def test_cells_that_ran_too_seldom_cannot_be_told(capsys):
    """The audit's cpu_staged: "+19.3 % (18.4 to 20.2)" of two single runs, with the scatter of others."""
    arguments = ["compare", *map(str, ONCE)]
    for more, status in (([], 0), (["--strict"], 3), (["--limit", "2%"], 3)):
        assert main([*arguments, *more]) == status
        told = capsys.readouterr()
        assert told.out.startswith("INCONCLUSIVE ") and told.err == ""
        assert "6 common configurations: 6 inconclusive." in told.out
        assert "too few repeats in A and B to know the run-to-run variation" in told.out
    assert main(["compare", str(FIRST), str(AGAIN), "--strict"]) == 0


def test_a_lent_floor_gives_no_verdict_nor_does_a_single_run(tmp_path, capsys):
    """Ten runs of a cell say nothing of another strategy, of which two differ by 20 %, nor of one run elsewhere."""
    for name, factor in (("a", 1.0), ("b", 1.2)):
        runs = []
        for repeat in range(10):
            runs.append(record(10 * repeat, [0], 1000.0 + repeat, cell={"repeat": repeat}))
        staged = {"strategy": {"name": "cpu_staged"}}
        for repeat in range(2):
            cell = staged | {"repeat": repeat}
            runs.append(record(200 + repeat, [0], factor * (500.0 + repeat), cell=cell))
        runs.append(record(300, [1], factor * 1000.0))
        study(tmp_path / name, runs)
    status, found = compared(capsys, tmp_path / "a", tmp_path / "b")
    verdicts = {tuple(cell["cell"].split(" · ")[1:]): cell["verdict"] for cell in found["cells"]}
    assert verdicts == {
        ("nccl_allreduce", "gpus 0"): "no difference seen",
        ("cpu_staged", "gpus 0"): "cannot tell",
        ("nccl_allreduce", "gpus 1"): "cannot tell",
    }
    assert status == 0


@pytest.mark.parametrize(
    ("changes", "fact", "values"),
    [
        ({"cell": {"declared": {"model": OWN | {"sha256": "b"}}}}, "code: mine.py", ["a", "b"]),
        ({"cell": {"seed": 7}}, "seed", ["0", "7"]),
        ({"environment": {"packages": {"timm": "9"}}}, "packages.timm", ["1", "9"]),
        ({"limits": {"noise_limit": 0.5}}, "validity.noise_limit", ["0.05", "0.5"]),
        ({"ranks": {"started": "exec"}}, "ranks.started", ["fork", "exec"]),
        ({"effective": {"transport": "SHM"}}, "transport", ["P2P/CUMEM", "SHM"]),
        ({}, "", []),
    ],
)
def test_what_differs_names_every_difference_of_the_records(
    changes, fact, values, tmp_path, capsys
):
    for name, change in (("a", {}), ("b", changes)):
        cell = {"declared": {"model": OWN}} | change.get("cell", {})
        environment = {"packages": {"timm": "1"}} | change.get("environment", {})
        run = record(1, [0], 1000.0, cell=cell)
        run["environment"] |= environment
        run["validity"]["limits"] = {"noise_limit": 0.05} | change.get("limits", {})
        run["ranks"] = [{"rank": 0, "started": "fork"} | change.get("ranks", {})]
        run["effective"] = {"transport": "P2P/CUMEM"} | change.get("effective", {})
        study(tmp_path / name, [run])
    _, found = compared(capsys, tmp_path / "a", tmp_path / "b")
    expected = {fact: values} if fact else {}
    assert found["differs"] == expected
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (f"{fact} changed" in capsys.readouterr().out) == fact.startswith("code")


# Orders of runs, and how many repeats of a put both in turn; None: they are.
ORDERS = {"ab": 2, "aabb": 4, "aaabbb": 6, "aabbaabb": 6, "abab": None, "aabbbbaa": None}


@pytest.mark.parametrize("order", ORDERS)
def test_studies_in_turn_are_told_from_one_after_the_other(order, tmp_path, capsys):
    runs = {"a": [], "b": []}
    for number, name in enumerate(order):
        repeat = len(runs[name])
        runs[name].append(record(number, [0], 1000.0 + repeat, cell={"repeat": repeat}))
    folders = [study(tmp_path / name, of_study) for name, of_study in runs.items()]
    assert compared(capsys, *folders)[1]["in_turn"] is (ORDERS[order] is None)
    main(["compare", *map(str, folders)])
    again = re.findall(r"A's command on A's code, with repeats=(\d+)", capsys.readouterr().out)
    assert list(map(int, again)) == list(filter(None, [ORDERS[order]]))


def test_cells_match_by_what_was_asked_whatever_a_version_adds(tmp_path, capsys):
    """An older record lacks an option that a newer one has at its default, and has another key."""
    options = {"old": {"name": "nccl_allreduce", "bucket_cap_mb": 25.0}}
    options["new"] = options["old"] | {"comm_hook": "none"}
    made = {}
    for name, faster in (("old", 0), ("new", 10)):
        runs = []
        for repeat in range(3):
            cell = {"repeat": repeat, "strategy": options[name]}
            for gpu in (0, 1):
                runs.append(record(10 * repeat + gpu, [gpu], 1000.0 + repeat + faster, cell=cell))
                runs[-1]["cell_key"] = f"{name}{gpu}{repeat}"
        made[name] = study(tmp_path / name, runs)
    status, found = compared(capsys, made["old"], made["new"])
    assert [one["gpus"] for one in found["cells"]] == [[0], [1]]
    assert found["only_a"] == found["only_b"] == []
    assert {one["verdict"] for one in found["cells"]} == {"faster"} and status == 0


def test_a_cell_that_failed_in_one_study_is_named_with_the_reason(tmp_path, capsys):
    both = [record(10 * n, [0], 1000.0 + n, cell={"repeat": n}) for n in range(4)]
    failed = record(90, [0, 1], 1.0, state="failed", metrics={},
                    failure={"cause": "oom", "rank": 1, "message": "out of memory", "log_tail": ""})  # fmt: skip
    first = study(tmp_path / "a", [*both, record(91, [0, 1], 1900.0)])
    _, found = compared(capsys, first, study(tmp_path / "b", [*both, failed]))
    assert found["only_a"] == [
        "resnet50 · nccl_allreduce · gpus 0,1 (the other study's is not usable: failed: out of memory)"
    ]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--limit", "2%"]) == 3


def test_studies_with_nothing_in_common_are_told_why(tmp_path, refusal):
    """tests/golden/compare.txt and refusals.txt have those that differ in options."""
    failed = record(90, [0], 1.0, state="failed", metrics={},
                    failure={"cause": "oom", "rank": 0, "message": "out of memory", "log_tail": ""})  # fmt: skip
    first = study(tmp_path / "a", [record(1, [0], 1000.0)])
    why = "gpus 0 one study has no usable run (failed: out of memory)"
    told = refusal("compare", first, study(tmp_path / "b", [failed]))
    assert f"of resnet50 · nccl_allreduce · {why}" in told


def test_equal_studies_seldom_differ_and_a_planted_percent_is_seen():
    told, _, held = across_studies(3, studies=30)
    assert told <= 5 / 30 and held > 0.9
    _, slower, _ = across_studies(3, studies=5, factor=0.99)
    assert slower > 0.8
