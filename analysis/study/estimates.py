"""The findings of a study: what scaling, waterfall, comparisons and links return and what the
report prints.

A share is a part of one (0.98), a rate is in images per second. What a study cannot say is absent,
with a sentence why. A finding names its cell by `gpus` and `key`: what was asked and where it ran,
{option: value} (Runs.key). `label` is for people; no code reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Key: TypeAlias = Mapping[str, str]
# The device of a rank: an id on this machine; '<host>:<id>' where cells have hosts.
Member: TypeAlias = int | str
AGAINST = "against"  # before the members that an efficiency is against


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval. `low` and `high` are None where the scatter is not known."""

    value: float
    low: float | None = None
    high: float | None = None


class Efficiency(float):
    """A scaling efficiency as a share; against which GPUs, where some were not measured alone."""

    of: tuple[Member, ...]
    unit: str

    def __new__(cls, value: float, of: tuple[Member, ...] = (), unit: str = "GPU") -> "Efficiency":
        """Make one; `of` is empty where every member was measured alone."""
        share = super().__new__(cls, value)
        share.of, share.unit = of, unit
        return share

    @property
    def mark(self) -> str:
        """`against GPU 0`, for people; empty where every member was measured alone."""
        if not self.of:
            return ""
        return f"{AGAINST} {self.members}"

    @property
    def members(self) -> str:
        """`GPU 0`, `CPU workers 0,2` or `every GPU`: those that were measured alone."""
        if not self.of:
            return f"every {self.unit}"
        unit = self.unit
        if len(self.of) > 1:
            unit += "s"
        return f"{unit} {','.join(map(str, self.of))}"


@dataclass(frozen=True)
class ScalingLaw:
    """A law fitted to the points of a curve."""

    law: str  # amdahl or usl
    parameters: dict[str, float]  # shares
    error: float  # largest relative miss of a point


