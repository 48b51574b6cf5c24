"""Name the rank that the others wait for: where in its step, of which kind, and what it costs.

Ranks that train alike spend equal times in equal parts of a step, which needs no common clock. In
a part the thread ran, waited for a core, or slept. On GPUs the rank that comes last to a collective
spends the shortest time in it. More than the others' is judged by its noise.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.text import count
from benchmarks.derived import Line, RankLines, of_kind
from benchmarks.timing.statistics import two_sided_quantile

WARMUP_STEPS = 8  # in the seventh, a rank is slow since its fast paths are watched
FEWEST_STEPS = 16
BLOCKS = 8  # of consecutive steps; their means are taken for independent
TESTS = 3  # of each rank: it runs, sleeps, or waits for its core for longer
WRONG_NAMES = 0.002  # of clean runs, as far as blocks are independent
LEAST_SHARE, LEAST_WAITED = 0.05, 0.2  # of a step; less is not named. Waits for a core vary more
LATE_SHARE = 0.02  # of a step, on GPUs; two clean H200s waited 0.2 % for each other
EXPOSED_SHARE = 0.3  # of a step in which all ranks wait for data; less is usual
# On a slow link data is on its way for so many times as long as between ranks of one host. Where
# four clean ranks shared two cores it was 1.2 to 1.5 times, behind 100 Mbit/s more than three.
SLOW_LINK = 2.0
CONCENTRATED = 0.45  # share of a delay that lies elsewhere than the ranks' time does
FOREIGN_LOAD, LINK, GPU = "foreign load", "link", "late GPU"
OWN = ("loader", "before", "forward", "backward", "optimizer")
WAIT = "wait"  # for the last buckets, once all gradients are there
RAN, WAITED, SLEPT = range(3)
Parts = dict[str, list[float]]  # ms that a part ran, waited, slept; `backward:2`: of bucket 2
Durations = list[tuple[str, dict[int, float]]]  # a step's collectives: operation, ms by rank
Steps = list[dict[int, Parts]]  # of each step that all ranks have: its parts by rank


@dataclass(frozen=True)
class Delay:
    """What makes the others wait in every step."""

    rank: int
    kind: str  # loader, compute, sleep, clock, foreign load, link, late GPU
    part: str  # one of OWN where most of it lies, a collective, or the addresses of a link
    bucket: int | None
    peer: int | None  # the rank at the other end of a link
    ms: float
    samples_per_s: float  # what the job loses by it, at most


@dataclass(frozen=True)
class Diagnosis:
    """What the steps of all ranks say."""

    ranks: int
    steps: int  # that all ranks have
    step_ms: float = math.nan
    spread_ms: tuple[float, float] = (math.nan, math.nan)  # nine of ten steps lie between
    samples_per_s: float = math.nan
    delays: tuple[Delay, ...] = ()
    least_ms: dict[str, float] = field(default_factory=dict)  # by kind; it would have been named
    layers: tuple[tuple[str, ...], ...] = ()  # of each bucket
    unjudged: str = ""  # why no rank is judged


def diagnosis(lines: RankLines) -> Diagnosis:
    """Return which ranks are slow by the `moments` lines of all ranks; samples by their `steps`."""
    common = _common_steps(lines)
    if not common:
        return Diagnosis(len(lines), 0, unjudged="no step of all ranks was seen")
    walls_ms = []
    for step in common:
        walls_ms.append(max(line["moments"][-1][1] for line in step.values()))
    walls_ms.sort()
    step_ms = statistics.fmean(walls_ms)
    counted: list[int] = []
    for line in of_kind(itertools.chain(*lines.values()), "steps"):
        counted += line["samples"]
    rate = len(lines) * statistics.fmean(counted or [math.nan]) / step_ms * 1e3
    cut = len(walls_ms) // 20
    facts = (len(lines), len(common), step_ms, (walls_ms[cut], walls_ms[-1 - cut]), rate)
    of_layers = of_kind(itertools.chain(*lines.values()), "layers")
    layers = tuple(map(tuple, next((line["buckets"] for line in of_layers), ())))
    ranks = count(len(lines), "rank")
    gpus = {}
    for rank, own in lines.items():
        for line in of_kind(own, "script_device", has="uuid"):
            gpus[rank] = line["uuid"]
    if gpus:
        if len(set(gpus.values())) < len(gpus):
            return Diagnosis(*facts, unjudged="ranks share a GPU")
        timed = list(filter(None, map(_durations_of, common)))
        if len(lines) < 2 or len(timed) < FEWEST_STEPS:
            needed = (
                f"it needs {FEWEST_STEPS} steps of two ranks or more, whose collectives are timed"
            )
            seen = f"and of one group; there are {count(len(timed), 'step')} of {ranks}"
            return Diagnosis(*facts, unjudged=f"{needed} {seen}")
        return Diagnosis(*facts, *_late_ranks(timed, step_ms, rate, len(layers)), layers)
    steps: Steps = []
    for step in common:
        parts = {rank: _parts_of(line) for rank, line in step.items()}
        # The recorder has not forgotten its collectives, and the buckets were known.
        is_whole = all(line["collectives"] for line in step.values())
        if is_whole and all(WAIT in own for own in parts.values()):
            steps.append(parts)
    if len(lines) < 2 or len(steps) < FEWEST_STEPS:
        needed = f"it needs {FEWEST_STEPS} steps of DDP, of two ranks or more"
        seen = f"there are {count(len(steps), 'step')} of {ranks}"
        return Diagnosis(*facts, unjudged=f"{needed}; {seen}")
    delays, least_ms = _slow_ranks(steps, step_ms, rate)
    exposed = []
    for parts in steps:
        exposed.append(min(own[WAIT][SLEPT] for own in parts.values()))
    exposed_ms = _trimmed_mean(exposed)
    links = _slow_link(lines, exposed_ms, rate * exposed_ms / (step_ms - exposed_ms))
    if links:
        least_ms[LINK] = EXPOSED_SHARE * step_ms
    if exposed_ms > EXPOSED_SHARE * step_ms:
        delays += links
    delays.sort(key=lambda delay: -delay.ms)
    return Diagnosis(*facts, tuple(delays), least_ms, layers)


def _durations_of(step: Mapping[int, Line]) -> Durations:
    """Return the collectives that all ranks timed, in their order; none of several groups: those of
    a mesh have one name for unlike ranks, and who waits for a late rank is late in the others."""
    durations: dict[tuple[str, int, str], dict[int, float]] = {}
    for rank, line in step.items():
        for operation, group, number, _, duration_ms, _ in line["collectives"] or ():
            if duration_ms is not None:
                durations.setdefault((group, number, operation), {})[rank] = duration_ms
    if len({group for group, _, _ in durations}) > 1:
        return []
    ordered = sorted(durations.items())
    return [(key[-1], by_rank) for key, by_rank in ordered if len(by_rank) == len(step)]


def _late_ranks(
    steps: Sequence[Durations], step_ms: float, rate: float, buckets: int
) -> tuple[tuple[Delay, ...], dict[str, float]]:
    """Return for which ranks the others wait, by the largest wait of each step: a rank that is late
    once is so at all collectives after that."""
    delays = []
    least_ms = 0.0
    ranks = steps[0][0][1]
    # Of a step that is read as it ends the last ones have no times yet.
    calls = [Counter(operation for operation, _ in durations) for durations in steps]
    are_buckets = statistics.mode(of_step["all_reduce"] for of_step in calls) == buckets
    for rank in ranks:
        waits_ms, places = [], []
        for durations in steps:
            waits = []
            seen: Counter[str] = Counter()
            for operation, by_rank in durations:
                others_ms = [ms for other, ms in by_rank.items() if other != rank]
                wait_ms = statistics.median(others_ms) - by_rank[rank]
                waits.append((wait_ms, (operation, seen[operation])))
                seen[operation] += 1
            # Less than 0 where this rank waits: ranks that are late in turn have a mean of 0.
            wait_ms, place = max(waits, key=lambda wait: abs(wait[0]))
            waits_ms.append(wait_ms)
            places.append(place)
        ms, noise_ms = _estimate(waits_ms, len(ranks))
        limit_ms = max(noise_ms, LATE_SHARE * step_ms)
        least_ms = max(limit_ms, least_ms)
        if ms > limit_ms:
            operation, number = statistics.mode(places)
            bucket = number if operation == "all_reduce" and are_buckets else None
            loss = rate * ms / max(step_ms - ms, ms)
            delays.append(Delay(rank, GPU, operation, bucket, None, ms, loss))
    delays.sort(key=lambda delay: -delay.ms)
    return tuple(delays), {GPU: least_ms}


def _common_steps(lines: RankLines) -> list[dict[int, Line]]:
    by_step: dict[int, dict[int, Line]] = {}
    for rank, rank_lines in lines.items():
        for line in rank_lines:
            if line["kind"] == "moments" and line["step"] >= WARMUP_STEPS:
                by_step.setdefault(line["step"], {})[rank] = line
    return [by_step[step] for step in sorted(by_step) if len(by_step[step]) == len(lines)]


def _parts_of(line: Line) -> Parts:
    """Return the times of a step's parts, of `backward` also those of each bucket.

    Where a part has a collective outside of the backward, a rank sleeps in it for the others: no
    sleep of it is counted.
    """
    parts: Parts = {}
    collectives_ms = [collective[-1] for collective in line["collectives"] or ()]
    for before, after in itertools.pairwise(line["moments"]):
        name = _part_between(before[0], after[0])
        wall_ms, waited_ms, ran_ms = (after[index] - before[index] for index in (1, 2, 3))
        slept_ms = max(0.0, wall_ms - waited_ms - ran_ms)
        has_collective = any(before[1] <= ms < after[1] for ms in collectives_ms)
        if has_collective and not name.startswith(("backward", WAIT)):
            slept_ms = 0.0
        for key in {name, name.partition(":")[0]}:
            total = parts.setdefault(key, [0.0, 0.0, 0.0])
            for index, ms in enumerate((ran_ms, waited_ms, slept_ms)):
                total[index] += ms
    return parts


def _part_between(before: str, after: str) -> str:
    if before == "loader":
        return "loader"
    if after in ("loader", "forward"):
        return "before"
    if after.startswith("ready:"):
        return after.replace("ready", "backward")
    if before.startswith("ready:"):
        return WAIT
    if before == "backward":  # without buckets it holds the waiting for others
        return "whole backward"
    if before.startswith("forward"):
        return before
    return "optimizer"


def _slow_ranks(steps: Steps, step_ms: float, rate: float) -> tuple[list[Delay], dict[str, float]]:
    delays: list[Delay] = []
    least_ms: dict[str, float] = {}
    for rank in steps[0]:
        # Where ranks wait for cores, one that runs for longer waits for longer, too.
        waiting = _waited_share(steps, rank)
        of_rank = []
        for kind, weights, least_share in (
            ("compute", (1 + waiting, 0.0, 0.0), LEAST_SHARE),
            ("sleep", (0.0, 0.0, 1.0), LEAST_SHARE),
            (FOREIGN_LOAD, (-waiting, 1.0, 0.0), LEAST_WAITED),
        ):
            ms, noise_ms = _estimate(_excess_ms(steps, rank, weights), len(steps[0]) * TESTS)
            limit_ms = max(noise_ms, least_share * step_ms)
            least_ms[kind] = max(limit_ms, least_ms.get(kind, 0.0))
            if ms > limit_ms:
                place = _place_of(steps, rank, weights, kind)
                loss = rate * ms / max(step_ms - ms, ms)
                of_rank.append(Delay(rank, *place, None, ms, loss))
        delays += sorted(of_rank, key=lambda delay: delay.ms)[-1:]
    return delays, least_ms


def _waited_share(steps: Steps, rank: int) -> float:
    ran_ms = waited_ms = 0.0
    for step in steps:
        for other, parts in step.items():
            if other != rank:
                ran_ms += sum(parts[part][RAN] for part in OWN if part in parts)
                waited_ms += sum(parts[part][WAITED] for part in OWN if part in parts)
    return waited_ms / ran_ms


def _excess_ms(
    steps: Steps, rank: int, weights: Sequence[float], parts: Sequence[str] = OWN
) -> list[float]:
    """Return what a rank has beyond the median of the others; `weights` of ran, waited, slept."""
    excess = []
    for step in steps:
        ms = dict.fromkeys(step, 0.0)
        for each, part in itertools.product(step, parts):
            for weight, time_ms in zip(weights, step[each].get(part, ()), strict=False):
                ms[each] += weight * time_ms
        own_ms = ms.pop(rank)
        excess.append(own_ms - statistics.median(ms.values()))
    return excess


def _estimate(excess: Sequence[float], tests: int) -> tuple[float, float]:
    """Return the mean of the blocks, and what it exceeds by noise in WRONG_NAMES of clean runs."""
    size = max(2, math.ceil(len(excess) / BLOCKS))
    blocks = []
    for begin in range(0, len(excess) - size + 1, size):
        blocks.append(_trimmed_mean(excess[begin : begin + size]))
    error = statistics.stdev(blocks) / math.sqrt(len(blocks))
    quantile = two_sided_quantile(2 * WRONG_NAMES / tests, len(blocks) - 1)
    return statistics.fmean(blocks), quantile * error


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = round(len(values) / 10)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _place_of(
    steps: Steps, rank: int, weights: Sequence[float], kind: str
) -> tuple[str, str, int | None]:
    """Return the kind of a rank's delay, the part of the step with most of it, and its bucket."""
    delay_ms, usual_ms = {}, {}
    names = {name for step in steps for name in step[rank] if name.partition(":")[0] in OWN}
    for name in names:
        having, of_others = [], []
        for step in steps:
            if all(name in own for own in step.values()):
                having.append(step)
                of_others += [own[name][RAN] for each, own in step.items() if each != rank]
        if having:
            delay_ms[name] = _trimmed_mean(_excess_ms(having, rank, weights, [name]))
            usual_ms[name] = statistics.median(of_others)
    part = max(set(OWN) & set(delay_ms), key=delay_ms.__getitem__)
    if kind == FOREIGN_LOAD:
        return kind, part, None
    if _moved_share(delay_ms, usual_ms) < CONCENTRATED:
        return "clock", part, None
    if part == "loader":
        return "loader", part, None
    buckets = [name for name in delay_ms if name.startswith(f"{part}:")]
    bucket = None
    if buckets:
        bucket = int(max(buckets, key=delay_ms.__getitem__).partition(":")[2])
    return kind, part, bucket


