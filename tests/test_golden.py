"""Golden net: what the commands print about the studies and captures in tests/data, beside what they printed before.

Each file of tests/golden holds command lines after `$ ` with the output of each. Here they run again in this process: words
must be equal, numbers within 1e-12, ends of intervals within 1e-9. Only commands are called, so that a test here outlives any
change inside.

`RENEW_GOLDEN=1 pytest tests/test_golden.py` writes the files that differ; read `git diff tests/golden` then. Numbers that are
equal keep their old digits. A new command is a new line `$ …` in its file, renewed.
"""

import contextlib
import csv
import difflib
import importlib
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
GOLDEN = ROOT / "tests" / "golden"
STUDIES = sorted(
    str(folder.relative_to(DATA)) for folder in DATA.glob("h200_*/*") if folder.is_dir()
)
# Files of commands that are written by hand, with how many each holds at least.
BY_HAND = {
    "advise": 2, "cells": 4, "compare": 6, "holdout": 5, "mlflow": 4, "nccl_log": 8, "nccl_tests": 8, "p2p": 7,
    "place": 2, "plans": 40, "predict": 6, "refusals": 200, "shown": 12, "topology": 9, "trace": 4,
}  # fmt: skip
# They will be removed with the feature that they are about.
UNREPORTED_TABLES = {"clocks", "forecasts"}
# Names and notes that will change, ids that MLflow draws, and the process that writes.
UNSTORED_TAGS = {
    "mlflow.note.content", "mlflow.parentRunId", "mlflow.runName", "mlflow.user", "ringside.boot_id", "ringside.host",
    "ringside.pid", "ringside.pid_started", "ringside.projected",
}  # fmt: skip
# Keys of JSON: of features that go (outliers, value of information), and the ids of all records behind a forecast.
UNSTORED_KEYS = {
    "as_fast_as_the_first", "chance_to_be_fastest", "implied_ranks", "loss_images_per_second", "outliers", "records",
    "worth_measuring",
}  # fmt: skip
REPORTS = {f"report/{study.replace('/', '-')}": study for study in STUDIES}
DRAWN = "report/h200_x4-waterfall"  # whose figures are drawn too; `undrawn` stubs those of others
TOLERANCE = {
    "rel_tol": 1e-12,
    "abs_tol": 1e-15,
}  # absolute: what is left where two equal numbers are subtracted
# The ends of intervals and the smallest differences to be seen: releases of scipy differ by 2e-11 in Student's quantiles.
INTERVAL = re.compile(r"(low|high|smallest)\"?: ")
INTERVAL_TOLERANCE = {"rel_tol": 1e-9, "abs_tol": 1e-12}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
MLFLOW_LOG = re.compile(r"\d{4}/\d\d/\d\d [\d:]+ INFO mlflow\.")  # by the tests that ran before
CORES = re.compile(
    r"gpus=all is [\d,]+ (here|on each) \(\d+ cores?\)"
)  # of the machine that runs the tests
FEW_CORES = re.compile(r"note: \d+ CPU workers share 1 core.*\n")
BORDER = re.compile("[\u2500-\u257f]+")
DIFF_LINES = 80
# What may change the answer of a command without being in it.
OUTSIDE = (
    "NCCL_", "SLURM_", "MLFLOW_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "RINGSIDE_", "TORCH_", "OMP_",
    "NSYS",
)  # fmt: skip


# --- the stored texts ------------------------------------------------------------------------------------------------


def commands_of(name, stored):
    """Return the command lines of a golden file: of studies as tests/data has them, else as the file has them."""
    if name == "verify":
        return [f"python -m analysis verify data/{study}" for study in STUDIES]
    if name in REPORTS:
        return [f"python -m analysis report data/{REPORTS[name]} -o report"]
    return [line[2:] for line in stored.splitlines() if line.startswith("$ ")]


