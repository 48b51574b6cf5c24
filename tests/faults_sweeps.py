"""Run the sweeps of the campaign: many faulty cells in one, and launchers that are signalled one after the other."""

import dataclasses

from faults import PlantedSweep
from faults_seen import examine
from faults_table import SILENCE_S, START_S, key_of

from launch.study.study import StudyFolder

# Tiny windows in which every phase comes.
SHORT = [
    "benchmark.max_seconds=0.1",
    "benchmark.min_iterations=3",
    "benchmark.max_iterations=10",
    "benchmark.warmup_min_seconds=0",
    "benchmark.warmup_max_seconds=0.1",
    "benchmark.exchange_iterations=4",
    "benchmark.limit_iterations=4",
    "benchmark.exposed_rounds=1",
    "noise_pairs=0",
    f"engine.silence_timeout_s={SILENCE_S}",
    f"engine.start_timeout_s={START_S}",
]
QUIET = ["report=false", "gpus=0+1"]
WITH_SERVER = ["strategy=kvstore_dist_sync", "strategy.servers=1"]
WITH_PASS = ["profiler=torch", "profiler.steps=2", "profiler.warmup_steps=2"]
FIRST_CAP = 11
HEALTHY = (1001, 1002)  # caps of cells without a fault


def sweep_of(folder, faults, *overrides):
    """Return the outcomes of faults that one sweep has, each in a cell of its own, with a healthy cell at either end."""
    keyed = {FIRST_CAP + number: fault for number, fault in enumerate(faults)}
    with PlantedSweep(folder, keyed, *SHORT, *QUIET, *overrides, healthy=HEALTHY) as sweep:
        sweep.run(timeout_s=90 * len(faults) + 300)
        return [examine(fault, sweep, cap) for cap, fault in keyed.items()]


def launchers_of(folder, faults, template):
    """Return the outcomes of signals to launchers: each starts where the one before was stopped, and the last measures the rest.

    `template` is an initialised store. A signal that lets the cell finish has a cell of its own.
    """
    caps = [
        FIRST_CAP if fault.cause else FIRST_CAP + 1 + number for number, fault in enumerate(faults)
    ]
    outcomes = []
    with PlantedSweep(folder, {}, *SHORT, *QUIET[1:], healthy=HEALTHY[:1]) as sweep:
        (sweep.output_dir / "mlflow.db").write_bytes(template.read_bytes())
        for fault, cap in zip(faults, caps, strict=True):
            key = key_of(fault, cap)
            sweep.replant({key: fault})
            sweep.run(*of_phase(fault), caps=[cap, HEALTHY[0]], timeout_s=180)
            sweep.orphans()  # before anything ends them
            if fault.kind == "SIGKILL":
                StudyFolder(
                    str(sweep.output_dir), sweep.study_dir.name
                ).recover()  # as the next launcher does at once
            outcomes.append(examine(fault, sweep, key, record=hit_record(sweep, cap)))
        sweep.replant({})
        passes = sorted(
            {cap for fault, cap in zip(faults, caps, strict=True) if fault.phase == "profile"}
        )
        others = sorted({*caps, HEALTHY[0]}.difference(passes))
        statuses = [sweep.run(caps=others, timeout_s=60 * len(faults))]
        if passes:
            statuses.append(
                sweep.run(*WITH_PASS, caps=[*passes, HEALTHY[0]], timeout_s=60 * len(faults))
            )
        finished = [one.cell_key for one in sweep.records() if one.state == "finished"]
    # A cell whose profiled pass was interrupted is measured anew, with its trace.
    again = {one.cell_key for one in sweep.records() if one.cell.profiler != "none"}
    twice = [key for key in set(finished) - again if finished.count(key) > 1]
    if (
        not any(statuses)
        and not twice
        and {one.cell_key for one in sweep.records()} == set(finished)
    ):
        return [dataclasses.replace(one, others_finished=True) for one in outcomes]
    wrong = f"the last launchers ended with {statuses}; finished twice: {twice}"
    return [
        dataclasses.replace(one, others_finished=False, wrong=[*one.wrong, wrong])
        for one in outcomes
    ]


def hit_record(sweep, cap):
    """The newest record of a cell: that of the launcher that just ended."""
    return next(reversed(sweep.records(cap)), None)


def of_phase(fault):
    """Overrides that make the phase of a fault come."""
    if fault.phase == "profile":
        return [*WITH_PASS, "report=false"]
    if fault.phase in ("projection", "report"):
        return ["tracking.enabled=true"]
    return ["report=false"]
