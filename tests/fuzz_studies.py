"""Whole studies for the fuzzing (tests/fuzz.py): forecasts, advice, seconds, the report's sections with one damaged record.

The machine of the records is invented (tests/forecasting.py), so they hold everything that a record may hold: calibration,
moments of steps, seconds, and forecasts that were made before.
"""

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path

from fuzz_calls import Refusal, Wrong, ran
from fuzz_seeds import DATA, Seed

HOLD_OUT = ("condition", "batch", "size", "model", "transport")


def rows_of_steps(step_ms, ranks):
    """Return the timeline of a cell: moments of each rank's steps without the exchange and with it."""
    for rank in range(ranks):
        for exchange in (False, True):
            ends = {
                "backward_ms": 0.9 * step_ms,
                "exchange_ms": (0.95 if exchange else 0.9) * step_ms,
                "update_ms": step_ms,
            }
            ready = [step_ms * share for share in (0.4, 0.5, 0.6, 0.7)]
            spreads = {
                "ready_spread_ms": [0.1] * 4,
                **{name.replace("_ms", "_spread_ms"): 0.1 for name in ends},
            }
            yield {
                "rank": rank,
                "exchange": exchange,
                "steps": 8,
                "ready_ms": ready,
                **ends,
                **spreads,
            }


def enriched(record):
    """Return a record with the tables and facts that the invented machine does not measure."""
    step, ranks = record.metrics["step/ms_median"], record.cell.world_size
    quantiles = {
        "rank": 0,
        "n": 40,
        "mean_ms": step,
        "quantiles_ms": [step - 1, step, step + 2],
        "acf": [0.2, 0.1],
    }
    tables = {
        "timeline": {"rows": [*rows_of_steps(step, ranks)]},
        "residuals": {"probabilities": [0.0, 0.5, 1.0], "rows": [quantiles]},
        "seconds": {
            "rows": [
                {"part": part, "seconds": 0.25} for part in ("spawn", "build", "timed", "exit")
            ]
        },
    }
    metrics = {
        "cell/seconds": 1.0,
        "cell/measuring_seconds": 0.5,
        "cell/overhead_ratio": 2.0,
        "gpu/power_capped_share": 0.9,
    }
    samples = {"phases": {"timed": {"sm_mhz": [1980.0 - 9 * ranks] * ranks}}}
    return dataclasses.replace(
        record, tables=record.tables | tables, metrics=record.metrics | metrics,
        checks=record.checks | {"gpu_samples": samples}, ended_at=record.started_at + 1.0,
    )  # fmt: skip


@functools.cache
def study_files():
    """The records of an invented study: {path in it: bytes}; the last ones were forecast before they ran."""
    from forecasting import Machine

    from benchmarks.record.encoding import encoded

    machine = Machine().calibrate()
    known = [
        *machine.known,
        *(machine.measure(gpus, batch) for gpus in ((0, 2), (1, 3)) for batch in (64, 256)),
    ]
    made = [enriched(record) for record in known]
    return {
        f"cell{place}/record.json": encoded(dataclasses.asdict(one), 1)
        for place, one in enumerate(made)
    }


def study_seeds():
    """Records of a GPU alone, of several with their calibration, and with forecasts of themselves."""
    found = list(study_files().items())
    return [Seed(data, name) for name, data in (*found[:2], found[16], found[20], *found[-4:])]


