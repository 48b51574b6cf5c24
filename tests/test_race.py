"""Races of simulated candidates, whose truth is known: is the answer right, and how soon is it
there?"""

import math
import random
import statistics

import pytest

from analysis.study.noise_floor import Scatter
from analysis.study.race import (
    ABOVE,
    BELOW,
    EQUAL,
    ERROR,
    FAILED,
    FASTER,
    LEADS,
    OPEN,
    SLOWER,
    TIED,
    UNTRIED,
    Arm,
    Race,
)
from analysis.study.race import MOST_RUNS as LIMIT
from conf.question import DIFFERS, FASTEST, GAINS, PER_GPU, SCALES, Question

# Scatter between runs of equal cells, and drift in a sweep, of tests/data/h200_x2 and h200_x4.
FLOORS = (0.0015, 0.0006, 0.0025, 0.0014, 0.0013, 0.0011, 0.0002, 0.0018, 0.0004, 0.0023, 0.00016)
DRIFTS = (0.0, 0.0013, 0.0019, 0.0038)
MOST_RUNS = 150


class Simulated:
    """Candidates with known logarithmic rates, floors and a drift; and the race between them."""

    def __init__(
        self, question, truth, floors, draw, *, freedom=4, factor=1.0, drift=0.0, sizes=()
    ):
        self.question, self.truth, self.draw = question, list(truth), draw
        self.floors, self.factor, self.drift = floors, factor, drift
        candidates = []
        for index, floor in enumerate(floors):
            squares = sum(draw.gauss(0, floor) ** 2 for _ in range(freedom))
            earlier = Scatter(freedom + 1, freedom, squares) if freedom else Scatter()
            candidates.append(Arm(str(index), sizes[index] if sizes else 1, earlier))
        self.race, self.runs = Race(question, candidates), 0

    def rate(self, index, runs):
        scatter = self.draw.gauss(0, self.floors[index] * self.factor)
        share = self.race.candidates[index].size if self.question.rate == PER_GPU else 1
        return self.truth[index] + scatter + self.drift * runs - math.log(share)

    def run(self, planted=lambda simulated, index: None):
        """Race to the end; return the last look."""
        turn = self.race.first_turn()
        while turn and self.runs < MOST_RUNS:
            for index in turn:
                candidate = self.race.candidates[index]
                planted(self, index)
                if not candidate.failure:
                    candidate.rates.append(self.rate(index, self.runs))
                    candidate.errors.append(self.floors[index] * self.factor / 3)
                self.runs += 1
            turn = self.race.look().turn
        return self.race.looks[-1]

    def wrong(self):
        """Whether any look said what is not true."""
        margin = self.question.log_margin
        for look in self.race.looks:
            for index, standing in enumerate(look.standings):
                difference = self.truth[index] - self.truth[look.reference]
                lies = {
                    SLOWER: difference > 0,
                    FASTER: difference < 0,
                    TIED: difference > margin,
                    EQUAL: abs(difference) > margin,
                }
                if lies.get(standing.state):
                    return True
        return False


def simulated(seed, kind=FASTEST, **changes):
    draw = random.Random(seed)
    number = draw.randint(2, 12)
    truth = [-draw.uniform(0, 0.05) for _ in range(number)]
    floors = [draw.choice(FLOORS) for _ in range(number)]
    drift = draw.choice(DRIFTS) / (5 * number) * draw.choice((-1, 1))
    options = {"freedom": draw.choice((0, 2, 3, 4, 6, 9)), "drift": drift} | changes
    return Simulated(Question(kind, 0.01), truth, floors, draw, **options)


def grid_winner(race):
    """The fastest of five repeats of every candidate."""
    means, number = [], len(race.truth)
    for index in range(number):
        means.append(statistics.fmean(race.rate(index, turn * number) for turn in range(5)))
    return means.index(max(means))


@pytest.mark.parametrize("races", [60, pytest.param(2000, marks=pytest.mark.campaign)])
def test_the_answer_is_that_of_the_grid_for_a_third_of_its_runs(races):
    wrong, same, shares = 0, 0, []
    for seed in range(races):
        race = simulated(seed)
        look = race.run()
        assert OPEN not in [standing.state for standing in look.standings], seed
        wrong += race.wrong()
        same += look.standings[grid_winner(race)].state in (LEADS, TIED)
        shares.append(race.runs / 5 / len(race.truth))
    assert wrong <= ERROR * races and same >= 0.95 * races
    assert statistics.median(shares) <= 0.3