def _moved_share(delay_ms: Mapping[str, float], usual_ms: Mapping[str, float]) -> float:
    """Return 0 if all parts are late by their length, as at a lower clock; near 1 if one is."""
    finest = [name for name in delay_ms if name.startswith("backward:")]
    finest += [name for name in OWN if name in delay_ms and name != "backward"]
    late_ms = {name: max(0.0, delay_ms[name]) for name in finest}
    all_late_ms, all_ms = sum(late_ms.values()), sum(usual_ms[name] for name in finest)
    moved = 0.0
    for name in finest:
        moved += max(0.0, late_ms[name] / all_late_ms - usual_ms[name] / all_ms)
    return moved


def _slow_link(lines: RankLines, exposed_ms: float, samples_per_s: float) -> list[Delay]:
    """Return the TCP connection between hosts on which data was under way for longest; [] as with
    RDMA, and where it was at most SLOW_LINK times as long as inside a host."""
    rank_at: dict[str, int] = {}
    busiest = (0, 0, "", "")  # µs, bytes, from, to
    inside = []
    for rank, rank_lines in lines.items():
        for line in rank_lines:
            for here, there, sent_bytes, busy_us in line.get("connections", ()):
                rank_at[here] = rank
                if here.rpartition(":")[0] == there.rpartition(":")[0]:
                    inside.append((busy_us, sent_bytes))
                else:
                    busiest = max(busiest, (busy_us, sent_bytes, here, there))
    busy_us, sent_bytes, here, there = busiest
    alike_us = [other_us for other_us, other_bytes in inside if other_bytes >= sent_bytes / 2]
    if busy_us <= SLOW_LINK * max(alike_us, default=0):
        return []
    part = f"{here} to {there}, {sent_bytes / busy_us:.0f} MB/s"
    return [Delay(rank_at[here], LINK, part, None, rank_at.get(there), exposed_ms, samples_per_s)]
