"""The same sweep twice on two real H200s: does the other agree? RESULTS.md, "The next run"."""

from pathlib import Path

import pytest

from analysis.study.study import Study
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data" / "h200_x2"
EAGER, COMPILED = ("eager_a", "eager_b"), ("compiled_a", "compiled_b")
RATE, STEP = "throughput/images_per_second", "step/ms_median"


@pytest.fixture(scope="module")
def studies():
    """Each study as it is without the noise floor of the others."""
    return {name: Study.of(read_study(DATA / name)[0]) for name in EAGER + COMPILED}


def seen(studies, shift=1.0):
    """(Of cells, of single runs, within a run): whether an interval holds each other number.

    The numbers of the other sweep are multiplied by `shift`.
    """
    cells, singles, within = [], [], []
    for first, second in (EAGER, EAGER[::-1]):
        others = {(*one.gpus, *sorted(one.request.items())): one for one in studies[second].timed}
        for runs in studies[first].timed:
            other = others[(*runs.gpus, *sorted(runs.request.items()))]
            for name in (RATE, STEP):
                values = [shift * value for value in other.values(name)]
                cells += [holds(runs.next_run(name), value) for value in values]
                for record in runs.records:
                    shown = studies[first].single(record).next_run(name)
                    inside = record.within_run[name]
                    singles += [holds(shown, value) for value in values]
                    within += [inside["low"] <= value <= inside["high"] for value in values]
    return cells, singles, within


def holds(shown, value):
    return shown.low <= value <= shown.high


def test_what_is_shown_holds_the_other_sweep_and_the_interval_within_a_run_does_not(studies):
    cells, singles, within = seen(studies)
    assert (sum(cells), len(cells)) == (36, 36)
    assert (sum(singles), len(singles)) == (56, 56)
    assert (sum(within), len(within)) == (16, 56)
    shifted = sum(seen(studies, shift=1.01)[0])
    assert shifted < 0.15 * len(cells), "an interval that holds anything says nothing"
    own = {name: study.floors.own() for name, study in studies.items()}
    pooled = {
        name: Study.of(studies[name].records, scatters=own[other])
        for name, other in zip(EAGER, EAGER[::-1], strict=True)
    }
    assert all(seen(pooled)[0]), "as Ringside shows them with both sweeps side by side"


def test_a_sweep_of_too_few_cells_shows_no_interval(studies):
    """Two pairs have two degrees of freedom."""
    for name in COMPILED:
        shown = [runs.next_run(RATE) for runs in studies[name].timed]
        assert len(shown) == 2 and all(one.low is None and one.high is None for one in shown)
