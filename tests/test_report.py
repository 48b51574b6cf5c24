"""The report of a study: what it says, that nothing gets out of its place, that it always comes."""

import base64
import csv
import html
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from build import EVIL, ROOT, record, study
from pages import contents, report, rows_of, widths
from simulate import Simulator, Truth

from analysis import open_study as open_notebook
from analysis.__main__ import main
from analysis.findings.comparisons import Comparison
from analysis.findings.examine import Findings, findings_of
from analysis.report.build import examine, finding_on, report_of
from analysis.report.cell_numbers import cell_numbers
from analysis.report.charts import Axis, DotRow, DrawnCurve, curves_figure, rows_figure
from analysis.report.figure import colours, style
from analysis.report.main_point import main_point
from analysis.report.numbers import estimate
from analysis.report.report_files import PAGE_ROWS, POLICY, Report, markdown_page, page
from analysis.report.section import Section
from analysis.report.sections.comparisons_section import differences
from analysis.report.summary import loss, sentences
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate
from analysis.study.names import shared_name, short_names
from analysis.study.study import Study, open_study
from launch.display.columns import verdict

H200 = ROOT / "tests" / "data" / "h200_x4"
NOTHING_UNCHECKED = {"unchecked": {}, "limits": {}, "not_applicable": {}}


def plain(text):
    return text.replace("\u00a0", " ")


# Words of the code that nobody outside it knows, and what the page says instead of them.
CODE_WORDS = re.compile(
    r"\bcells?\b|noise floor|untouched|no difference seen|visible from|told apart"
)


def test_the_page_uses_no_words_of_the_code():
    """The first screens of all committed studies; commands are the user's own."""
    for path in sorted((ROOT / "tests" / "golden" / "report").glob("*.txt")):
        first_screen = path.read_text(encoding="utf-8").partition("--- cells.csv")[0]
        text = re.sub(r"python launch\.py .*", "", first_screen.replace("\\", ""))
        assert CODE_WORDS.findall(text) == [], path.name


# --- a study with all that a report shows, and names made to get out of their places


def everything():
    rates = {(0,): 1000.0, (1,): 990.0, (0, 1): 1900.0, (0, 1, 2): 2800.0}
    made = []
    for repeat in (0, 1):
        for strategy, factor in (("nccl_allreduce", 1.0), ("none", 1.02), (EVIL, 0.9)):
            for gpus, rate in rates.items():
                measured = rate * factor * (1 + 0.001 * repeat)
                cell = {"repeat": repeat}
                made.append(record(len(made), list(gpus), measured, strategy=strategy, cell=cell))
    matrix = [[900.0, 380.5, 19.0], [380.0, 910.0, None], [18.0, 21.5, 905.0]]
    tables = {"p2p": {"matrices": {"unidirectional_enabled": matrix, "broken": [[1.0], [2.0]]}}}
    p2p = record(len(made), [0, 1, 2], 1.0, cell={"benchmark": {"name": "p2p"}})
    made.append(p2p | {"metrics": {}, "tables": tables})
    failure = {"cause": "exception", "rank": 1, "message": f"{EVIL} \udc80", "log_tail": EVIL}
    failed = {
        "state": "failed", "overrides": ["-m", EVIL], "sweep_id": "f" * 32, "failure": failure,
    }  # fmt: skip
    codes = {"foreign_load": f"something else used these GPUs: {EVIL}"}
    bad = {"verdict": "invalid", "codes": codes, **NOTHING_UNCHECKED}
    made.append(record(len(made), [0, 1], 1.0, **failed))
    made.append(record(len(made), [0], 5.0, validity=bad))
    made.append(record(len(made), [1], 5.0, schema_version=99))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = study(tmp_path_factory.mktemp("study") / "hostile", everything())
    (made / "damaged").mkdir()
    (made / "damaged" / "record.json").write_text('{"schema_version": 1, "cell":')
    return made


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert report(folder, out) == out / "index.html"
    return out


def test_all_that_was_promised_is_there(written):
    tables = "points fits waterfall strategies wires comparisons excluded environment cells"
    figures = "scaling-1 efficiency-1 waterfall-1 pairs-1 topology-1"
    files = {f"tables/{name}.{end}" for name in tables.split() for end in ("csv", "tex")}
    files |= {f"figures/{name}.{end}" for name in figures.split() for end in ("svg", "pdf", "csv")}
    without_rows = {"tables/comparisons.tex"}
    assert files - contents(written).keys() == without_rows
    text = (written / "report.md").read_text(encoding="utf-8")
    assert re.search(r"\*Images per second, .*[.] On 3 GPUs: ", text)
    assert all((written / link).exists() for link in re.findall(r"\]\((figures/[^)]*)\)", text))