@pytest.mark.parametrize("races", [20, pytest.param(300, marks=pytest.mark.campaign)])
def test_noise_ten_times_the_floor_leaves_the_answer_true_or_open(races):
    wrong = sum(_ran(simulated(seed, freedom=4, factor=10.0)).wrong() for seed in range(races))
    assert wrong <= ERROR * races + 1


def _ran(race):
    race.run()
    return race


@pytest.mark.parametrize("races", [20, pytest.param(300, marks=pytest.mark.campaign)])
def test_candidates_differ_from_the_first_as_they_are_said_to(races):
    wrong = sum(_ran(simulated(seed, DIFFERS)).wrong() for seed in range(races))
    assert wrong <= ERROR * races


def test_equal_candidates_are_tied_and_the_margin_decides_how_soon():
    draw, runs = random.Random(1), []
    for margin in (0.02, 0.0015):
        question = Question(FASTEST, margin)
        race = Simulated(question, [0.0, 0.0, -0.2], [0.001] * 3, draw)
        look = race.run()
        assert sorted(standing.state for standing in look.standings) == [LEADS, SLOWER, TIED]
        runs.append(race.runs)
    assert runs[0] == 5 < runs[1]


def test_one_that_becomes_slower_half_way_is_not_called_fastest_by_its_first_runs():
    def planted(race, index):
        if index == 0 and race.runs >= 4:
            race.truth[0] = -0.1

    race = Simulated(
        Question(FASTEST, 0.01), [0.02, 0.0, -0.03, -0.04], [0.001] * 4, random.Random(2)
    )
    look = race.run(planted)
    assert look.reference != 0 or OPEN in [standing.state for standing in look.standings]


def test_a_candidate_that_no_number_of_runs_decides_does_not_end_the_race():
    """Two CPU workers: one that scattered by 14 % had 20 runs, its five rivals two or three."""
    truth, floors = [0.0, -0.0005, -0.2], [0.001, 0.001, 0.6]
    race = Simulated(Question(FASTEST, 0.002), truth, floors, random.Random(3), freedom=0)
    race.race.candidates[2].suspect = True
    look = race.run()
    assert [len(arm.rates) for arm in race.race.candidates][2] == LIMIT
    assert [standing.state for standing in look.standings] == [LEADS, TIED, OPEN]
    assert look.turn == ()


def test_a_suspect_candidate_leaves_the_others_intervals_as_they_are():
    question, truth, widths = Question(FASTEST, 0.01), [0.0, -0.03, -0.4], []
    for suspect in (False, True):
        race = Simulated(question, truth, [0.001, 0.001, 0.1], random.Random(7), freedom=0)
        for candidate in race.race.candidates:
            candidate.rates = [race.rate(int(candidate.name), 0) for _ in range(3)]
            candidate.errors = [0.0] * 3
        race.race.candidates[2].suspect = suspect
        standing = race.race.look().standings[1]
        widths.append(standing.high - standing.low)
    assert widths[0] > 20 * widths[1]


def test_more_runs_narrow_an_interval_by_their_number_and_by_what_they_tell_of_the_scatter():
    race = Simulated(
        Question(FASTEST, 0.01), [0.0, -0.03], [0.001] * 2, random.Random(8), freedom=0
    )
    for index, candidate in enumerate(race.race.candidates):
        candidate.rates = [race.rate(index, 0) for _ in range(2)]
        candidate.errors = [0.0] * 2
    race.race.look()
    assert race.race.narrowed(1, 0) == 1.0
    assert race.race.narrowed(1, 4) < 0.5 < math.sqrt(2 / 4)


def test_one_that_fails_is_out_and_the_others_go_on():
    def planted(race, index):
        if index == 1:
            race.race.candidates[1].failure = "oom"

    truth = [0.0, 0.3, -0.1]
    race = Simulated(Question(FASTEST, 0.01), truth, [0.001] * 3, random.Random(3))
    look = race.run(planted)
    assert [standing.state for standing in look.standings] == [LEADS, FAILED, SLOWER]


