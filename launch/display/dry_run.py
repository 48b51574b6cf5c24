"""What a dry run prints: the cells in their order, and the time that they will take."""

from rich.console import Console

from benchmarks.record import read_study
from launch.plan.plan import Plan
from launch.plan.time_estimate import worded
from launch.study.study import study_folder


def print_plan(planned: Plan, console: Console) -> None:
    """Print the cells of a plan in their order, and the time that they will take."""
    known, _ = read_study(study_folder(planned.config.output_dir, planned.config.study))
    for number, entry in enumerate(planned.cells):
        console.print(f"{number + 1:4d}  {entry.name}", markup=False)
    if any(entry.drift for entry in planned.cells):
        console.print("note: drift: the first cell once more at the end, to show what changed on the machine meanwhile")
    about = worded(planned.cells, known)
    console.print(f"{about}; nothing was started (dry_run=true)")
