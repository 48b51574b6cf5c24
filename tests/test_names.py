"""Names of cells tell every option that a sweep varies, so no two cells of it have the same name."""

import dataclasses

import pytest
from build import DATA, changed_cell, make_cell

from analysis.study.names import varying, with_what_differs
from benchmarks.record import read_study

STUDIES = sorted({path.parents[1] for path in DATA.glob("h200_x*/*/*/record.json")})
CHANGED = {
    str: lambda text: f"{text}x",
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 1,
}
NO_OPTIONS = {"labels", "declared", "repeat"}


def options(cell):
    """Every option of a cell with another value: {name: the cell with it}."""
    found = {}
    for name, value in cell.to_dict().items():
        inside = value if isinstance(value, dict) else {None: value}
        for inner, one in inside.items() if name not in NO_OPTIONS else ():
            if type(one) in CHANGED:
                other = CHANGED[type(one)](one)
                changed = (
                    {name: {inner: other}}
                    if name == "model"
                    else {name: value | {inner: other} if inner else other}
                )
                found[inner or name] = changed_cell(cell, **changed)
    return found


def test_each_option_that_varies_is_in_the_names_of_both_cells():
    cell = make_cell()
    every = options(cell)
    assert {
        "seed",
        "learning_rate",
        "max_seconds",
        "static_graph",
        "channels_last",
        "profiler",
        "batch_size",
    } <= set(every)
    for name, other in every.items():
        one, two = with_what_differs([cell, other])
        assert one.name != two.name and (one.key, two.key) == (cell.key, other.key), name
        assert all(varying([cell, other])), name


def test_what_is_the_same_is_not_told():
    cell = make_cell(labels=("batch 2",))
    other = dataclasses.replace(cell, batch_size=4, labels=("batch 4",))
    assert [one.labels for one in with_what_differs([cell, other])] == [
        ("batch 2",),
        ("batch 4",),
    ], "told once"
    assert with_what_differs([cell, dataclasses.replace(cell, repeat=1)]) == [
        cell,
        dataclasses.replace(cell, repeat=1),
    ]
    small, large = make_cell((0,), batch_size=4), make_cell((0, 1), batch_size=2)
    assert varying([small, large]) == [{"gpus": "0"}, {"gpus": "0,1"}], (
        "the batch follows from the GPUs"
    )


def test_a_setting_of_nccl_that_one_cell_leaves_alone_is_its_default():
    cell = make_cell()
    with_loc = dataclasses.replace(cell, nccl={"NCCL_P2P_LEVEL": "LOC"})
    assert [[*one.values()] for one in varying([cell, with_loc])] == [["default"], ["LOC"]]
    assert varying([make_cell((0,)), cell, with_loc])[0] == {"gpus": "0"}, (
        "one GPU has no use for it"
    )


@pytest.mark.parametrize("folder", STUDIES, ids=lambda path: str(path.relative_to(DATA)))
def test_no_two_cells_of_a_real_study_have_one_name(folder):
    cells = {dataclasses.replace(one.cell, repeat=0).key: one.cell for one in read_study(folder)[0]}
    named = with_what_differs(
        [dataclasses.replace(one, labels=(), repeat=0) for one in cells.values()]
    )
    assert len({one.name for one in named}) == len(cells)
    assert len({tuple(one.items()) for one in varying(named)}) == len(cells)
