"""The record of an attempt at a cell: what was asked, what was used, what was measured, and whether it may be believed.

A Record can be rebuilt from the files of its cell's folder (cell_folder.py). MLflow is only ever a projection of Records.

Versions of the schema:
    1  first
    2  tables
    3  the cell holds no `auto`, and what its YAML files declare
    4  within_run, raw_sha256, validity.limits; names of metrics that mean what they say (former.py reads the older names)
    5  tables.residuals
    6  predicted
"""

from dataclasses import dataclass, field
from typing import Any

from conf.cell import Cell

SCHEMA_VERSION = 6
LAST_TIME = 253402300800  # the year 10000, in seconds since 1970
STATES = ("finished", "failed", "interrupted")
VERDICTS = ("valid", "suspect", "invalid")
# Codes that say something of a cell, and nothing against its numbers. (clocks_differ may be such a finding too.)
FINDINGS = ("profiled", "reference_exceeded", "input_bound", "setting_no_effect")


class RecordError(ValueError):
    """A file that is no record this version can read; the message names the file and the reason."""


@dataclass(frozen=True)
class Failure:
    """Why a cell did not finish."""

    cause: str  # hang, oom, killed, nccl, exception, start, node_lost, interrupted
    rank: int | None  # the first failing rank, where one is known
    message: str  # one sentence
    log_tail: str = ""  # the last lines of that rank's log


@dataclass(frozen=True)
class Validity:
    """What the checks said. A check that did not run is never passed: the reason is in `unchecked` or `not_applicable`."""

    verdict: str = "valid"  # VERDICTS
    codes: dict[str, str] = field(default_factory=dict)  # code: sentence
    unchecked: dict[str, str] = field(
        default_factory=dict
    )  # code: why it could not run, although it should have
    limits: dict[str, float] = field(
        default_factory=dict
    )  # validity.* as asked: what the checks judged by
    not_applicable: dict[str, str] = field(
        default_factory=dict
    )  # code: why such a cell has nothing to check

    @property
    def said(self) -> str:
        """Return the verdict as people read it: it tells how many checks could not run."""
        return (
            f"{self.verdict}, {len(self.unchecked)} unchecked" if self.unchecked else self.verdict
        )

    @property
    def against(self) -> dict[str, str]:
        """Return the codes that speak against the numbers, with their sentences."""
        return {code: sentence for code, sentence in self.codes.items() if code not in FINDINGS}


@dataclass(frozen=True)
class Record:
    """One attempt at one cell."""

    record_id: str  # unique for every attempt, 32 hexadecimal digits
    cell_key: str  # hash of what was asked; equal for every attempt at a cell
    name: str  # for people
    cell: Cell  # what was asked
    study: str
    sweep_id: str
    overrides: list[str]  # the command line as typed, credentials removed
    state: str  # STATES
    started_at: float  # seconds since 1970
    ended_at: float
    failure: Failure | None = None
    validity: Validity = field(default_factory=Validity)
    environment: dict[str, Any] = field(
        default_factory=dict
    )  # versions, hardware, variables, git commit
    model: dict[str, float] = field(default_factory=dict)  # parameters, gradient_bytes, arrays
    # name: value; METHOD.md defines each. scaling/efficiency is against the baselines of that time, in checks.baselines
    metrics: dict[str, float] = field(default_factory=dict)
    # The 95 % interval of a metric inside this run, {metric: {low, high, and how it was found}}: it says nothing of the next run.
    within_run: dict[str, dict[str, float]] = field(default_factory=dict)
    series: dict[str, list[list[float]]] = field(
        default_factory=dict
    )  # name: [[step, value], …], one per window
    # matrices and rows, in the JSON shapes of `python -m analysis`
    tables: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Any] = field(
        default_factory=dict
    )  # what was really used: settings, transport, link_class, …
    checks: dict[str, Any] = field(
        default_factory=dict
    )  # facts that analysis.validity.checks judges
    ranks: list[dict[str, Any]] = field(
        default_factory=list
    )  # rank, host, pid, device of each that reported
    # SHA-256 of each raw file, unpacked, by its path in the cell's folder: `python -m analysis verify` compares them
    raw_sha256: dict[str, str] = field(default_factory=dict)
    # Of predict=auto, written before the ranks started: what the cell should give, or why that cannot be said
    # (analysis.prediction.upcoming)
    predicted: dict[str, Any] = field(default_factory=dict)
    drift: bool = False  # the first cell of a repeated list, measured once more at the end
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError where a word is not one of the accepted."""
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r}: accepted are {', '.join(STATES)}")
        if self.validity.verdict not in VERDICTS:
            raise ValueError(
                f"verdict={self.validity.verdict!r}: accepted are {', '.join(VERDICTS)}"
            )

    @property
    def marks(self) -> list[str]:
        """Which of several measurements of the same cell it is, for people; empty for the first."""
        return self.cell.marks(self.drift)

    @property
    def usable(self) -> bool:
        """Whether its numbers may enter a baseline or a plot unmarked."""
        return self.state == "finished" and self.validity.verdict != "invalid"
