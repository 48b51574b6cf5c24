"""What a study says: the types that scaling, waterfall, comparisons and links return and that the report prints.

A share is a part of one (0.98), a rate is in images per second. What a study cannot say is absent, with a sentence why.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval. `low` and `high` are None where there is nothing to make one of."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fit:
    """A law fitted to the points of a curve. `parameters` are shares by name; `error` is the largest relative miss of a point."""

    law: str  # amdahl or usl
    parameters: dict[str, float]
    error: float


@dataclass(frozen=True)
class Point:
    """One subset of a curve: the runs of equal cells that differ in their repeat alone."""

    gpus: tuple[int, ...]
    rate: Estimate  # images per second, all GPUs
    runs: int
    batch_size: int  # images per rank and step
    baseline: Estimate | None = None  # images per second of the slowest member alone
    slowest: int | None = None  # which GPU that is
    speedup: Estimate | None = None  # over the slowest member alone
    efficiency: Estimate | None = None  # share of world_size times the slowest member
    suspect: bool = False
    record_ids: tuple[str, ...] = ()
    without_baseline: tuple[int, ...] = ()  # members that were not measured alone, so that one may be slower still

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return len(self.gpus)


@dataclass(frozen=True)
class Curve:
    """Points that differ in their GPUs alone; `kind` is weak (images per GPU unchanged) or strong (images per step)."""

    label: str  # what tells it from the other curves of the study
    kind: str
    points: tuple[Point, ...]  # by number of GPUs, then as listed
    fits: tuple[Fit, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """Every curve of a study, and what was not compared and why, a sentence each."""

    curves: tuple[Curve, ...] = ()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """One step down of a waterfall. `lost` is in images per second; None with `why` where no cell tells it."""

    name: str
    lost: Estimate | None
    why: str = ""
    above_ideal: bool = False  # taken off before the ideal: the spread, which `ideal` is already free of


@dataclass(frozen=True)
class Waterfall:
    """From the sum of the members alone down to the measured rate.

    It closes: ideal − every known part that is not above the ideal − residual = measured.
    """

    label: str
    gpus: tuple[int, ...]
    ideal: Estimate  # images per second: world_size times the slowest member alone, without a strategy
    measured: Estimate
    parts: tuple[Part, ...]  # in the order in which they are taken off
    residual: float  # images per second: what no part explains
    residual_low: float | None = None  # its 95 % interval
    residual_high: float | None = None


VERDICTS = ("faster", "slower", "no difference seen")


@dataclass(frozen=True)
class Comparison:
    """Two sets of runs; `difference` is (second − first) ÷ first, the verdict faster, slower or no difference seen."""

    first: str
    second: str
    difference: Estimate
    smallest: float | None  # the smallest share that these runs could have shown
    verdict: str  # VERDICTS, or empty where nothing can be said
    why: str = ""  # where there is no verdict, or what qualifies it
    asked: str = ""  # the one thing that differs: strategy, optimize, NCCL_P2P_LEVEL, …
    gpus: tuple[int, ...] = ()
    runs: tuple[int, int] = (1, 1)
    rate: str = "images/s"  # what is compared; more is faster


@dataclass(frozen=True)
class Noise:
    """The A/A floor: how far equal cells of this study differ, as a share. None where no cell was run twice."""

    floor: float | None  # 19 of 20 pairs of single runs of equal cells differ by less
    pairs: int
    drift: float | None  # the first cell once more at the end, as a share of its first rate
    deviation: float | None = None  # standard deviation between runs of equal cells, as a share
    freedom: int = 0  # degrees of freedom of that
    rate: str = "images/s"  # of which


@dataclass(frozen=True)
class Wire:
    """A subset's exchange beside the links that it had."""

    gpus: tuple[int, ...]
    strategy: str
    label: str
    link_class: str | None  # the worst between neighbours of the best ring
    transport: str | None
    exchange_gb_per_s: float | None  # busbw
    p2p_gb_per_s: float | None  # measured by benchmark=p2p, the worst link of the ring
    efficiency: float | None
    stands_out: str = ""  # a sentence where a member differs from its class beyond noise


@dataclass(frozen=True)
class Worth:
    """What a link is worth: images per second per GPU lost with a class instead of the best one, for one strategy."""

    strategy: str
    label: str
    link_class: str
    lost: Estimate
    gradient_bytes: float | None
    batch_size: int


@dataclass(frozen=True)
class Findings:
    """All that a study says. Every part may be empty; then `unsaid` or `scaling.refusals` say why."""

    scaling: Scaling = Scaling()
    waterfalls: tuple[Waterfall, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    noises: tuple[Noise, ...] = ()  # of every rate that cells of the study have
    wires: tuple[Wire, ...] = ()
    worth: tuple[Worth, ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()  # name of a record, why it takes no part
    unsaid: tuple[str, ...] = ()  # what could not be said and why, a sentence each
