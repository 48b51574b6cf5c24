"""No code reads a label: with every label replaced by numbered words, verdicts, main points and baselines stay the same."""

import dataclasses
import itertools

import pytest
from build import DATA
from simulate import Simulator, Truth

from analysis.findings import comparisons, scaling, waterfall
from analysis.findings import links as link_value
from analysis.findings.baselines import Baselines
from analysis.findings.examine import findings_of
from analysis.report.main_point import judged_of, main_point
from analysis.study import names as labels
from analysis.study.study import Study
from benchmarks.record import read_study

STUDIES = sorted(path for path in DATA.glob("h200_x*/*") if path.is_dir())
TEXTS = ("label", "setting", "first", "second", "asked", "refusals", "unsaid", "why", "cells")


def simulated_gain(factor):
    """A study whose fastest cell has a setting of NCCL; five repeats tell whether it gains."""
    simulator = Simulator(Truth(noise=0.001))
    return [
        simulator.record(gpus, strategy, repeat, nccl=nccl, factor=factor if nccl else 1.0)
        for repeat in range(5)
        for gpus, strategy, nccl in (
            ((0,), "nccl_allreduce", {}),
            ((1,), "nccl_allreduce", {}),
            ((0, 1), "nccl_allreduce", {}),
            ((0, 1), "nccl_allreduce", {"NCCL_PROTO": "LL"}),
            ((0, 1), "none", {}),
        )
    ]


CASES = {str(path.relative_to(DATA)): lambda path=path: read_study(path)[0] for path in STUDIES}
CASES |= {
    "a setting gains": lambda: simulated_gain(1.02),
    "a setting shows no gain": lambda: simulated_gain(1.0001),
}
CASES |= {"control cells": lambda: Simulator().explained((0, 1, 2, 3))}


def told(records):
    """What a study says, without its texts: findings, main point, baselines and the comparison of the main point with none."""
    study = Study.of(records)
    found = findings_of(study)
    main = main_point(study, found)
    baselines = Baselines(study)
    against_none = None
    for judged in judged_of(found, main[1]) if main else ():
        if judged.first_key["strategy.name"] == "none":
            against_none = judged
    return {
        "findings": without_texts(dataclasses.asdict(found)),
        "main point": main and (main[1].gpus, main[1].key, main[1].rate, main[1].efficiency),
        "against none": against_none and (against_none.difference, against_none.verdict),
        "baselines": {
            one.record_id: (baselines.facts(one), baselines.efficiency(one)) for one in records
        },
    }


def without_texts(value):
    """Nested findings without what is for people; of a sentence, whether there is one."""
    if isinstance(value, dict):
        value = {
            name: len(one) if name == "excluded" else one
            for name, one in value.items()
            if name != "details"
        }
        return {
            name: bool(one) if name in TEXTS else without_texts(one) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_texts(one) for one in value]
    return value


@pytest.mark.parametrize("name", CASES)
def test_numbered_words_instead_of_labels_change_nothing(name, monkeypatch):
    records = CASES[name]()
    before = told(records)
    numbers = itertools.count(1)

    def words(*arguments, **named):
        return f"label {next(numbers)}"

    for module in (labels, scaling, comparisons, waterfall, link_value):
        for function in ("label", "side_label", "format_option", "gpu_list", "gpu_ids"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, words)
    monkeypatch.setattr(labels, "parts", lambda *arguments: [words()])
    renamed = [
        dataclasses.replace(
            one, name=words(), cell=dataclasses.replace(one.cell, labels=(words(), words()))
        )
        for one in records
    ]
    after = told(renamed)
    assert next(numbers) > 2 * len(records), "labels were replaced"
    assert after == before


def test_the_cases_have_what_is_to_stay_the_same():
    """Verdicts, main points with a setting and without, baselines and waterfalls are among them."""
    gains, none = told(simulated_gain(1.02)), told(simulated_gain(1.0001))
    assert gains["main point"][1]["nccl.NCCL_PROTO"] == "LL"
    assert "nccl.NCCL_PROTO" not in none["main point"][1]
    assert none["against none"][1] in ("faster", "slower")
    real = [told(read_study(path)[0]) for path in STUDIES]
    verdicts = {one["verdict"] for each in real for one in each["findings"]["comparisons"]}
    assert verdicts == {"faster", "slower", "no difference seen", ""}
    assert sum(bool(each["main point"]) for each in real) >= 8
    assert any(each["against none"] for each in real)
    assert any(each["findings"]["waterfalls"] for each in real)
    assert any(share for each in real for _, share in each["baselines"].values())
