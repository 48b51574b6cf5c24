"""Runs of candidates until a question is answered (launch.py ask=), and what they answer.

Every candidate runs once; then the turn goes to the candidates between which the answer is open.
All is judged again after LOOKS_APART more runs, after a failure, and where no more may run. As it
may stop at any look, the error is spent over them: number k is judged at ERROR / (k (k + 1)),
shared by its comparisons, which is ERROR in sum (a union bound, as for Lan and DeMets 1983). Who
runs next depends on what was seen, so Student's t is not exact: tests/test_race.py has 2,000 races.

A difference of logarithms lies in an interval by Student's t. Its variance comes from the repeated
runs of this race and from what earlier runs of equal cells showed, until runs of this race
contradict them; it is never below what the candidate's own runs show: inside them until there are
three, then between them. A candidate with suspect runs lends the others no scatter once they
have two repeated runs, and its own counts from two runs on. Before two repeated runs nothing is
answered.

An answer is wrong only if the truth lies beyond one end of an interval, and which end that is
depends on the truth. So each end has the whole error. ask=differs shares it between both, as equal
candidates lie beyond either where they are called faster or slower. In ask=fastest the error is
that of the answer: which is fastest, and who ties.

ask=gains searches until a look may answer. If not the first candidate leads then, new runs confirm
the leader against it, in turns A B B A. Search and confirmation have half of the error each.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from analysis.study.intervals import quantile
from analysis.study.noise_floor import Scatter
from conf.question import DIFFERS, FASTEST, GAINS, SCALES, Question

ERROR = 0.05  # the most probable share of wrong answers
CONTRADICTED = 0.99  # level above which the runs of a race scatter more than earlier ones
MOST_FREEDOM = 6  # degrees of freedom that earlier runs count for
FEWEST_REPEATS = 2  # second and further runs before there is an answer
OWN_RUNS = 3  # of a candidate, for a scatter of its own
MOST_RUNS = 20  # of a candidate, and as many new ones in a confirmation
LOOKS_APART = 0.15  # more runs from look to look, as a share: each look spends error
OPEN, LEADS, TIED, SLOWER, FASTER, EQUAL = "open", "leads", "tied", "slower", "faster", "equal"
ABOVE, BELOW, FAILED, UNTRIED = "above", "below", "failed", "not tried"


@dataclass
class Arm:
    """One candidate and its runs; rates are logarithms."""

    name: str
    size: int = 1  # number of GPUs
    earlier: Scatter = field(default_factory=Scatter)  # of equal cells, in other sweeps
    rates: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # standard error inside each run
    suspect: bool = False  # one of its runs is
    failure: str = ""
    failed_repeats: int = 0

    @property
    def mean(self) -> float:
        """The mean of its logarithmic rates."""
        return statistics.fmean(self.rates)

    @property
    def scatter(self) -> Scatter:
        """How its own runs scatter."""
        if len(self.rates) < 2:
            return Scatter(len(self.rates))
        squares = math.fsum((rate - self.mean) ** 2 for rate in self.rates)
        return Scatter(len(self.rates), len(self.rates) - 1, squares)


@dataclass(frozen=True)
class Standing:
    """How a candidate stands after a turn: its difference to the reference, a share."""

    state: str
    difference: float = math.nan
    low: float = -math.inf
    high: float = math.inf

    @property
    def logs(self) -> tuple[float, float]:
        """The ends as logarithms."""
        low = math.log1p(self.low) if self.low > -1 else -math.inf
        return low, math.log1p(self.high)


@dataclass(frozen=True)
class Look:
    """What the runs so far say."""

    runs: int
    reference: int  # the candidate that the others are compared with
    standings: tuple[Standing, ...]
    turn: tuple[int, ...]  # the candidates that run next; empty: answered, or nothing can answer


class Race:
    """The candidates of a question, and every look at them."""

    def __init__(
        self, question: Question, candidates: Sequence[Arm], confirmed: Sequence[int] = ()
    ) -> None:
        """The order of the candidates is that of their first runs. `confirmed` are those of a
        confirmation without a search, the first among them."""
        self.question, self.candidates = question, list(candidates)
        self.confirmed = tuple(confirmed)
        self.looks: list[Look] = []
        self._turns = 0
        self._looks = 0  # that could answer
        self._looked_at = 0  # runs at the last of them
        self._failed = 0  # candidates
        self._is_due = True
        self._searched = 0  # runs of the search, of those that are confirmed
        # Of both ends; ask=gains spends half on the search and half on the confirmation.
        self._error = ERROR if question.kind in (DIFFERS, GAINS) else 2 * ERROR
        order = range(len(self.candidates))
        self._sizes = sorted(order, key=lambda index: self.candidates[index].size)

    def first_turn(self) -> tuple[int, ...]:
        """Return the candidates that run before anything is judged."""
        if self.confirmed:
            return (*self.confirmed, *reversed(self.confirmed))
        if self.question.kind != SCALES:
            return tuple(range(len(self.candidates)))
        return self._sizes[0], self._sizes[-1]

    def look(self) -> Look:
        """Judge what the runs so far say if a look is due, and choose who runs next."""
        failed = sum(bool(candidate.failure) for candidate in self.candidates)
        enough = self._looked_at * (1 + LOOKS_APART)
        self._is_due = failed > self._failed or self._runs() >= enough
        self._failed = failed
        self._turns += 1
        look = self._judge()
        if not self._is_due:
            if look.turn:
                return replace(self.looks[-1], turn=look.turn)
            self._is_due = True
            look = self._judge()
        self.looks.append(look)
        return look

    def _judge(self) -> Look:
        every = enumerate(self.candidates)
        alive = [index for index, each in every if each.rates and not each.failure]
        if not alive:
            return Look(0, 0, (Standing(FAILED),) * len(self.candidates), ())
        judge = {FASTEST: self._fastest, SCALES: self._scales, GAINS: self._gains}
        counts, runs = self._may_answer, self._runs()
        look = judge.get(self.question.kind, self._differs)(alive)
        if counts and self._runs() == runs:  # else a confirmation begins
            self._looks += 1
            self._looked_at = runs
        return look

    def _runs(self) -> int:
        members = self.confirmed or range(len(self.candidates))
        return sum(len(self.candidates[index].rates) for index in members)

    # --- intervals

    @property
    def _may_answer(self) -> bool:
        return self._is_due and self._own().freedom >= FEWEST_REPEATS

    def _quantile(self, comparisons: int, freedom: int) -> float:
        number = self._looks + 1
        level = self._error / (number * (number + 1)) / max(1, comparisons)
        return quantile(freedom, 1 - level)

    def _own(self) -> Scatter:
        trusted = every = Scatter()
        for candidate in self.candidates:
            every += candidate.scatter
            if not candidate.suspect:
                trusted += candidate.scatter
        return trusted if trusted.freedom >= FEWEST_REPEATS else every

    def _variance(self, candidate: Arm) -> tuple[float, int]:
        """Return the variance of one run, and its degrees of freedom; 0: nothing is known."""
        own, earlier = self._own(), candidate.earlier
        if own.freedom and earlier.freedom and earlier.squares:
            from scipy.special import fdtr

            ratio = own.squares / own.freedom / (earlier.squares / earlier.freedom)
            if fdtr(own.freedom, earlier.freedom, ratio) > CONTRADICTED:
                earlier = Scatter()
        known = min(earlier.freedom, MOST_FREEDOM)
        freedom = own.freedom + known
        if not freedom:
            return 0.0, 0
        squares = own.squares
        if known:
            squares += earlier.squares / earlier.freedom * known
        if not squares:  # runs equal to the last digit say nothing
            return 0.0, 0
        variance = squares / freedom
        if len(candidate.rates) >= (2 if candidate.suspect else OWN_RUNS):
            least = candidate.scatter.squares / candidate.scatter.freedom
        else:
            least = statistics.fmean(error**2 for error in candidate.errors)
        return max(variance, least), freedom

    def narrowed(self, index: int, more: int) -> float:
        """Return how wide a candidate's interval is after more runs, half of them its own and half
        the reference's, as a share of what it is."""
        candidate, rivals = self.candidates[index], len(self.candidates) - 1
        freedom = self._variance(candidate)[1]
        quantiles = self._quantile(rivals, freedom + more) / self._quantile(rivals, freedom)
        runs = len(candidate.rates)
        return quantiles * math.sqrt(runs / (runs + more / 2))

    def _standing(
        self, index: int, reference: int, comparisons: int, shift: float = 0.0
    ) -> Standing:
        one, other = self.candidates[index], self.candidates[reference]
        difference = one.mean - other.mean - shift
        (first, freedom), (second, _) = self._variance(one), self._variance(other)
        if not freedom:
            return Standing(OPEN, math.expm1(difference))
        error = math.sqrt(first / len(one.rates) + second / len(other.rates))
        half = min(self._quantile(comparisons, freedom) * error, 100.0)
        ends = math.expm1(difference - half), math.expm1(difference + half)
        return Standing(OPEN, math.expm1(difference), *ends)

    def _undecided(self, reference: int, standings: dict[int, Standing]) -> list[int]:
        """Return who may run again beside the reference: those that are open; without any, all
        until a look may answer."""
        every = []
        for index in standings:
            if index != reference and len(self.candidates[index].rates) < MOST_RUNS:
                every.append(index)
        is_open = [index for index in every if standings[index].state == OPEN]
        return is_open if is_open or self._may_answer else every

    def _pair(self, reference: int, index: int) -> tuple[int, ...]:
        """Return both in turn, each first every other time; of two with unequal runs the rarer."""
        runs = [len(self.candidates[each].rates) for each in (reference, index)]
        if runs[0] > runs[1]:
            return (index,)
        if runs[1] > runs[0]:
            return (reference,)
        if self._turns % 2:
            return reference, index
        return index, reference

    def _look(
        self, reference: int, standings: dict[int, Standing], turn: tuple[int, ...] = ()
    ) -> Look:
        runs = self._searched + sum(len(candidate.rates) for candidate in self.candidates)
        every = []
        for index, candidate in enumerate(self.candidates):
            left_out = self.confirmed or (self.question.kind == SCALES and not turn)
            standing = standings.get(index, Standing(UNTRIED if left_out else OPEN))
            if candidate.failure:
                standing = Standing(FAILED)
            elif index in standings and index != reference and not self._may_answer:
                standing = replace(standing, state=OPEN)
            every.append(standing)
        return Look(runs, reference, tuple(every), turn)

    # --- questions

    def _fastest(self, alive: Sequence[int]) -> Look:
        leader = max(alive, key=lambda index: self.candidates[index].mean)
        rivals = [index for index in alive if index != leader]
        standings = {leader: Standing(LEADS, 0.0, 0.0, 0.0)}
        for index in rivals:
            standing = self._standing(index, leader, len(rivals))
            state = OPEN
            if standing.high < 0:
                state = SLOWER
            elif standing.high <= self.question.margin:
                state = TIED
            standings[index] = replace(standing, state=state)
        undecided = self._undecided(leader, standings)
        if not undecided:
            return self._look(leader, standings)
        nearest = max(
            undecided, key=lambda index: (standings[index].high, self.candidates[index].mean)
        )
        return self._look(leader, standings, self._pair(leader, nearest))

    def _gains(self, alive: Sequence[int]) -> Look:
        """Search, then confirm: runs of the search say there how both scatter, and nothing else."""
        if 0 not in alive:
            return self._look(0, {})
        if self.confirmed:
            return self._differs([index for index in self.confirmed if index in alive])
        look = self._fastest(alive)
        if look.reference == 0 or not self._may_answer:
            return look
        self.confirmed = (0, look.reference)
        for index in self.confirmed:
            arm = self.candidates[index]
            self._searched += len(arm.rates)
            scatter = arm.earlier + arm.scatter
            self.candidates[index] = replace(arm, earlier=scatter, rates=[], errors=[])
        self._looks = self._looked_at = 0
        return replace(look, turn=self.first_turn())

    def _differs(self, alive: Sequence[int]) -> Look:
        reference = alive[0]
        standings, widths = {reference: Standing(EQUAL, 0.0, 0.0, 0.0)}, {}
        margin = self.question.log_margin
        for index in alive[1:]:
            standing = self._standing(index, reference, len(alive) - 1)
            low, high = standing.logs
            state = OPEN
            if self.question.kind == GAINS:
                if low > margin:
                    state = FASTER
                elif high <= margin:
                    state = EQUAL
            elif -margin <= low and high <= margin:
                state = EQUAL
            elif low > 0:
                state = FASTER
            elif high < 0:
                state = SLOWER
            standings[index] = replace(standing, state=state)
            widths[index] = high - low
        undecided = self._undecided(reference, standings)
        if not undecided:
            return self._look(reference, standings)
        widest = max(undecided, key=widths.__getitem__)
        return self._look(reference, standings, self._pair(reference, widest))

    def _scales(self, alive: Sequence[int]) -> Look:
        by_size = [index for index in self._sizes if index in alive]
        reference, standings = by_size[0], {}
        limit = math.log(self.question.efficiency)
        standings[reference] = Standing(ABOVE, 0.0, 0.0, 0.0)
        for index in by_size[1:]:
            shift = math.log(self.candidates[index].size / self.candidates[reference].size)
            standing = self._standing(index, reference, len(self._sizes) - 1, shift)
            low, high = standing.logs
            state = OPEN
            if low > limit - self.question.log_margin:
                state = ABOVE
            elif high < limit:
                state = BELOW
            standings[index] = replace(standing, state=state)
        undecided = self._undecided(reference, standings)
        if undecided:
            return self._look(reference, standings, self._pair(reference, undecided[0]))
        return self._look(reference, standings, self._between(standings))

    def _between(self, standings: dict[int, Standing]) -> tuple[int, ...]:
        """Return the middle one of the sizes between the last above the limit and the next below:
        efficiency is taken to fall with the number of GPUs."""
        sizes = self._sizes
        above, below = 0, len(sizes)
        for place, index in enumerate(sizes):
            state = standings[index].state if index in standings else OPEN
            if state == ABOVE:
                above = place
            elif state == BELOW:
                below = min(below, place)
        unknown = []
        for index in sizes[above + 1 : below]:
            if index not in standings and not self.candidates[index].failure:
                unknown.append(index)
        return (unknown[len(unknown) // 2],) if unknown else ()
