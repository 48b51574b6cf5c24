"""`gpus=advise:4` becomes the four GPUs that forecasts put first, by the records of the study so far; else those of best:4.

One subset is chosen for a whole sweep, by its first cell that asks for so many GPUs: cells can then be compared.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks.record import Record
from conf.cell import Cell
from conf.resolve import CheckedConfig, resolve
from launch.machine.devices import Machine
from launch.plan.subsets import subsets, topology_of
from launch.study.study import study_folder

WORD = "advise:"


def with_advice(
    configs: Sequence[CheckedConfig], machine: Machine
) -> tuple[list[CheckedConfig], list[str]]:
    """Return the configurations with the subsets that `advise:K` means, and a sentence for each K. Raises Refused."""
    chosen: dict[str, list[str]] = {}
    notices = []
    for config in configs:
        word = ",".join(config.gpus)
        if word.startswith(WORD) and word not in chosen:
            gpus, why = _chosen(config, machine, word)
            chosen[word] = [str(gpu) for gpu in gpus]
            notices.append(f"gpus={word} is {','.join(chosen[word])}: {why}")
    return [
        dataclasses.replace(one, gpus=chosen.get(",".join(one.gpus), one.gpus)) for one in configs
    ], notices


def _chosen(config: CheckedConfig, machine: Machine, word: str) -> tuple[tuple[int, ...], str]:
    """Return the subset that forecasts put first, without a forecast that of the best links, and why. Raises Refused."""
    by_links = subsets(config, machine)[0]
    try:
        if config.nodes or machine.kind == "cpu":
            raise ValueError(
                "only GPUs of one machine are told apart"
                if config.nodes
                else "CPU workers are all alike"
            )
        return _by_forecast(config, machine, len(by_links))
    except (ValueError, OSError) as error:  # UnreadableInput and NoLink too
        return (
            by_links,
            f"no forecast is possible ({error}); taken as {word.replace('advise', 'best')}",
        )


def _by_forecast(config: CheckedConfig, machine: Machine, size: int) -> tuple[tuple[int, ...], str]:
    """Return the subset that forecasts put first, and why. Raises Refused, OSError, and ValueError where there is no forecast."""
    from analysis.prediction.advice.placement import (
        placement,  # with numpy and scipy: most plans need no forecast
    )
    from analysis.study.study import open_study

    folder = study_folder(config.output_dir, config.study)
    if not folder.is_dir():
        raise ValueError(f"study {config.study} has no cell yet")

    def cell_on(gpus: tuple[int, ...]) -> Cell:
        return resolve(config, gpus, machine.kind, everyone={"": machine.everyone})

    def is_here(record: Record) -> bool:
        ours = set(machine.uuids(machine.everyone))
        planned = record.environment.get("planned_uuids")
        return not ours or (
            isinstance(planned, list) and bool(ours & {str(one) for one in planned})
        )

    return placement(open_study(folder), topology_of(config, machine, None), size, cell_on, is_here)