@dataclass(frozen=True)
class Point:
    """One subset of a curve: runs of equal cells that differ in their repeat alone."""

    gpus: tuple[Member, ...]
    key: Key
    rate: Estimate  # images per second, all GPUs
    runs: int
    batch_size: int  # images per rank and step
    baseline: Estimate | None = None  # images per second of the slowest member alone
    slowest: Member | None = None  # which GPU that is
    speedup: Estimate | None = None  # over the slowest member alone
    efficiency: Estimate | None = None  # share of world_size times the slowest member
    node_efficiency: Estimate | None = None  # share of the hosts times the slowest host alone
    clock_ratio: float | None = None  # SM clock of the slowest member alone, of that of the subset
    suspect: bool = False
    record_ids: tuple[str, ...] = ()
    without_baseline: tuple[Member, ...] = ()  # not measured alone: one may be slower still

    @property
    def world_size(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    @property
    def at_equal_clocks(self) -> float | None:
        """The efficiency as if the subset had the SM clock of the slowest member alone."""
        if self.efficiency is None or self.clock_ratio is None:
            return None
        return self.efficiency.value * self.clock_ratio


@dataclass(frozen=True)
class Curve:
    """Points that differ in their GPUs alone."""

    label: str
    kind: str  # weak (images per GPU unchanged) or strong (images per step unchanged)
    points: tuple[Point, ...]  # by number of GPUs, then as listed
    fits: tuple[ScalingLaw, ...] = ()
    settings: int = 0  # number of options that tell it from the other curves
    details: tuple[str, ...] = ()  # parts of the label besides model, strategy and benchmark


@dataclass(frozen=True)
class Scaling:
    """Every curve of a study; `refusals` are sentences on what was not compared and why."""

    curves: tuple[Curve, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class WaterfallPart:
    """One step down of a waterfall."""

    name: str
    lost: Estimate | None  # images per second; None where no cell measured it
    why: str = ""  # where it is None, or what qualifies it
    above_ideal: bool = False  # subtracted before the ideal: the spread, which is not in `ideal`
    ms: Estimate | None = None  # of a step


@dataclass(frozen=True)
class Waterfall:
    """From the sum of the members alone down to the measured rate.

    It closes: ideal − every known part that is not above the ideal − residual = measured.
    """

    label: str
    gpus: tuple[Member, ...]
    key: Key
    ideal: Estimate  # images per second: world_size times the slowest member alone
    measured: Estimate
    parts: tuple[WaterfallPart, ...]  # in the order in which they are subtracted
    residual: float  # images per second that no part explains
    residual_low: float | None = None  # its 95 % interval
    residual_high: float | None = None
    hosts: tuple[str, ...] = ()  # where there are several


VERDICTS = ("faster", "slower", "no difference seen")


@dataclass(frozen=True)
class Comparison:
    """The runs of two cells that differ in one thing, on the same GPUs."""

    first: str  # label
    second: str  # label
    difference: Estimate  # (second − first) ÷ first
    smallest: float | None  # the smallest share that these runs could have shown
    verdict: str  # VERDICTS, of the second; empty where nothing can be said
    why: str = ""  # where there is no verdict, or what qualifies it
    asked: str = ""  # what differs, for people: strategy, optimize, NCCL_P2P_LEVEL, …
    gpus: tuple[Member, ...] = ()
    runs: tuple[int, int] = (1, 1)
    rate: str = "images/s"  # what is compared; more is faster
    differing: tuple[str, ...] = ()  # names in the keys that differ
    first_key: Key = field(default_factory=dict)
    second_key: Key = field(default_factory=dict)


@dataclass(frozen=True)
class SettingEffect:
    """What an NCCL setting changed, against the same cell in which it was left alone."""

    setting: str  # for people: P2P_LEVEL=LOC
    compared: Comparison  # of the primary rate; the first cell leaves the setting alone
    transports: tuple[str, str]  # without and with it, as NCCL's log says; empty where it does not
    exchange_ms: tuple[float | None, float | None]  # medians over runs

    @property
    def exchange_ratio(self) -> float | None:
        """The time of an exchange with the setting, as a multiple of that without it."""
        without, with_it = self.exchange_ms
        return with_it / without if without and with_it else None

    @property
    def other_transport(self) -> bool:
        """Whether NCCL is known to have used another transport."""
        without, with_it = self.transports
        return bool(without and with_it) and without != with_it


@dataclass(frozen=True)
class Noise:
    """The A/A floor: how far runs of equal cells differ; None where too few cells ran twice."""

    floor: float | None  # share; 19 of 20 pairs of single runs of equal cells differ by less
    pairs: int
    drift: float | None  # change of the first cell when it ran once more at the end, as a share
    deviation: float | None = None  # standard deviation between runs of equal cells, as a share
    freedom: int = 0  # degrees of freedom of the deviation
    rate: str = "images/s"


@dataclass(frozen=True)
class Communication:
    """What equal cells say of their exposed communication, medians over runs; None: not claimed."""

    label: str
    gpus: tuple[Member, ...]
    key: Key
    record_ids: tuple[str, ...]
    cost_ms: float  # of the strategy in a step
    cost_alone_ms: float | None  # … on one GPU
    alone_from: str  # how that was measured
    exposed_ms: float | None
    hidden_share: float | None
    hidden_half: float | None  # half the 95 % interval of the hidden share of one run
    why: str  # why a number is not claimed


@dataclass(frozen=True)
class SubsetLinks:
    """The exchange of a subset next to the links that it had."""

    gpus: tuple[Member, ...]
    key: Key
    strategy: str
    label: str
    link_class: str | None  # the worst between neighbours of the best ring
    transport: str | None
    exchange_gb_per_s: float | None  # busbw
    p2p_gb_per_s: float | None  # of all its rings, at the GB/s of benchmark=p2p between pairs
    nominal_gb_per_s: float | None  # the same by link counts and data sheets
    efficiency: float | None


@dataclass(frozen=True)
class LinkValue:
    """Images/s and GPU that one strategy loses with a link class instead of the best one."""

    key: Key  # of the first cell with the class
    strategy: str
    label: str
    link_class: str
    lost: Estimate
    gradient_bytes: float | None
    batch_size: int


@dataclass(frozen=True)
class WirePoint:
    """One cell beside the line of its mechanism."""

    gpus: tuple[Member, ...]
    key: Key
    label: str  # its GPUs, and NCCL's settings where they vary
    gb_per_s: float  # busbw of the exchange alone
    wire_ms: float  # of the exchange alone
    lost_ms: float  # per step
    # By the line through the others; all cells of a study lie inside in 19 of 20 studies.
    expected_ms: Estimate
    residual_ms: float  # lost − expected


@dataclass(frozen=True)
class WireLine:
    """What the cells of one mechanism lose per step: fixed + share · ms of the exchange alone.

    `fixed_ms` has no interval where it is the difference to one GPU, whose error all cells share.
    """

    label: str
    strategy: str
    key: Key  # of the first cell
    quantity: str  # the metric that says what is lost: comm/exposed_ms or strategy/cost_ms
    fixed_ms: Estimate  # lost whatever the wires
    share: Estimate  # of the time on the wires that compute does not hide
    r_squared: float
    deviation_ms: float  # of the residuals
    points: tuple[WirePoint, ...]  # fastest wires first
    speeds: int  # different times on the wires among the cells


@dataclass(frozen=True)
class Findings:
    """Everything that a study says; `unsaid` and `scaling.refusals` say why a part is empty."""

    scaling: Scaling = Scaling()
    waterfalls: tuple[Waterfall, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    settings: tuple[SettingEffect, ...] = ()  # of NCCL
    noises: tuple[Noise, ...] = ()  # one for each rate that cells of the study have
    wires: tuple[SubsetLinks, ...] = ()
    worth: tuple[LinkValue, ...] = ()
    communication: tuple[Communication, ...] = ()
    wire_lines: tuple[WireLine, ...] = ()
    no_wire_line: str = ""  # where there is none: what is missing and how to plan it
    excluded: tuple[tuple[str, str], ...] = ()  # name of a record, why it takes no part
    unsaid: tuple[str, ...] = ()  # sentences on what could not be said and why
