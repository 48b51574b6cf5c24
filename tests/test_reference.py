"""`-h NAME` and `python -m analysis explain`: every metric, code, column and word has a definition."""

import pytest

from analysis.__main__ import main
from analysis.commands.definitions import definitions, explained, reference
from analysis.commands.machine import RINGS, SUBSETS
from analysis.report.cell_numbers import COLUMNS, MARGIN, ONE_RUN, PREDICTED
from analysis.validity.check import REMEDIES
from analysis.validity.checks import CHECKS, OTHER_CODES
from benchmarks.record.metrics import METRICS
from launch.display import columns

ON_SCREEN = (
    *COLUMNS, MARGIN, ONE_RUN, PREDICTED, *columns.DISPENSABLE, columns.GPUS, columns.SETTINGS,
)  # fmt: skip
ON_SCREEN += (columns.STATE, columns.VALIDITY, columns.COST, columns.BAR, "valid", *REMEDIES)
ON_SCREEN += tuple(column.heading for column in (*SUBSETS, *RINGS) if column.heading)


def test_every_metric_code_column_and_word_has_a_definition():
    for name in (*METRICS, *ON_SCREEN):
        assert definitions()[name].meaning, name
    for code in (*(check.code for check in CHECKS), *OTHER_CODES):
        assert definitions()[code].meaning and definitions()[code].remedy, code
    own = [check.code for check in CHECKS if check.remedy not in REMEDIES.values()]
    assert len(own) > 20


def test_the_reference_has_each_in_one_row(tmp_path, capsys):
    assert main(["reference", str(tmp_path / "REFERENCE.md")]) == 0
    assert main(["reference"]) == 0
    text = (tmp_path / "REFERENCE.md").read_text()
    assert text == capsys.readouterr().out == reference()
    for name in METRICS:
        assert text.count("| `" + name.replace("|", "\\|") + "` |") == 1
    for code in (*(check.code for check in CHECKS), *OTHER_CODES):
        assert text.count(f"| `{code}` |") == 1


EXPLAINED = {
    "scaling/efficiency": "formula  images per second ÷ (GPUs × ",
    "of reference speed": "comm/ideal_ratio: speed of the exchange as a share of its reference",
    "foreign_cpu": "to do    Stop other programs",
    "stage/copy_ms": "stage/<name>_ms",
    "strategy_cost_ms": "strategy/cost_ms: time that the strategy adds to a step",
    "one run": "repeats=",
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_name_is_explained_by_both_commands(name, launch, capsys):
    assert main(["explain", *name.split()]) == 0
    said = capsys.readouterr().out
    assert EXPLAINED[name] in said and launch("-h", name) == (0, said, "")


def test_a_definition_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = explained("cpu_bound").splitlines()
    assert len(lines) > 2 and all(len(line) <= 60 for line in lines)


def test_an_unknown_name_has_three_near_ones(launch, refusal):
    said = refusal("explain", "scaling/eficiency")
    assert "did you mean scaling/efficiency, scaling/node_efficiency or " in said
    assert launch("-h", "scaling/eficiency")[0] == 2
    with pytest.raises(ValueError, match="unknown name"):
        explained("%%%")
    with pytest.raises(ValueError, match="did you mean efficiency, jacobi/efficiency or scaling/"):
        explained("efficency", ["efficiency"])
    for name in ("bogus", "again"):  # were told "did you mean gpus?" and "margin, engine or …"
        status, _, error = launch("-h", name)
        assert status == 2 and "did you mean" not in error