def sections_of(text):
    """Return the output lines of each command line in a golden text."""
    sections = {}
    lines = []
    for line in text.splitlines():
        if line.startswith("$ "):
            lines = sections.setdefault(line[2:], [])
        else:
            lines.append(line)
    return sections


def is_same(stored, line):
    """Return whether two lines have equal words, and numbers within the tolerance."""
    if stored == line:
        return True
    if NUMBER.split(stored) != NUMBER.split(line):
        return False
    tolerance = INTERVAL_TOLERANCE if INTERVAL.search(stored) else TOLERANCE
    for before, after in zip(NUMBER.findall(stored), NUMBER.findall(line), strict=True):
        if not math.isclose(float(before), float(after), **tolerance):
            return False
    return True


def with_stored_digits(stored, lines):
    """Return the lines, each as it is stored where it is the same within the tolerance."""
    if stored == lines:
        return lines
    kept = list(lines)
    masks = [[NUMBER.sub("0", line) for line in text] for text in (stored, lines)]
    for start, other_start, length in difflib.SequenceMatcher(
        None, *masks, autojunk=False
    ).get_matching_blocks():
        for offset in range(length):
            if is_same(stored[start + offset], lines[other_start + offset]):
                kept[other_start + offset] = stored[start + offset]
    return kept


# --- the commands ----------------------------------------------------------------------------------------------------


def run_launch(arguments):
    """Run launch.py as a fresh module in this process, and return its exit status."""
    GlobalHydra.instance().clear()
    sys.argv[:] = ["launch.py", *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raise AssertionError("launch.py did not end with an exit status")


def table_lines(text):
    """Return a CSV table with a line for each cell that is not empty, so that a column can come or go by itself."""
    lines = []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=1):
        lines.append(f"row {number}")
        for column, value in row.items():
            if value:
                lines.append(f"  {column}: {value}")
    return lines


def report_lines(folder):
    """Return the finding of a report and its CSV tables, each below its name."""
    page = (folder / "report.md").read_text(encoding="utf-8")
    lines = ["--- report.md", *page.split("\n## ")[1].splitlines()]
    for path in sorted(folder.glob("tables/*.csv")):
        if path.stem not in UNREPORTED_TABLES:
            lines += [f"--- {path.name}", *table_lines(path.read_text(encoding="utf-8"))]
    return lines


def cells_lines(study):
    """Return the table of a study's cells that notebooks get."""
    return table_lines(
        importlib.import_module("analysis").open_study(study).cells().to_csv(index=False)
    )


def expanded(words):
    """Return words with the paths that a pattern stands for, as a shell has them."""
    paths = []
    for word in words:
        paths += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return paths


def mlflow_runs(uri, experiment_name):
    """Return the parameters, metrics and tags of every run of an experiment, as lines; runs in the order of their ids."""
    client = importlib.import_module("mlflow").MlflowClient(uri)
    experiment = client.get_experiment_by_name(experiment_name)
    runs = []
    for entity in client.search_runs([experiment.experiment_id]):
        tags = {key: value for key, value in entity.data.tags.items() if key not in UNSTORED_TAGS}
        lines = [f"tag {key} = {value}" for key, value in sorted(tags.items())]
        lines += [f"param {key} = {value}" for key, value in sorted(entity.data.params.items())]
        lines += [f"metric {key} = {value}" for key, value in sorted(entity.data.metrics.items())]
        runs.append((tags.get("ringside.kind", ""), tags.get("ringside.record_id", ""), lines))
    return [line for _, _, lines in sorted(runs) for line in ("--- run", *lines)]


def without_unstored(mapping):
    """Return a JSON object without the keys that are not stored."""
    return {key: value for key, value in mapping.items() if key not in UNSTORED_KEYS}


def json_lines(text):
    """Return a JSON object with a value a line, sorted."""
    parsed = json.loads(text, object_hook=without_unstored)
    return json.dumps(parsed, indent=1, sort_keys=True, ensure_ascii=False).splitlines()


