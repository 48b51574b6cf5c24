"""A subset of GPUs whose loss is explained: its members alone, and each part of the loss as a difference of step times.

The table is in analysis.findings.waterfall. Where no GPU ran alone without a strategy, but the clocks differ, the members are
those that ran alone with the strategy.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.findings.communication.by_hosts import COMMUNICATION, Parts, by_hosts
from analysis.findings.communication.exposed import COST
from analysis.findings.communication.steps import Step, mean_step, step_of
from analysis.findings.control_cells import ControlRuns
from analysis.findings.estimates import Sample, freedom, slowest
from analysis.findings.losses.clocks import NAME as CLOCKS
from analysis.findings.losses.clocks import Clocks
from analysis.findings.losses.exchange import in_parts
from analysis.findings.model import Member
from analysis.findings.runs import Runs

WAIT = "trace/wait_ms_per_step"
OVERHEAD, CONTENTION, WAITING = "strategy overhead on one GPU", "contention", "waiting for a peer"


@dataclass(frozen=True)
class ExplainedSubset:
    """The runs of a subset, and those of the control cells that explain them."""

    runs: Runs
    log_rate: Sample  # of `runs`: the logarithm of images per second
    members: Mapping[Member, Runs]  # those that ran alone
    rates: Mapping[Member, Sample]  # of each member, as `log_rate`
    with_strategy: bool  # so the members ran alone
    without: Mapping[tuple[Member, ...], Runs]  # strategy=none, by subset; empty where members ran with the strategy
    alone: Mapping[Member, Runs]  # with the strategy
    hosts: Mapping[Member, Runs]  # each of several hosts alone with all its GPUs
    clocks: Clocks

    @staticmethod
    def of(runs: Runs, controls: ControlRuns, clocks: Clocks) -> "ExplainedSubset | None":
        """Return what is known of a subset; None where no member ran alone, or only with the strategy and at the same clock."""
        without, alone = controls.without(runs), controls.alone(runs)
        members = _with_rate({gpu: without[(gpu,)] for gpu in runs.gpus if (gpu,) in without})
        with_strategy = not members
        members = members or _with_rate({gpu: alone[gpu] for gpu in runs.gpus if gpu in alone})
        rates = {gpu: rate for gpu, one in members.items() if (rate := one.log_rate) is not None}
        if not rates or runs.log_rate is None or not runs.batch_size:
            return None
        hosts = controls.hosts(runs)
        found = ExplainedSubset(
            runs, runs.log_rate, members, rates, with_strategy, {} if with_strategy else without, alone, hosts, clocks
        )
        return found if not with_strategy or clocks.differ(runs, found.slowest) else None

    @property
    def slowest(self) -> Runs:
        """The runs of the slowest member alone."""
        return self.members[min(self.rates, key=lambda gpu: self.rates[gpu].value)]

    @property
    def images(self) -> int:
        """The images of a step of all ranks."""
        return self.runs.world_size * self.runs.batch_size

    @functools.cached_property
    def step(self) -> Step:
        """The measured step."""
        return _step(self.log_rate, self.images)

    @functools.cached_property
    def slowest_step(self) -> Step:
        """The step of the slowest member alone, whichever that is in each draw."""
        value, draws = slowest(self.rates.values())
        images = self.runs.batch_size * 1e3  # of a step, times the ms of a second
        return Step(images / math.exp(value), None if draws is None else images / np.exp(draws))

    @functools.cached_property
    def freedom(self) -> float:
        """The degrees of freedom of all rates and differences that the parts come from."""
        others = [self.alone[gpu].log_rate for gpu in self.runs.gpus if gpu in self.alone]
        others.append(together.log_rate if (together := self.without.get(self.runs.gpus)) else None)
        others.append(_as_share(self.runs.difference(COST), self.step.ms))
        return freedom([self.log_rate, *self.rates.values(), *(one for one in others if one is not None)])

    def parts(self) -> Iterator[tuple[str, Step | None, str]]:
        """Yield the parts below the ideal: name, time, and why it is not known or what qualifies it."""
        yield OVERHEAD, self._overhead, self._why_no_overhead()
        slowed = self.clocks.lost(self.runs, self.members, self._computing())
        yield CLOCKS, slowed, "" if slowed else self._why_no_clocks()
        yield self._contention()
        yield from self._communication()

    @functools.cached_property
    def _overhead(self) -> Step | None:
        """What the strategy adds to a step of one rank, the mean over the members; None with it in the ideal."""
        if self.with_strategy:
            return None
        steps = [
            self._step_alone(rate) - self._step_alone(self.rates[gpu])
            for gpu in self.runs.gpus
            if gpu in self.rates and gpu in self.alone and (rate := self.alone[gpu].log_rate) is not None
        ]
        return mean_step(steps)

    def _why_no_overhead(self) -> str:
        if self.with_strategy:
            return "it is in the ideal: no GPU ran alone without a strategy (waterfall=true adds that)"
        return "" if self._overhead else "the strategy was not measured on one of these GPUs alone"

    def _why_no_clocks(self) -> str:
        return "the clocks were not sampled" if self.runs.cell.device == "cuda" else "CPU workers have no SM clock"

    def _computing(self) -> dict[Member, Step]:
        """Return the step of each member alone, with what the strategy does on one GPU."""
        steps = {gpu: self._step_alone(rate) for gpu, rate in self.rates.items()}
        return {gpu: step + self._overhead if self._overhead else step for gpu, step in steps.items()}

    def _contention(self) -> tuple[str, Step | None, str]:
        """Return what ranks take from each other without any exchange, beside clocks: host memory, the CPU."""
        together = self.without.get(self.runs.gpus)
        if together is None or together.log_rate is None:
            return CONTENTION, None, "strategy=none did not run on this subset"
        slowed = self.clocks.at_clock_of(together, self.slowest_step, self.slowest) if self.runs.clock_mhz else None
        return CONTENTION, _step(together.log_rate, self.images) - (slowed or self.slowest_step), ""

    def _communication(self) -> Parts:
        """Return the exposed communication in parts, and the waiting."""
        own = self._cost_alone() or self._overhead
        at_clock = own and (self.clocks.at_clock_of(self.runs, own, self.slowest) or own)
        parts = self._exposed_and_waiting(at_clock)
        if len(self.runs.cell.hosts) > 1:
            return by_hosts(self.runs, parts, self.hosts, own)
        return in_parts(parts, self.runs, self.alone)

    def _cost_alone(self) -> Step | None:
        """Return the cost of the strategy on one GPU, by steps with and without exchange in turn, the mean over the members."""
        alone = [self.alone[gpu] for gpu in self.runs.gpus if gpu in self.alone]
        return mean_step([step for one in alone if (step := step_of(one, COST)) is not None])

    def _exposed_and_waiting(self, own: Step | None) -> Parts:
        """Return the exposed communication without what the strategy costs on one GPU, and the waiting, which a trace shows."""
        whole = step_of(self.runs, COST)
        if whole is None:
            asked = self.runs.cell.benchmark.get("exposed_rounds", 1)
            untimed = "the strategy has no exchange alone" if asked else "benchmark.exposed_rounds=0"
            why = f"steps without the exchange were not timed ({untimed})"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        if self.with_strategy and own is None:  # the ideal has it already
            why = "what the strategy costs on one GPU was not measured"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        why = "" if own else "this includes what the strategy costs on one GPU"
        exposed = whole - own if own else whole
        waiting, untold = self._waiting()
        if waiting is None:
            return [(COMMUNICATION, exposed, why), (WAITING, None, untold)]
        if waiting.ms <= 0 or exposed.ms <= 0:
            untold = "ranks wait for slower GPUs only, or the wait costs no step time"
            return [(COMMUNICATION, exposed, why), (WAITING, None, untold)]
        if waiting.ms > exposed.ms:  # part of it was hidden behind compute
            return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
        return [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]

    def _waiting(self) -> tuple[Step | None, str]:
        """Return how long the mean rank waits for a peer of equal speed, or why that is not known.

        A trace shows how long it waits; the part in which it waits for a slower GPU is the spread, which the ideal is without.
        """
        waiting = step_of(self.runs, WAIT)
        if waiting is None:
            return None, "part of the exposed communication: no trace tells them apart"
        if len(self.rates) < self.runs.world_size:
            return None, "how long ranks wait for slower GPUs is not known"
        for_slower = mean_step([self.slowest_step - self._step_alone(rate) for rate in self.rates.values()])
        assert for_slower is not None  # there is a member
        return waiting - for_slower, ""

    def _step_alone(self, rate: Sample) -> Step:
        """Return the step of one rank that belongs to the logarithm of a rate."""
        return _step(rate, self.runs.batch_size)


def _with_rate(runs: Mapping[Member, Runs]) -> dict[Member, Runs]:
    return {gpu: one for gpu, one in runs.items() if one.log_rate is not None}


def _step(rate: Sample, images: int) -> Step:
    """Return the time of a step of so many images that belongs to the logarithm of a rate."""
    ms = images * 1e3  # at one image per second
    return Step(ms / math.exp(rate.value), None if rate.draws is None else ms / np.exp(rate.draws))


def _as_share(difference: Sample | None, ms: float) -> Sample | None:
    """Return a difference of step times as a share of a step."""
    if difference is None or difference.floor is None:
        return None
    floor = dataclasses.replace(difference.floor, deviation=difference.floor.deviation / ms)
    return dataclasses.replace(difference, value=difference.value / ms, floor=floor)
