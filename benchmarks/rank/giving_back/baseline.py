"""The state of a fresh rank, and the way back to it."""

import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank.giving_back import memory, process, settings
from benchmarks.rank.giving_back.held import Held, Left
from conf.cell import Cell

ENDING_SECONDS = 0.3  # for threads that were told to end, and for what they hold
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Baseline:
    """What a process is like before its first cell."""

    settings: dict[str, Any]  # of torch, by name
    process: process.ProcessState
    random_states: dict[str, Any]  # by library
    held: Held

    @staticmethod
    def now(device: torch.device, folder: Path | None = None) -> "Baseline":
        """Return that of this process. `folder` is that of the cell, whose files are open already."""
        return Baseline(
            settings.read(device), process.ProcessState.now(), _random_states(device), Held.now(device, folder)
        )

    def with_environment(self) -> "Baseline":
        """Return it with the variables of the cell that begins, which `os.environ` has now."""
        return replace(self, process=replace(self.process, environment=dict(os.environ)))


def give_back(baseline: Baseline, device: torch.device, cell: Cell, keep_compiled: bool = False) -> list[str]:
    """Drop what torch keeps and set everything back. Returns what the cell had changed that Ringside itself does not change.

    The strategy is closed and the process group destroyed. `keep_compiled`: what was compiled stays for the next cell.
    """
    now, state = settings.read(device), process.ProcessState.now()
    changed = settings.differing(_of_cell(baseline, device, cell), now) + baseline.process.changed(state)
    for_good = settings.set_back(baseline.settings, device) + baseline.process.set_back(state)
    changed += [f"{name}, for good" for name in for_good]
    _set_random_states(baseline.random_states, device)
    memory.drop_caches(device, keep_compiled)
    return changed


def left(
    baseline: Baseline, device: torch.device, first_idle: Left | None, changed: list[str], folder: Path | None = None
) -> Left:
    """Return what this rank holds, and why it may not measure on, if it may not.

    `first_idle` is what this returned after the first cell of the pool; None: this is the first. `changed` is what `give_back`
    returned. `folder` is that of the cell, whose files are still open.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        held = Held.now(device, folder)
        beyond = held.beyond(baseline.held, first_idle.held if first_idle else None)
        if not beyond or time.monotonic() > deadline:
            return Left(held, changed, [f"changed {what}" for what in changed] + beyond)
        time.sleep(PAUSE_SECONDS)


def _of_cell(baseline: Baseline, device: torch.device, cell: Cell) -> dict[str, Any]:
    """Return the settings that Ringside gives a cell. Leaves those of the baseline."""
    settings.set_back(baseline.settings, device)
    if cell.trains:
        from trainers.step import set_arithmetic

        set_arithmetic(cell.precision)
    return settings.read(device)


def _random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of random numbers that code uses without naming one."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