def plain_lines(lines):
    """Return lines without the borders and the padding of tables; of outliers none is stored."""
    unframed = [
        " ".join(BORDER.sub(" ", line).split()) for line in lines if not line.startswith("outlier ")
    ]
    return [line for line in unframed if line]


def answer(command):
    """Return what a command line prints and writes, as lines; an exit status other than 0 comes first."""
    words = shlex.split(command)
    if words[0] == "cells":
        return cells_lines(words[1])
    shutil.rmtree("report", ignore_errors=True)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if words[:2] == ["python", "launch.py"]:
            status = run_launch([*words[2:], "output_dir=outputs", "dry_run=true"])
        elif words[2] == "launch":
            shutil.copytree(
                words[4].replace("copy", "data", 1), words[4]
            )  # it writes beside the study
            status = importlib.import_module("launch.__main__").main(words[3:])
        else:
            status = importlib.import_module("analysis.__main__").main(expanded(words[3:]))
    lines = out.getvalue().splitlines()
    if "--json" in words and lines:
        lines = json_lines(out.getvalue())
    elif status == 0 and words[3:4] == ["verify"]:
        lines = lines[-1:]  # the summary
    elif status == 0 and words[3:4] == ["report"]:
        lines += report_lines(Path("report"))
    elif status == 0 and words[3:4] == ["sync"]:
        lines += mlflow_runs(
            words[words.index("--uri") + 1], words[words.index("--experiment") + 1]
        )
    elif status == 0 and words[2] == "analysis":
        lines = plain_lines(lines)
    lines += [line for line in err.getvalue().splitlines() if not MLFLOW_LOG.match(line)]
    if status:
        lines.insert(0, f"[exit status {status}]")
    text = "\n".join(lines).replace(str(DATA), "data").replace(str(Path.cwd()), ".")
    return CORES.sub(r"gpus=all is … \1", FEW_CORES.sub("", text)).split("\n")


@pytest.fixture
def around(monkeypatch, tmp_path):
    """Run in an empty folder, in which `data` is tests/data, without what the machine sets for NCCL, MLflow and jobs."""
    (tmp_path / "data").symlink_to(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in list(os.environ):
        if name.startswith(OUTSIDE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize("name", ["verify", *BY_HAND, *REPORTS])
def test_commands_answer_as_before(name, around, request):
    if name != DRAWN:
        request.getfixturevalue("undrawn")
    path = GOLDEN / f"{name}.txt"
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    before = sections_of(stored)
    after, differences = {}, []
    for command in commands_of(name, stored):
        stored_lines = before.get(command, [])
        after[command] = with_stored_digits(stored_lines, answer(command))
        if name == DRAWN:
            drawings = [path.read_text("utf-8") for path in Path("report").rglob("*.svg")]
            assert drawings and all("<path" in drawing for drawing in drawings)
        changes = list(
            difflib.unified_diff(stored_lines, after[command], "stored", "now", lineterm="", n=2)
        )
        if changes:
            differences.append("\n".join([f"$ {command}", *changes[:DIFF_LINES]]))
    if os.environ.get("RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for command, output in after.items() for line in (f"$ {command}", *output)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    assert after, f"{path.name} is missing or holds no command"
    assert after.keys() == before.keys()
    if differences:
        pytest.fail(
            "\n\n".join([f"{path.name} differs; RENEW_GOLDEN=1 writes it anew", *differences]),
            pytrace=False,
        )


def test_the_net_has_all_its_files_and_no_others():
    names = {str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.txt")}
    assert names == {"verify", *BY_HAND, *REPORTS}
    for name, least in BY_HAND.items():
        text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
        assert len(commands_of(name, text)) >= least, name
    refusals = sections_of((GOLDEN / "refusals.txt").read_text(encoding="utf-8"))
    assert {lines[0] for lines in refusals.values()} == {"[exit status 2]"}
