"""The question of a sweep (ask=), as it is typed and as it is measured."""

import math
import re
from dataclasses import dataclass
from typing import Any

from conf.options import Refused

FASTEST, DIFFERS, SCALES, GAINS = "fastest", "differs", "scales", "gains"
QUESTIONS = (FASTEST, DIFFERS, SCALES, GAINS)
PER_GPU = "per_gpu"
RATES = (PER_GPU, "total")
PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%")
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
ONLY_ASKED = ("margin", "budget", "efficiency", "rate")
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")


@dataclass(frozen=True)
class Question:
    """What a sweep is to answer."""

    kind: str
    margin: float  # share: candidates that differ by less may be called equal
    budget_s: float | None = None
    rate: str | None = None  # which counts where candidates differ in their number of GPUs
    efficiency: float = 0.9  # share: the limit of ask=scales

    @property
    def log_margin(self) -> float:
        """The margin as a difference of logarithms."""
        return math.log1p(self.margin)

    def __post_init__(self) -> None:
        """Raise ValueError where a journal holds no question."""
        if self.kind not in QUESTIONS or not (0 < self.margin < 1 and 0 < self.efficiency < 1):
            raise ValueError(f"{self} is not a question")


def asked_question(config: Any) -> Question | None:
    """Return the question of a configuration; None where nothing is asked.

    Raises:
        Refused: a margin, a budget or an efficiency that is none.
    """
    if config.ask is None:
        for name in ONLY_ASKED:
            value = getattr(config, name)
            if value != getattr(type(config), name):
                raise Refused(f"{name}={value}: works only with ask=, a question")
        return None
    shares = {}
    for name in ("margin", "efficiency"):
        text = getattr(config, name)
        share = PERCENT.fullmatch(text)
        shares[name] = float(share[1]) / 100 if share else 0.0
        if not 0 < shares[name] < 1:
            hint = f"{text}%" if re.fullmatch("[1-9][0-9]?", text) else "1%"
            raise Refused(f"{name}={text}: expected a share above 0% and below 100%, as in {hint}")
    budget_s = None
    if config.budget is not None:
        time = DURATION.fullmatch(config.budget)
        budget_s = float(time[1]) * SECONDS[time[2]] if time else 0.0
        if not budget_s:
            raise Refused(f"budget={config.budget}: expected a time, as in 90s, 10min or 1h")
    return Question(config.ask, shares["margin"], budget_s, config.rate, shares["efficiency"])
