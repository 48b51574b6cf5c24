"""Find the cells of a sweep that an earlier invocation finished here, and say why others are measured again."""

from collections import Counter
from collections.abc import Callable, Sequence

from analysis.report.text import count
from benchmarks.record import Record
from conf.cell import Cell
from launch.study.study import StudyFolder
from launch.study.surroundings import Surroundings


def done_before(
    cells: Sequence[Cell], study: StudyFolder, here: Surroundings, note: Callable[[str], None]
) -> dict[int, Record]:
    """Return the records of cells that were finished in the surroundings of `here`, by their place in the order.

    `note` gets a sentence on each difference for which cells are measured again.
    """
    found: dict[int, Record] = {}
    again = Counter[str]()
    for number, cell in enumerate(cells):
        if record := study.finished(cell, here):
            found[number] = record
        elif why := "; ".join(study.elsewhere(cell, here)):
            again[why] += 1
    for why, cells_again in again.items():
        are = "is" if cells_again == 1 else "are"
        note(f"{count(cells_again, 'cell')} {are} measured again: {why}. What was measured before is kept")
    if others := sum(map(here.other_code, found.values())):
        were = "was" if others == 1 else "were"
        note(
            f"{count(others, 'cell')} {were} measured by other code of Ringside's, and the report compares this with nothing "
            "that is measured now (resume=false measures all cells again)"
        )
    return found