def test_the_page_is_whole_in_itself_and_well_formed(written):
    text = (written / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    files = {link for link in links if not link.startswith("#")}
    assert files == {"methods.tex", "ringside.bib", "paper.tex"}
    assert all((written / file).exists() for file in files)
    assert text.count("http-equiv") == 1 and POLICY in html.unescape(text)
    assert "<script" not in text and "@import" not in text and not re.search(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids)) and {link[1:] for link in links} - set(ids) == {
        file[1:] for file in files
    }
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    figures = [path.stem for path in written.glob("figures/*.svg")]
    phones = [name for name in re.findall(r'id="([a-z0-9-]+)-phone-figure_1"', text)]
    assert len(drawings) == len(figures) + len(phones)
    # All that are wide: a small heat map needs none, a drawing of its own kind has none.
    assert {"steps", "scaling-1", "efficiency-1", "waterfall-1"} <= set(phones)
    drawings += [path.read_text(encoding="utf-8") for path in written.glob("figures/*.svg")]
    for drawing in drawings:
        if "xmlns:xlink" not in drawing:
            namespace = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
            drawing = drawing.replace("<svg ", f"<svg {namespace} ", 1)
        ET.fromstring(drawing)
    open_tags = []

    class Nesting(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br", "wbr"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Nesting().feed(text)
    assert open_tags == []


def test_names_and_failures_stay_text(written):
    for name in ("index.html", "report.md"):
        text = (written / name).read_text(encoding="utf-8")
        text = re.sub(r"(?m)^    .*$", "", text)  # a command in Markdown is code
        assert "<script>" not in text and "&lt;script&gt;" in text
        assert "{{ 7*7 }}" in text.replace("\\*", "*")
        assert "\x1b" not in text and "\u202e" not in text
    assert not re.search(r"(?<!\\)\]\(http", text), "a link of Markdown"
    for path in written.glob("tables/*.csv"):
        for row in csv.reader(path.open(encoding="utf-8")):
            formulas = [cell for cell in row if re.match(r"\s*[=+@|%\t]|-(?!\d)", cell)]
            assert formulas == [], path
    for path in written.glob("tables/*.tex"):
        text = path.read_text(encoding="utf-8")
        assert text.isascii() and "\\input{a}" not in text
        assert text.count(r"\begin{") == text.count(r"\end{") >= 1


def test_the_same_records_give_the_same_bytes(folder, written, tmp_path):
    """From another place, in another process with other hashes."""
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    command = [sys.executable, "-m", "analysis", "report", str(elsewhere), "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    options = {"cwd": ROOT, "env": environment, "text": True, "timeout": 100}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    again = Path(summary["report"]).parent
    assert again == elsewhere / "report" and len(summary["finding"]) == 5
    assert contents(again) == contents(written)


def test_what_was_left_out_is_listed_with_the_reason(written):
    rows = rows_of(written, "excluded")
    assert [row["state"] for row in rows] == ["failed", "invalid", "unreadable", "unreadable"]
    assert "exception of rank 1" in rows[0]["why"] and "something else used" in rows[1]["why"]
    assert any("schema_version=99 is newer" in row["why"] for row in rows)
    assert any(row["why"].startswith("damaged/record.json: no readable record") for row in rows)
    assert len(rows_of(written, "cells")) == 27


# --- what the first screen says


def small(number, gpus, rate, **changes):
    """Without a topology to draw."""
    return record(number, gpus, rate, **({"environment": {"topology": "", "links": {}}} | changes))


def with_codes(verdict, **codes):
    return {"verdict": verdict, "codes": codes, **NOTHING_UNCHECKED}


INVALID = with_codes("invalid", loss_not_finite="the loss is not finite on rank 0")
OTHER = {"topology": "", "links": {}, "host": "other", "versions": {"torch": "2.12"}}
STRANGE = {"gpu": 3, "cpu": [], "topology": "no\ttable", "variables": "x"}
BARE = {"environment": {}, "ranks": [], "checks": {}, "metrics": {}}
ONE = small(1, [0], 100.0)
CASES = {
    "empty": ([], "no record that can be read"),
    "one cell": ([ONE], "To measure scaling:</p>\n<code>python launch.py -m"),
    "no baseline": (
        [small(1, [0, 1], 100.0)],
        "To measure the efficiency and see what costs speed:</p>\n<code>python launch.py -m",
    ),
    "only invalid": ([ONE | {"validity": INVALID}], "The only run gave no number that can be used"),
    "only failed": ([ONE | {"state": "failed", "metrics": {}}], "was to be trained with"),
    "two machines": (
        [ONE, small(2, [0, 1], 150.0, environment=OTHER)],
        "2 machines or installations",
    ),
    "half": ([ONE | {"cell": {"gpus": [0]}}], "1 file could not be read"),
    "newer": ([ONE | {"schema_version": 99}], "1 file could not be read"),
    "bare": ([ONE | BARE], "No run measured images per second or a link."),
    "strange": ([small(1, [0], 100.0, environment=STRANGE)], "1 file could not be read"),
}


@pytest.mark.parametrize(("records", "sentence"), CASES.values(), ids=CASES)
def test_the_report_comes_whatever_the_study_holds(records, sentence, tmp_path):
    folder = study(tmp_path / "study", records)
    folder.mkdir(exist_ok=True)
    assert sentence in plain(report(folder, tmp_path / "out").read_text(encoding="utf-8"))
    assert {"report.md", "methods.tex"} <= contents(tmp_path / "out").keys()


def test_the_last_usable_attempt_on_each_machine_counts(tmp_path):
    """A later failure erases nothing, and another machine's is no attempt at the same cell."""
    same_cell = [
        small(1, [0], 100.0),
        small(2, [0], 7.0, validity=INVALID),
        small(3, [0], 1.0, state="failed", metrics={}),
        small(4, [0], 200.0, environment={"topology": "", "host": "other"}),
    ]
    of_second = [small(5, [1], 7.0, validity=INVALID), small(6, [1], 1.0, state="failed")]
    for attempts in (same_cell, of_second):
        for attempt in attempts:
            attempt["cell_key"] = attempts[0]["cell_key"]
    content, findings = examine(study(tmp_path / "study", [*same_cell, *of_second]))
    points = [point for curve in findings.scaling.curves for point in curve.points]
    assert sorted(int(each, 16) for point in points for each in point.record_ids) == [1, 4]
    (section,) = [section for section in content.sections if section.anchor == "validity"]
    assert "3 other attempts at the same runs are not counted." in section.lines


def finding(tmp_path, records):
    content, _ = examine(study(tmp_path / "study", records))
    assert len(content.finding) <= 5
    return [plain(line) for line in content.finding]


def test_a_sweep_ends_with_what_its_own_models_showed(tmp_path):
    other = {"cell": {"model": {"name": "resnet18"}}}
    made = [small(1, [0], 100.0), small(2, [0], 50.0, **other), small(3, [0, 1], 95.0)]
    read = open_study(study(tmp_path / "study", made))
    whole = report_of(read, findings_of(read))
    every = {record.cell.subject for record in read.records}
    assert every == {("resnet50",), ("resnet18",)}
    assert finding_on(every, read, whole) == whole.finding
    said = " ".join(finding_on({("resnet18",)}, read, whole))
    assert "resnet18" in said and "resnet50" not in said
    assert finding_on({("vgg16",)}, read, whole) == ()


def repeated(gpus, rate, start, *, scatter=0.003, nccl=(), strategy="nccl_allreduce"):
    """Three equal runs from number `start` on: rates around the given one, in another order."""
    rates = [rate * (1 - scatter), rate, rate * (1 + scatter)]
    rates = rates[start % 3 :] + rates[: start % 3]
    made = []
    for repeat, run_rate in enumerate(rates):
        cell = {"repeat": repeat, "nccl": dict(nccl)}
        made.append(small(start + 10 * repeat, gpus, run_rate, strategy=strategy, cell=cell))
    return made


PIX = {"NCCL_P2P_LEVEL": "PIX"}
SUSPECT = with_codes("suspect", throttled="a clock was lowered: 1,200 MHz", foreign_load="other")
PAIR, ALL = [0, 1], small(6, [0, 1, 2, 3], 300.0)
OF_ANOTHER_MODEL = small(9, PAIR, 400, cell={"model": {"name": "resnet18"}})
OTHERS = [small(2, PAIR, 230, strategy="kvstore_device"), small(3, [2, 3], 240)]
ONCE = small(9, PAIR, 220, strategy="kvstore_device")
DEVICE = repeated(PAIR, 150, 2, scatter=0.3, strategy="kvstore_device")
SCRIPT = {
    "declared": {"benchmark": {"target": "benchmarks.script.run"}},
    "benchmark": {"name": "script"},
    "model": {"name": "train.py", "builder": "none"},
}
FILE, CHANGED_FILE = ({"declared": {"model": {"sha256": 16 * text}}} for text in ("e4f4", "0a1b"))
HEADLINES = {
    "every baseline": (
        [small(0, [0], 100.0), small(1, [1], 100.0), small(5, PAIR, 190.0), ALL],
        "Efficiency 95.0 % = 190 ÷ (2 × 100), with 100 images/s on GPU 0 alone, the slowest.",
    ),
    "some baselines": (
        [ONE, ALL],
        "with 100 images/s on GPU 0 alone; GPUs 1,2,3 were not measured alone.",
    ),
    "suspect": (
        [ONE, small(2, PAIR, 190.0, validity=SUSPECT)],
        "Not reliable. A clock was lowered: 1,200 MHz. Other.",
    ),
    "a suspect number": (
        [ONE, small(2, PAIR, 190.3, validity=SUSPECT)],
        "2 GPUs train resnet50 at about 190 images/s, an efficiency of about 95 %.",
    ),
    "a script": ([small(2, PAIR, 190.0, cell=SCRIPT)], "2 GPUs run train.py at 190 images/s."),
    "suspect repeats": (
        [each | {"validity": SUSPECT} for each in repeated(PAIR, 19_049, 1, scatter=0.1)],
        "at about 19,000 images/s (11,000 to 32,000).",
    ),
    "one suspect repeat": (
        [small(9, PAIR, 380, cell={"repeat": 3}, validity=SUSPECT), *repeated(PAIR, 380, 1)],
        "Checks cast doubt on 1 of 4 runs of resnet50 (nccl_allreduce) on GPUs 0,1.",
    ),
    "files of a model": (
        [small(2, PAIR, 190.0, cell=FILE), small(3, PAIR, 190.0, cell=CHANGED_FILE)],
        "train resnet50 (code e4f4e4f4) at",
    ),
    "suspect configurations": (
        [
            small(2 + index, PAIR, 190 + index, validity=SUSPECT, strategy=name)
            for index, name in enumerate(("nccl_allreduce", "kvstore_device"))
        ],
        "The fastest on 2 GPUs is not known: every run is suspect.",
    ),
    # A study that several commands share.
    "another model with one strategy": (
        [small(1, PAIR, 200), small(2, PAIR, 230, strategy="kvstore_device"), OF_ANOTHER_MODEL],
        "resnet18 with nccl_allreduce, resnet50 with kvstore_device and resnet50 with "
        "nccl_allreduce were trained on 2 GPUs",
    ),
    # Of single runs the first is the headline, whichever was faster this once.
    "no verdict": (
        [small(1, PAIR, 200), *OTHERS],
        "train resnet50 with strategy=nccl_allreduce at 200",
    ),
    "batch sizes in single runs": (
        [small(1, PAIR, 200, cell={"batch_size": 32}), small(2, PAIR, 250)],
        "2 GPUs train resnet50 (batch 256) at 250 images/s",
    ),
    "a setting that gains": (
        [*repeated(PAIR, 200, 1), *repeated(PAIR, 220, 2, nccl=PIX)],
        "Fastest on 2 GPUs: P2P_LEVEL=PIX, 220",
    ),
    "a setting that does not": (
        [*repeated(PAIR, 200, 1), *repeated(PAIR, 200.1, 2, nccl=PIX)],
        "Fastest on 2 GPUs: P2P_LEVEL=PIX, 200 (198 to 202) images/s, tied with default.",
    ),
    "a setting without repeats": (
        [small(1, PAIR, 200), small(2, PAIR, 202, cell={"nccl": PIX})],
        "P2P_LEVEL=PIX differs from NCCL's default by at most 1.0 % (single runs)",
    ),
    "a faster one without repeats": (
        [*repeated(PAIR, 200, 1), *repeated(PAIR, 190, 2, nccl=PIX), ONCE],
        "Fastest on 2 GPUs (only configurations with enough repeats): nccl_allreduce, 200",
    ),
    # Another strategy that leaves NCCL alone does not stand for it.
    "a setting of another strategy": (
        [*DEVICE, *repeated(PAIR, 200, 1, nccl=PIX)],
        "Fastest on 2 GPUs: nccl_allreduce (P2P_LEVEL=PIX), 200",
    ),
}


@pytest.mark.parametrize(("records", "words"), HEADLINES.values(), ids=HEADLINES)
def test_the_headline_is_of_the_default_on_most_gpus_with_the_best_baseline(
    records, words, tmp_path
):
    assert any(words in line for line in finding(tmp_path, records))


def test_what_is_invalid_comes_first(tmp_path):
    """In the headline, in the codes of the header; the next command is without it."""
    why = "the exchanged gradient is not the mean of the local ones: 0.5"
    wrong = {"strategy": "mine_wrong"}
    wrong["validity"] = with_codes("invalid", noisy="wide", gradient_not_mean=why)
    made = [
        small(1, PAIR, 200.0, validity=SUSPECT),
        small(2, PAIR, 190.0, validity=SUSPECT, strategy="cpu_staged"),
        small(3, PAIR, 300.0, **wrong),
        small(4, PAIR, 300.0, cell={"repeat": 1}, **wrong),
    ]
    command = ["gpus=0,1", "strategy=nccl_allreduce,cpu_staged,mine_wrong"]
    made = [each | {"overrides": command} for each in made]
    content, _ = examine(study(tmp_path / "study", made))
    lines = [plain(line) for line in content.finding]
    assert lines[0] == f"mine_wrong is invalid: {why}." and lines[1].startswith("Not reliable.")
    assert "The fastest on 2 GPUs is not known: every run is suspect or invalid." in lines
    assert "strategy=nccl_allreduce,cpu_staged " in lines[-1] and "mine_wrong" not in lines[-1]
    header = "✗ 2 invalid, 2 suspect: gradient_not_mean, throttled and foreign_load"
    assert content.verdict == header


def test_methods_count_the_same_runs_in_every_sentence(tmp_path):
    """The first configuration ran once more at the end, which is no repeat."""
    made = [small(1, PAIR, 200.0), small(2, PAIR, 190.0, strategy="fsdp")]
    made.append(small(3, PAIR, 201.0, drift=True))
    made = [each | {"validity": SUSPECT} for each in made]
    text = examine(study(tmp_path / "study", made))[0].methods
    assert "measured in 2 runs" in text and "doubt on 2 runs" in text


HEADERS = {
    "interrupted": ([ONE, small(2, PAIR, 1.0, state="interrupted")], "✗ 1 valid, 1 interrupted"),
    "failed": ([ONE | {"state": "failed"}, small(2, PAIR, 1.0, state="failed")], "✗ 2 runs failed"),
    "a suspect one": ([ONE | {"validity": SUSPECT}], "✗ 1 run suspect: throttled and foreign_load"),
}


@pytest.mark.parametrize(("records", "header"), HEADERS.values(), ids=HEADERS)
def test_the_header_counts_every_verdict(records, header, tmp_path):
    content, _ = examine(study(tmp_path / "study", records))
    assert content.verdict == header


@pytest.mark.parametrize(("validity", "named"), [(SUSPECT, False), (with_codes("valid"), True)])
def test_the_figure_names_no_fastest_where_the_sentence_does_not_know_it(validity, named, tmp_path):
    made = [*repeated(PAIR, 200, 1), *repeated(PAIR, 180, 2, nccl=PIX)]
    made = [each | {"validity": validity} for each in made]
    content, _ = examine(study(tmp_path / "study", made))
    assert any(" is not known" in line for line in content.finding) != named
    for word in (", fastest<", "−10.0"):
        assert (word in content.answer.svg) == named


@pytest.mark.parametrize(
    ("repeats", "noise", "end"),
    [
        (5, 0.0005, r"\. Largest confirmed cause: .* of these \d+ are exposed communication\.$"),
        (3, 0.02, "; no cause is significant"),
        (1, 0.0005, r" are lost\."),
    ],
)
def test_a_part_is_named_as_the_cause_only_where_its_interval_excludes_0(repeats, noise, end):
    simulated = Study.of(Simulator(Truth(noise=noise), 3).explained((0, 1), repeats))
    lines = sentences(simulated, findings_of(simulated), {})
    start = "Compared with 2 × the slowest GPU alone with strategy=none ("
    (line,) = [line for line in lines if line.startswith(start)]
    assert re.search(end, line)


LOSES = "10.0 % (9.4 to 10.6) of the rate, compared with runs with strategy=none; "


@pytest.mark.parametrize(
    ("ratio", "none_first", "rounds", "start"),
    [
        (0.9, True, 2, LOSES),
        (0.9, False, 2, LOSES),
        (1.0, True, 2, ""),
        (1e17, False, 2, ""),
        (1.0, True, 1, None),
    ],
)
def test_without_controls_the_loss_is_told_beside_none(ratio, none_first, rounds, start, tmp_path):
    """Other GPUs, another setting and a strategy without repeats are not what is meant.

    A cost of one round has no interval, and is not told.
    """
    made = [
        *repeated([0, 1], 200.0 / ratio, 1 if none_first else 2, strategy="none"),
        *repeated([0, 1], 200.0, 2 if none_first else 1),
        *repeated([0, 1], 150.0, 3, nccl=PIX),
        *repeated([2, 3], 190.0, 4, strategy="none"),
        *repeated([2, 3], 100.0, 5),
        small(99, [0, 1], 100.0, strategy="cpu_staged"),
    ]
    for run in made:
        if rounds > 1:
            run["within_run"]["strategy/cost_ms"] = {"low": 0.6, "high": 0.7}
    known = open_study(study(tmp_path / "study", made))
    findings = findings_of(known)
    expected = ""
    if start is not None:
        cost = "0.673 ms (95 % interval within one run: 0.600 to 0.700) of each 54.8 ms step, "
        cost += "compared with exchange-free steps of the same runs."
        expected = f"Overhead of nccl_allreduce: {start}{cost}"
    assert plain(loss(known, findings, main_point(known, findings))) == expected


def test_workers_of_a_cpu_are_not_called_gpus(tmp_path):
    made = []
    for number, gpus in enumerate(([0], [1], [0, 1])):
        made.append(small(number, gpus, 100.0, cell={"device": "cpu"}))
    content, _ = examine(study(tmp_path / "study", made))
    assert any("images per CPU worker per step" in line for line in content.finding)
    texts = [*content.finding, *content.unsaid]
    for section in content.sections:
        texts += [*section.lines, *(figure.caption for figure in section.figures)]
    for table in content.tables:
        texts += [table.caption, *(column.heading for column in table.for_people.columns)]
        for row in table.for_people.rows:
            texts += [cell for cell in row if isinstance(cell, str)]
    assert "slowest CPU worker" in texts
    assert [text for text in texts if re.search(r"\bGPUs?\b", text)] == []


def test_no_difference_seen_claims_no_more_than_every_comparison_could_have_shown():
    judged = []
    for smallest in (0.01, 0.3):
        judged.append(Comparison("a", "b", Estimate(0.0), smallest, "no difference seen"))
    line = plain(differences(Findings(comparisons=tuple(judged))))
    detected = "each detects an increase of 30.0 % or more"
    assert line == f"No difference is significant in 2 comparisons; {detected}."


# --- the noise floor, limits that are not the defaults, costs


def test_one_noise_floor_stands_on_the_page_with_the_runs_that_it_was_measured_from(tmp_path):
    """By strategy; a cell that ran once has it lent, and a suspect one has its own runs alone."""
    doubted = repeated([2, 3], 150, 6, scatter=0.2, strategy="cpu_staged")
    doubted = [each | {"validity": SUSPECT} for each in doubted]
    made = [*repeated(PAIR, 200, 1), *repeated(PAIR, 150, 2, scatter=0.03, strategy="none")]
    folder = study(tmp_path / "study", [*made, small(50, [0], 100.0), *doubted])
    assert main(["report", str(folder)]) == 0
    rows = [row for row in rows_of(folder / "report", "noise_floor") if row["half_share"]]
    nccl, none = "nccl_allreduce on gpus 0,1 (3)", "none on gpus 0,1 (3)"
    assert [(row["strategy"], row["world_size"], row["source"]) for row in rows] == [
        ("cpu_staged", "2", "cpu_staged on gpus 2,3, suspect"),
        ("nccl_allreduce", "1", f"{nccl}; {none}"),
        ("nccl_allreduce", "2", nccl),
        ("none", "2", none),
    ]
    assert [bool(row["lent_by"]) for row in rows] == [False, True, False, False]
    halves = sorted(float(row["half_share"]) for row in rows)
    text = plain((folder / "report" / "report.md").read_text(encoding="utf-8"))
    ends = f"±{100 * halves[0]:.2f} % to {100 * halves[-1]:.2f} %"
    assert text.count(f"Run-to-run variation (95 %) of images per second: {ends}") == 1
    assert "19 of 20 pairs" not in text and "The noise floor is" not in text


COSTS = {
    "a valid cell": ("valid", (-0.25, 1.25), "0.500 (−0.250 to 1.25)"),
    "a suspect cell": ("suspect", (-0.25, 1.25), ""),
    "a suspect cell, not near 0": ("suspect", (0.25, 0.75), "0.500 (0.250 to 0.750)"),
}


@pytest.mark.parametrize(("verdict_", "ends", "shown"), COSTS.values(), ids=COSTS)
def test_a_cost_has_its_own_interval_and_none_is_said_of_a_suspect_cell_that_may_cost_nothing(
    verdict_, ends, shown, tmp_path
):
    name, (low, high) = "strategy/cost_ms", ends
    cell = small(2, PAIR, 190.0, metrics={name: 0.5}, validity=with_codes(verdict_, noisy="x"))
    cell["within_run"] |= {name: {"low": low, "high": high}}
    folder = study(tmp_path / "study", [ONE, cell])
    out = report(folder, tmp_path / "out").parent
    for table in ("strategies", "cells"):
        row = rows_of(out, table)[-1]
        numbers = [row["cost_ms"], row["cost_ms_low"], row["cost_ms_high"]]
        assert numbers == (["0.5", str(low), str(high)] if shown else [""] * 3)
        latex = (out / "tables" / f"{table}.tex").read_text().replace("$-$", "−")
        assert ((shown or "0.500") in latex) == bool(shown)
    opened = open_study(folder)
    findings = findings_of(opened)
    sentence = plain(loss(opened, findings, main_point(opened, findings)))
    inside = shown.replace(" (", " ms (95 % interval within one run: ")
    where = " in these runs" * (verdict_ == "suspect")
    assert sentence.startswith(f"Overhead of nccl_allreduce{where}: {inside} of each") == bool(
        shown
    )
    assert cell_numbers(opened.records[-1], {}).get("cost ms", "") == shown
    frame = open_notebook(folder).cells().set_index("gpus").loc["0,1"]
    columns = [f"strategy_cost_ms{end}" for end in ("", "_low", "_high")]
    assert list(frame[columns].isna()) == [not shown] * 3


LIMITS = {"noise_limit": 0.05, "idle_limit": 0.1}
OTHER_LIMITS = {
    "none": (LIMITS, ""),
    "of an older version": ({"limit_that_is_gone": 3.0}, ""),
    "one": (LIMITS | {"noise_limit": 0.2}, "noise_limit=0.2"),
}


@pytest.mark.parametrize(("limits", "words"), OTHER_LIMITS.values(), ids=OTHER_LIMITS)
def test_limits_that_are_not_the_defaults_stand_beside_every_verdict(
    limits, words, tmp_path, capsys
):
    judged = {"validity": with_codes("valid", slow_rank="rank 1 is slower") | {"limits": limits}}
    folder = study(tmp_path / "study", [ONE, small(2, PAIR, 190.0, **judged)])
    assert main(["report", str(folder)]) == 0
    head = "Verdicts of this study were made under limits that are not the defaults: "
    head += "validity.noise_limit=0.2 (default 0.05) in 1 run"
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    for text in (capsys.readouterr().out, page, (folder / "report" / "report.md").read_text()):
        assert (head.replace("_", "") in re.sub(r"[_\\]", "", text)) == bool(words)
    marks = {}
    for table, column in (("cells", "state"), ("points", "mark"), ("strategies", "mark")):
        of_pair = [row for row in rows_of(folder / "report", table) if row["gpus"] == "0,1"]
        marks[table] = of_pair[-1][column]
    marks["remarks"] = rows_of(folder / "report", "remarks")[-1]["verdict"]
    rows = open_notebook(folder)
    if words:
        assert set(marks.values()) == {f"valid, {words}"}
        assert list(rows.cells()["limits"])[-1] == list(rows.runs()["limits"])[-1] == words
    else:
        assert marks == {"cells": "valid", "points": "valid", "strategies": "", "remarks": "valid"}
        assert list(rows.cells()["limits"]) == ["", ""]
    assert verdict(rows.records[-1]) == ", ".join(filter(None, ("valid: slow_rank", words)))


# --- the folder of a report


def test_an_earlier_report_is_replaced_and_files_of_the_user_stay(written, tmp_path):
    out = shutil.copytree(written, tmp_path / "out")
    mine = {"figures/mine.svg": b"drawn", "tables/mine.csv": b"1", "notes/deep/mine.txt": b"text"}
    for name, content in mine.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    (out / "link").symlink_to("nowhere")
    (tmp_path / "study").mkdir()
    report(tmp_path / "study", out)
    again = report(tmp_path / "study", tmp_path / "fresh").parent
    assert contents(out) == contents(again) | mine and (out / "link").readlink() == Path("nowhere")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["fresh", "out", "study"], "nothing is left beside"
    assert out.stat().st_mode == again.stat().st_mode


@pytest.mark.parametrize("kept", ["thesis.tex", "index.html"])
def test_a_folder_with_something_else_is_not_touched(kept, tmp_path, refusal):
    out, folder = tmp_path / "out", study(tmp_path / "study", [small(1, [0], 100.0)])
    out.mkdir()
    (out / kept).write_text("<title>Mine</title>")
    said = refusal("report", folder, "-o", out)
    assert f"{out}: holds files, and no report of Ringside; nothing was written" in said
    assert contents(out) == {kept: b"<title>Mine</title>"}


def test_a_file_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "study").mkdir()
    out = report(tmp_path / "study", tmp_path / "out").parent
    (out / "figures").mkdir(exist_ok=True)
    (out / "figures" / "scaling-1.svg").write_text("drawn by hand")
    before = contents(out)
    cells = [small(n, gpus, 100.0) for n, gpus in enumerate(([0], [1], [0, 1]))]
    sentence = r"figures/scaling-1\.svg: is not of the earlier report"
    with pytest.raises(FileExistsError, match=sentence):
        report(study(tmp_path / "later", cells), out)
    assert contents(out) == before


@pytest.mark.parametrize("step", ["write_bytes", "rename"])
def test_writing_that_ends_early_leaves_the_earlier_report(step, written, tmp_path, monkeypatch):
    out = shutil.copytree(written, tmp_path / "out")
    (tmp_path / "study").mkdir()
    true, calls = getattr(Path, step), []

    def fails_the_second_time(path, *arguments):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return true(path, *arguments)

    monkeypatch.setattr(Path, step, fails_the_second_time)
    with pytest.raises(OSError, match="No space left"):
        report(tmp_path / "study", out)
    assert contents(out) == contents(written)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "study"]