@functools.cache
def _whole():
    """Return a folder that holds the study."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-study-"))
    for name, data in study_files().items():
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(data)
    return folder


def _placed(seed, folder):
    """Return the folder of the study with one damaged record."""
    for name in study_files():
        path = folder / "study" / name
        path.parent.mkdir(parents=True)
        if name == seed.name:
            path.write_bytes(seed.data)
        else:
            os.link(_whole() / name, path)
    return folder / "study"


def read_study_by_commands(seed, folder, number):
    """Forecast, hold out, advise, place, compare, or say the seconds of a study with one damaged record, in turn."""
    study = str(_placed(seed, folder))
    asked = (
        ("predict", study), ("predict", study, "--holdout", HOLD_OUT[number // 7 % 5]), ("advise", study, "--gpus", "2"),
        ("seconds", study), ("predict", study, "--gpus", "0+1,0+1+2", "--batch", "96,512"),
        ("place", "--gpus", "2", "--topology", str(DATA / "topo_h200_x4.txt"), "--study", study),
        ("compare", study, str(_whole())),
    )[number % 7]  # fmt: skip
    if number % 16 == 3:
        ran(*asked)
    try:
        json.loads(ran(*asked, "--json"), parse_constant=_no_constant)
    except ValueError as error:
        raise Wrong(f"--json printed no JSON ({error})") from None


def _no_constant(word):
    raise ValueError(f"{word} is no JSON")


def read_study_by_sections(seed, folder, number):
    """Make the report's sections on forecasts, losses and costs, with one damaged record."""
    from analysis.findings.examine import findings_of
    from analysis.findings.predicted.stated import about_forecasts
    from analysis.report.figure import style
    from analysis.report.sections.forecasts.cells import forecasts
    from analysis.report.sections.losses import clocks, cost_parts
    from analysis.report.sections.running import costs
    from analysis.study.study import open_study

    study = open_study(_placed(seed, folder))
    about_forecasts(study.records).encode()
    findings = findings_of(study)
    with style():
        for make in (forecasts, cost_parts, clocks, costs):
            section = make(study, findings)
            for table in section.tables if section else ():
                table.to_csv().encode()


def forecast_the_next_cell(seed, folder, number):
    """Estimate the time of a cell and forecast it, from a study with one damaged record, as a launcher does."""
    from analysis.prediction.upcoming import scores_by_machine, upcoming
    from analysis.study.study import Study
    from benchmarks.record import read_study
    from conf.cell import Cell
    from launch.plan.estimate import estimates
    from launch.plan.order import PlannedCell

    records, _ = read_study(_placed(seed, folder))
    if not records:
        raise Refusal("no record")
    cell, study = (
        Cell.from_dict(json.loads(study_files()["cell21/record.json"])["cell"]),
        Study.of(records),
    )
    machine = study.single(records[0]).provenance["machine"]
    found = upcoming(cell, study, machine, "NV18", scores_by_machine(study))
    json.dumps(found, allow_nan=False)
    (told,) = estimates([PlannedCell(cell)], records)
    if not told.seconds >= 0:
        raise Wrong(f"a cell takes {told.seconds} s")


def read_ladder(seed, folder, number):
    """Forecast a published ladder from a damaged file."""
    path = folder / "ladder.json"
    path.write_bytes(seed.data)
    if number % 8 == 3:
        ran("predict", str(path))
    try:
        json.loads(ran("predict", str(path), "--json"), parse_constant=_no_constant)
    except ValueError as error:
        raise Wrong(f"--json printed no JSON ({error})") from None


def ladder_seeds():
    """Published ladders."""
    return [Seed(path.read_bytes()) for path in sorted((DATA / "ladders").glob("*.json"))]


def read_hosts(seed, folder, number):
    """Read a damaged file of hosts."""
    from conf.options import Refused
    from conf.subsets import listed_hosts

    path = folder / "hosts"
    path.write_bytes(seed.data)
    try:
        return [dataclasses.asdict(one) for one in listed_hosts(str(path))]
    except Refused as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise Wrong(f"no sentence: {str(error)[:300]!r}") from None
        raise Refusal(str(error)) from None


def hosts_seeds():
    """Files of hosts as people write them."""
    return [
        Seed(b"# ours\nnode01 slots=4\nnode02 slots=4\n\nnode03\n"),
        Seed(b"a\nb\nc.example.org slots=8  # far\n"),
    ]
