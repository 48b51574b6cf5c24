"""Notice a hang by the deadlines, and find its cause by state, stack and iteration count."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.agent.processes import ENDED
from benchmarks.record import Failure
from conf import schema
from launch.supervision.progress import Rank, Watch
from launch.supervision.stacks import Location, StackState

STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")
States = Mapping[int, str]  # what each process does, by number, in the kernel's words
Locations = Mapping[int, Location]  # where each rank stands, by number, as far as it said so


@dataclass(frozen=True)
class Hang:
    """Ranks that live and do not go on; who is at fault is not known yet."""

    what: str  # what the rank at fault did, as the end of a sentence


def overdue(
    watch: Watch, opened: float, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> Failure | Hang | None:
    """Return what is to be said if a deadline has passed: of the start, of a silence, of the cell.

    `opened` and `now` are monotonic seconds, `opened` of the start; `state` returns what a process,
    by number and id, does.
    """
    start_s = limits.start_timeout_s
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing:
        if now - opened > start_s:
            names = ", ".join(rank.name for rank in missing)
            sentence = f"{names} did not report within {start_s:g} s"
            return Failure("start", missing[0].number, sentence)
    else:
        deadlines = [_passed_deadline_s(watch, rank, now, limits, state) for rank in watch.everyone]
        passed = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        if passed:
            return Hang(f"gave no sign for {min(passed):g} s")
    last_seen = max(rank.last_seen for rank in watch.everyone)
    if all(rank.done for rank in watch.everyone) and now - last_seen > start_s:
        sentence = f"all ranks are done, and what started them did not end within {start_s:g} s"
        return Failure("hang", None, sentence)
    if now - opened > limits.cell_timeout_s:
        return Hang(f"was not done when the cell's {limits.cell_timeout_s:g} s were over")
    return None


def _passed_deadline_s(
    watch: Watch, rank: Rank, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> float | None:
    """Return the deadline after which a live process has written nothing; None before it.

    The first step compiles, tunes and connects without a sign: a rank has as long for it as for the
    start. A process that was stopped does none of that, and a server gives a sign every second.
    """
    silent_s = now - rank.last_seen
    deadline_s = limits.silence_timeout_s
    if rank.pid is None or silent_s <= deadline_s:
        return None
    process_state = state(rank.number, rank.pid)
    if rank.done and process_state in ENDED:
        return None
    if rank in watch.ranks and rank.iterations == 0 and process_state != "stopped":
        deadline_s = max(deadline_s, limits.start_timeout_s)
    if silent_s <= deadline_s:
        return None
    return deadline_s


def explain_hang(watch: Watch, what: str, found: States, locations: Locations) -> Failure:
    """Return a hang that names the rank that is not where the others are.

    Args:
        watch: what the ranks have reported.
        what: what the rank did, as the end of a sentence.
        found: what each process did when the deadline had passed; absent if it has not started.
        locations: where each rank stands.
    """
    states = {rank.number: found.get(rank.number, "not started") for rank in watch.everyone}
    waiting = [rank for rank in watch.everyone if not rank.done]
    if not waiting:
        waiting = [rank for rank in watch.everyone if states[rank.number] not in ENDED]
    if not waiting:
        waiting = watch.everyone
    counts = {rank.number: watch.count(rank) for rank in waiting}
    rank, why = _suspect(watch, waiting, states, counts, locations)
    if rank is None:
        phase = waiting[0].phase or "start"
        each = _activities(waiting, states, locations)
        sentence = f"no rank is behind the others; each {what} in phase {phase!r}: {each}"
        return Failure("hang", None, sentence)
    where = f"in phase {rank.phase or 'start'!r} after {counts[rank.number]} iterations"
    sentence = f"{rank.name} {what}, {where}: it {_activity(rank, states, locations)}"
    rest = [peer for peer in waiting if peer is not rank]
    if rest:
        sentence += f", while {_activities(rest, states, locations)}"
    return Failure("hang", rank.number, sentence + why)


def _suspect(
    watch: Watch,
    waiting: Sequence[Rank],
    states: States,
    counts: Mapping[int, int],
    locations: Locations,
) -> tuple[Rank | None, str]:
    """Return the rank to name, and the end of the sentence where that needs a reason.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while
    another waits; one that wrote no stack though others did; one that began another collective than
    the others; the fewest iterations; one that works while others wait; one that waits elsewhere
    than most, or where foreign code began the wait; the last of those that wait in different
    places.
    """
    stuck = [rank for rank in waiting if states[rank.number] in STUCK]
    if stuck:
        return stuck[0], ""
    if len(waiting) == 1:
        return waiting[0], ""
    located = [rank for rank in waiting if rank.number in locations]
    silent = [rank for rank in waiting if rank.number not in locations]
    away = None  # a rank that looks less as if it waited than another
    if located:
        away = min(located, key=lambda rank: locations[rank.number].state)
        least = locations[away.number].state
        if all(locations[rank.number].state == least for rank in located):
            away = None
        elif least <= StackState.FOREIGN:
            return away, ""
        if silent:
            return silent[0], ""
    suspect = _another_collective(located, locations)
    if suspect:
        return suspect
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    fewest = min((counts[rank.number] for rank in stepping), default=0)
    behind = [rank for rank in stepping if counts[rank.number] == fewest]
    if len(behind) < len(stepping):
        return behind[0], ""
    if away:
        return away, ""
    return _waits_elsewhere([rank for rank in stepping if rank in located], locations)


def _another_collective(ranks: Sequence[Rank], locations: Locations) -> tuple[Rank, str] | None:
    """Return the first rank to begin another collective, and the end of the sentence.

    It is the one whose collective the fewest ranks began, else the only one whose was begun by
    foreign code; else None.
    """
    recorded = [rank for rank in ranks if locations[rank.number].collectives]
    if len(recorded) < 2:
        return None
    common = set(locations[recorded[0].number].collectives)
    for rank in recorded:
        common &= set(locations[rank.number].collectives)
    for key in sorted(common, key=lambda key: key[1]):
        begun = {rank.number: locations[rank.number].collectives[key] for rank in recorded}
        names = Counter(collective.name for collective in begun.values())
        if len(names) < 2:
            continue
        most = max(names.values())
        odd = [rank for rank in recorded if names[begun[rank.number].name] < most]
        if not odd:
            odd = [rank for rank in recorded if begun[rank.number].foreign]
        if len(odd) != 1:
            return None
        name = begun[odd[0].number].name
        usual = next(usual for usual in names if usual != name)
        why = f"; its collective {key[1]} was {name} where that of the others was {usual}"
        return odd[0], why
    return None


def _waits_elsewhere(ranks: Sequence[Rank], locations: Locations) -> tuple[Rank | None, str]:
    """Return the rank that waits elsewhere than the others; None if all wait in one place."""
    words = Counter(locations[rank.number].words for rank in ranks)
    if len(words) < 2:
        return None, ""
    most = max(words.values())
    minority = [rank for rank in ranks if words[locations[rank.number].words] < most]
    if minority:
        return minority[0], ""
    foreign = [rank for rank in ranks if locations[rank.number].called_from_foreign]
    if foreign and len(foreign) < len(ranks):
        return foreign[0], "; it is named because code outside Ringside and torch began its wait"
    return ranks[-1], "; nothing tells which of them is wrong, and the last is named"


def _activity(rank: Rank, states: States, locations: Locations) -> str:
    """Return what a rank does, as the end of a sentence."""
    state = states[rank.number]
    if state in STUCK:
        return f"is {state}"
    if rank.number in locations:
        return locations[rank.number].words
    return f"wrote no stack, and its process is {state}"


def _activities(ranks: Sequence[Rank], states: States, locations: Locations) -> str:
    """Return what several ranks do: 'each of rank 0, rank 2 waits…'."""
    names_by_activity: dict[str, list[str]] = {}
    for rank in ranks:
        activity = _activity(rank, states, locations)
        names_by_activity.setdefault(activity, []).append(rank.name)
    parts = []
    for activity, names in names_by_activity.items():
        each = names[0]
        if len(names) > 1:
            each = f"each of {', '.join(names)}"
        parts.append(f"{each} {activity}")
    return ", ".join(parts)
