"""The audit's planted faults: each is found by its code in a whole cell, from raw files to the verdict, beside clean twins."""

from pathlib import Path

import pytest
from planted import ALONE, PAIR_OF_FOUR, gpu_cell, made
from planted_faults import FAULTS, remove

from analysis.report.build import examine

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_its_code(fault, tmp_path):
    folder = gpu_cell(tmp_path, cell=fault.cell)
    fault.plant(folder)
    record = made(folder)
    if fault.edit is not None:
        assert (record.validity.verdict, record.validity.codes) == ("valid", {}), "before the edit"
        fault.edit(folder)
        (left_out,) = next(one for one in examine(tmp_path)[0].sections if one.anchor == "validity").tables[0].rows
        assert left_out[1] == fault.verdict and fault.codes == ("does_not_verify",)
        return
    assert set(fault.codes) <= record.validity.codes.keys(), record.validity
    assert record.validity.verdict == fault.verdict, record.validity


def test_clean_twins_have_no_code_and_every_check_ran(tmp_path):
    for number, source in enumerate((ALONE, PAIR_OF_FOUR)):
        validity = made(gpu_cell(tmp_path, source, name=str(number))).validity
        assert (validity.verdict, validity.codes, validity.unchecked) == ("valid", {}, {}), source


@pytest.mark.parametrize(
    ("lost", "unchecked"), [("gpus.jsonl", {"throttled", "foreign_load"}), ("nccl/*.log", {"setting_ignored"})]
)
def test_what_was_lost_before_the_record_was_made_is_unchecked(lost, unchecked, tmp_path):
    folder = gpu_cell(tmp_path, cell={"nccl": {"NCCL_P2P_LEVEL": "LOC"}})
    remove(lost)(folder)
    assert unchecked <= made(folder).validity.unchecked.keys()