# --- the drawing of a traced step

HOSTILE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 50" width="100" onload="alert(1)">
<title>t</title><style>@import url(http://x);text{fill:#20262d}</style><script>alert(2)</script>
<foreignObject><p>html</p></foreignObject><rect fill="url(http://x)"/></svg>"""


def traced(folder, records, drawings):
    study(folder, records)
    for each, drawing in zip(records, drawings, strict=True):
        (folder / each["record_id"] / "profile").mkdir()
        (folder / each["record_id"] / "profile" / "timeline.svg").write_text(drawing)
    return folder


def test_a_traced_cell_shows_its_step_as_an_image_and_never_as_a_part_of_the_page(tmp_path):
    """Of the cell that the finding is about."""
    exposed = {"trace/exposed_ms_per_step": 0.5}
    made = [small(1, [0], 100.0), small(2, [0, 1], 190.0, metrics=exposed)]
    folder = traced(tmp_path / "study", made, ("<svg", HOSTILE))
    page = report(folder, tmp_path / "out").read_text(encoding="utf-8")
    file = (tmp_path / "out" / "figures" / "timeline-1.svg").read_text(encoding="utf-8")
    ET.fromstring(file)
    for text in (page, file):
        image = r'<image width="100" height="50" xlink:href="data:image/svg\+xml;base64,'
        (data,) = re.findall(image + r'([^"]*)"/></svg>', text)
        assert base64.b64decode(data).decode() == HOSTILE, "a browser runs nothing in an image"
        for word in ("http://x", "alert", "onload", "foreignObject", "<script", "@import"):
            assert word not in text
    for name in ("strategies", "cells"):
        assert rows_of(tmp_path / "out", name)[-1]["exposed_by_trace_ms"] == "0.5"


NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
NO_DRAWINGS = ["<svg", "<html/>", f"<!DOCTYPE svg><svg {NAMESPACE}/>", "\x00"]


@pytest.mark.parametrize("drawing", NO_DRAWINGS)
def test_what_is_no_drawing_is_left_out(drawing, tmp_path):
    content, _ = examine(traced(tmp_path / "study", [small(1, [0], 100.0)], [drawing]))
    assert "traces" not in [section.anchor for section in content.sections]


# --- tables, numbers and curves


def test_a_long_table_is_cut_on_the_page_and_whole_in_its_file():
    columns = (Column("cell", "cell"), Column("n", "n", kind="count"))
    table = Table("cells", "all", columns, tuple((f"c{i}", i) for i in range(1000)))
    content = Report("s", "", (), {}, (Section("cells", "Every run", tables=(table,)),))
    left = f"{1000 - PAGE_ROWS} more rows in tables/cells.csv"
    assert left in page(content) and page(content).count("<td>c") == PAGE_ROWS
    assert left in markdown_page(content)
    assert markdown_page(content).count("| c") == PAGE_ROWS + 1
    assert table.to_csv().count("\n") == 1001 and table.to_latex().count("\\\\\n") > 1002


def test_tables_escape_in_every_form():
    share = Column("x", "x", kind="share", bounded=True)
    columns = (Column("a", "a_b"), share, Column("empty", "empty"))
    rows = (("@sum", Estimate(0.5, 0.4, 0.6), ""), ("a|b\r\nc", None, None))
    table = Table("t", "50% & more\n\\evil", columns, rows)
    assert table.to_csv() == "a,x,x_low,x_high,empty\n'@sum,0.5,0.4,0.6,\na|b  c,,,,\n"
    assert r"a\_b & x \\" in table.to_latex()
    assert '<th scope="col">a_<wbr>b</th>' in table.to_html(9)
    assert r"50\% \& more \textbackslash{}evil" in table.to_latex()
    assert table.to_markdown(9).splitlines()[3] == "| a\\|b  c | – |"


NUMBERS = {
    "rate": {18676.3: "18,676", None: "–"},
    "number": {0.12345: "0.123", -3.0: "−3.00", 0.0: "0", 1e-9: "0.000000"},
    "change": {-0.0254: "−2.5 %", 0.02: "+2.0 %", 0.01 - 1e-17: "+1.0 %", 0.001: "+0.10 %"},
    "share": {
        float("nan"): "–",
        0.9953: "99.5 %",
        Estimate(0.99532, 0.9951, 0.9955): "99.53 % (99.51 to 99.55)",
        Estimate(0.9953): "99.5 %",
        -0.00001: "0.00 %",
        0.004: "0.40 %",
        10.0: "1,000.0 %",
        5e12: "over 1,000 %",
    },
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_rounded_to_what_is_known(kind):
    for value, text in NUMBERS[kind].items():
        assert plain(estimate(value, kind)) == text


def test_a_rate_of_less_than_three_images_is_written_as_a_rate():
    curve = DrawnCurve("one", [(1, Estimate(0.8), False), (2, Estimate(1.5), False)], "#000000")
    with style():
        axes = Axis("CPU workers"), Axis("images/s", kind="rate", from_zero=True)
        drawing = curves_figure("name", "Rates.", [curve], *axes).svg
    assert ">1.50<" in drawing and "150.0" not in drawing


def test_that_an_axis_does_not_begin_at_0_is_said_where_it_does_not():
    with style():
        for low in (0.5, 0.0):
            row = DotRow("one", "", Estimate(1.0, low, 1.5), "#000000")
            caption = rows_figure("name", "Rates.", [row], Axis("images/s")).caption
            assert ("The axis does not begin at 0." in caption) == (low > 0)


def test_a_number_of_a_row_does_not_stand_above_the_line_at_0():
    row = DotRow("one", "−86.9 %", Estimate(-0.869), "#000000")
    with style("single"):
        axis = Axis("change", kind="change", shown=(0.0,))
        (axes,) = rows_figure("name", "Changes.", [row], axis).figure.axes
    number = next(text for text in axes.texts if text.get_text() == row.right)
    left, _ = axes.transAxes.inverted().transform(number.get_window_extent().p0)
    assert axes.transLimits.transform((0.0, 0.0))[0] < left


def test_a_number_keeps_its_unit_and_configurations_the_order_of_the_figure(tmp_path):
    doubted = {"validity": with_codes("suspect", cpu_bound="58 % of a step, allowed 10 %")}
    made = [small(3, PAIR, 190.0, **doubted), small(2, PAIR, 200.0, strategy="fsdp"), ONE]
    content, _ = examine(study(tmp_path / "study", made))
    assert "58\u00a0% of a step, allowed 10\u00a0%." in content.finding[0]
    (points,) = [table for table in content.tables if table.name == "points"]
    assert [round(row["images_per_second"]) for row in points.to_json()] == [200, 190, 100]


def test_a_strategy_keeps_its_colour_and_names_lose_what_all_share():
    first = colours(["none", "nccl_allreduce"])["nccl_allreduce"]
    assert first == colours(["nccl_allreduce", "zzz"])["nccl_allreduce"]
    strategies = ["nccl_allreduce", "none", "kvstore_device", "cpu_staged", "mine"]
    assert len(set(colours(strategies).values())) == 5
    long = ["m · a · gpus 0", "m · b · gpus 0"]
    assert short_names(long) == dict(zip(long, "ab", strict=True))
    assert short_names(["m · a"]) == {"m · a": "m · a"}
    assert shared_name(long) == "m · gpus 0"
    assert shared_name(["m · a", "m · a"]) == "" == shared_name(["m", "n"]) == shared_name([])


# --- in a browser


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("source", ["hostile", "strategies"])
def test_nothing_scrolls_sideways(source, written, tmp_path):
    """In frames as wide as a phone and as a screen: no window is as narrow as a phone."""
    made = written / "index.html"
    if source != "hostile":
        made = report(H200 / source, tmp_path / "out")
    for wide, room in widths(made, tmp_path):
        assert wide <= room


@pytest.mark.needs("chromium")
def test_a_page_with_a_planted_script_runs_and_fetches_nothing(written, tmp_path):
    text = (written / "index.html").read_text(encoding="utf-8")
    head, _, _ = text.partition("Content-Security-Policy")
    assert "<style" not in head and "<title" not in head
    planted = "<script>document.title = 'run'</script>"
    planted += "<img src=file:///nowhere.png><p onclick=''></p></main>"
    (tmp_path / "page.html").write_text(text.replace("</main>", planted), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr"]
    command.append(f"file://{tmp_path}/page.html")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "</html>" in done.stdout and "<title>run</title>" not in done.stdout
    refused = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert ["Content Security Policy" in line for line in refused] == [True] * 3, refused