def test_nobody_is_left():
    def planted(race, index):
        race.race.candidates[index].failure = "hang"

    race = Simulated(Question(FASTEST, 0.01), [0.0, 0.0], [0.001] * 2, random.Random(3))
    assert [standing.state for standing in race.run(planted).standings] == [FAILED] * 2


@pytest.mark.parametrize(
    ("efficiencies", "above"),
    [([0.98, 0.95, 0.93], 8), ([0.97, 0.91, 0.8], 4), ([0.7, 0.6, 0.5], 1), ([0.97, 0.8, 0.7], 2)],
)
def test_the_number_of_gpus_up_to_which_it_scales_is_found(efficiencies, above):
    sizes = (1, 2, 4, 8)
    truth = [0.0]
    for size, efficiency in zip(sizes[1:], efficiencies, strict=True):
        truth.append(math.log(size * efficiency))
    question = Question(SCALES, 0.005, efficiency=0.9)
    race = Simulated(question, truth, [0.001] * 4, random.Random(4), sizes=sizes)
    look = race.run()
    states = [standing.state for standing in look.standings]
    assert max(size for size, state in zip(sizes, states, strict=True) if state == ABOVE) == above
    assert OPEN not in states and (above == 8 or BELOW in states)
    assert race.runs <= 8


def test_the_rate_of_one_gpu_counts_where_it_was_asked():
    truth, sizes = [0.0, math.log(1.9)], (1, 2)
    for rate, winner in ((PER_GPU, 0), ("total", 1)):
        question = Question(FASTEST, 0.01, rate=rate)
        race = Simulated(question, truth, [0.001] * 2, random.Random(5), sizes=sizes)
        assert race.run().reference == winner


def test_a_confirmation_is_judged_after_its_first_turn_however_long_the_search_was():
    race = Race(Question(GAINS, 0.01), [Arm("0"), Arm("1")])
    noise = [0.001 * (-1) ** run for run in range(12)]
    for arm, mean in zip(race.candidates, (0.0, -0.0001), strict=True):
        arm.rates = [mean + each for each in noise]
        arm.errors = [0.0] * len(noise)
    assert race.look().reference == 0
    for _ in range(2):
        race.candidates[1].rates += [0.01, 0.012]
        race.candidates[1].errors += [0.0, 0.0]
    assert race.look().turn == (0, 1, 1, 0) == race.first_turn()
    for arm in race.candidates:
        arm.rates, arm.errors = [0.0, 0.001], [0.0, 0.0]
    assert race.look() is race.looks[-1] and race.looks[-1].reference == 0
    assert [look.runs for look in race.looks] == [24, 28, 32]


def gain_of(race):
    """The true gain of what is recommended, as a logarithm; None: nothing is."""
    look = race.run()
    faster = [index for index, each in enumerate(look.standings) if each.state == FASTER]
    return race.truth[faster[0]] - race.truth[0] if faster else None


@pytest.mark.parametrize("races", [60, pytest.param(2000, marks=pytest.mark.campaign)])
def test_what_is_recommended_is_faster_than_the_first_by_more_than_the_margin(races):
    gains = list(filter(None, (gain_of(simulated(seed, GAINS)) for seed in range(races))))
    assert len(gains) >= races / 3
    assert sum(gain <= math.log1p(0.01) for gain in gains) <= ERROR * races


@pytest.mark.parametrize("races", [40, pytest.param(2000, marks=pytest.mark.campaign)])
def test_nothing_is_recommended_where_nothing_is_to_gain(races):
    """The first is the fastest, or nobody is faster by more than the margin: the lucky one of the
    search is not recommended."""
    wrong = 0
    for seed in range(races):
        race = simulated(seed, GAINS, factor=5.0)
        best = max(race.truth) if seed % 2 else race.truth[0] + 0.005
        race.truth = [best, *(min(each, best + 0.005) for each in race.truth[1:])]
        wrong += gain_of(race) is not None
    assert wrong <= ERROR * races


def test_a_winner_that_new_runs_contradict_is_not_recommended():
    def planted(race, index):
        if race.race.confirmed:
            race.truth[1] = 0.0

    race = Simulated(Question(GAINS, 0.01), [0.0, 0.1, -0.2], [0.001] * 3, random.Random(6))
    look = race.run(planted)
    assert [standing.state for standing in look.standings] == [EQUAL, EQUAL, UNTRIED]
    assert race.race.confirmed == (0, 1) and look.runs == race.runs
