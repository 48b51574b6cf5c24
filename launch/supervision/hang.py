"""Notice a hang by the deadlines, and find its cause by state, stack and iteration count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.agent.processes import ENDED
from benchmarks.record import Failure
from conf import schema
from launch.supervision.watch import Rank, StackState, Watch

STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")


@dataclass(frozen=True)
class Hang:
    """Ranks that live and do not go on; who is at fault is not known yet."""

    what: str  # what the rank at fault did, as the end of a sentence


def overdue(
    watch: Watch, opened: float, now: float, limits: schema.Engine, state: Callable[[int, int], str]
) -> Failure | Hang | None:
    """Return what is wrong if a deadline has passed: of the start, of a silence, of the cell.

    `opened` and `now` are monotonic seconds; `state` returns what a process does, by number and id.
    """
    start_s = limits.start_timeout_s
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing and now - opened > start_s:
        names = ", ".join([rank.name for rank in missing])
        sentence = f"{names} did not report within {start_s:g} s"
        return Failure("start", missing[0].number, sentence)
    last_seen = 0.0
    all_done = True
    passed = []
    for rank in watch.everyone:
        last_seen = max(last_seen, rank.last_seen)
        all_done = all_done and rank.done
        if not missing:
            deadline_s = _passed_deadline_s(watch, rank, now, limits, state)
            if deadline_s:
                passed.append(deadline_s)
    if passed:
        return Hang(f"gave no sign for {min(passed):g} s")
    if all_done and now - last_seen > start_s:
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


def explain_hang(watch: Watch, what: str) -> Failure:
    """Return a hang that names the rank that is not where the others are.

    `what` is what the rank did, as the end of a sentence. The ranks have their states and
    locations.
    """
    running = []
    living = []
    for member in watch.everyone:
        if not member.done:
            running.append(member)
        if member.state not in ENDED:
            living.append(member)
    waiting = running or living or watch.everyone
    rank, why = _suspect(watch, waiting)
    if rank is None:
        phase = waiting[0].phase or "start"
        each = _activities(waiting)
        sentence = f"no rank is behind the others; each {what} in phase {phase!r}: {each}"
        return Failure("hang", None, sentence)
    where = f"in phase {rank.phase or 'start'!r} after {watch.count(rank)} iterations"
    sentence = f"{rank.name} {what}, {where}: it {_activity(rank)}"
    rest = [peer for peer in waiting if peer is not rank]
    if rest:
        sentence += f", while {_activities(rest)}"
    return Failure("hang", rank.number, sentence + why)


def _suspect(watch: Watch, waiting: Sequence[Rank]) -> tuple[Rank | None, str]:
    """Return the rank to name, and the end of the sentence where that needs a reason.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while
    another waits; one that wrote no stack though others did; one that began another collective than
    the others; the fewest iterations; one that works while others wait; one that waits elsewhere
    than most; the last of those that wait in different places.
    """
    for rank in waiting:
        if rank.state in STUCK:
            return rank, ""
    if len(waiting) == 1:
        return waiting[0], ""
    by_state: dict[StackState, list[Rank]] = {}
    silent = []
    for rank in waiting:
        if rank.location:
            by_state.setdefault(rank.location.state, []).append(rank)
        else:
            silent.append(rank)
    least = min(by_state, default=StackState.WAITING)
    if len(by_state) > 1 and least <= StackState.FOREIGN:
        return by_state[least][0], ""
    if by_state and silent:
        return silent[0], ""
    suspect, why = _another_collective(waiting)
    if suspect:
        return suspect, why
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    if len(set(map(watch.count, stepping))) > 1:
        return min(stepping, key=watch.count), ""
    if len(by_state) > 1:
        return by_state[least][0], ""
    return _waits_elsewhere(stepping)


def _another_collective(ranks: Sequence[Rank]) -> tuple[Rank | None, str]:
    """Return the only rank that began another collective than most, and the end of the sentence."""
    recorded = []
    for rank in ranks:
        if rank.location and rank.location.collectives:
            recorded.append((rank, rank.location.collectives))
    if len(recorded) < 2:
        return None, ""
    common = set(recorded[0][1])
    for _, collectives in recorded:
        common &= set(collectives)
    for key in sorted(common, key=lambda key: key[1]):
        ranks_by_name: dict[str, list[Rank]] = {}
        for rank, collectives in recorded:
            ranks_by_name.setdefault(collectives[key], []).append(rank)
        usual = max(ranks_by_name, key=lambda name: len(ranks_by_name[name]))
        odd = []
        for name, group in ranks_by_name.items():
            if len(group) < len(ranks_by_name[usual]):
                why = f"; its collective {key[1]} was {name} where that of the others was {usual}"
                for rank in group:
                    odd.append((rank, why))
        if len(odd) == 1:
            return odd[0]
        if len(ranks_by_name) > 1:
            break
    return None, ""


def _waits_elsewhere(ranks: Sequence[Rank]) -> tuple[Rank | None, str]:
    """Return the rank that waits elsewhere than the others; None if all wait in one place."""
    by_words: dict[str, list[Rank]] = {}
    for rank in ranks:
        if rank.location:
            by_words.setdefault(rank.location.words, []).append(rank)
    most = max(map(len, by_words.values()), default=0)
    for group in by_words.values():
        if len(group) < most:
            return group[0], ""
    if len(by_words) < 2:
        return None, ""
    return ranks[-1], "; nothing tells which of them is wrong, and the last is named"


def _activity(rank: Rank) -> str:
    if rank.state in STUCK:
        return f"is {rank.state}"
    if rank.location:
        return rank.location.words
    return f"wrote no stack, and its process is {rank.state}"


def _activities(ranks: Sequence[Rank]) -> str:
    """Return what several ranks do: 'each of rank 0, rank 2 waits…'."""
    names_by_activity: dict[str, list[str]] = {}
    for rank in ranks:
        names_by_activity.setdefault(_activity(rank), []).append(rank.name)
    parts = []
    for activity, names in names_by_activity.items():
        each = names[0]
        if len(names) > 1:
            each = f"each of {', '.join(names)}"
        parts.append(f"{each} {activity}")
    return ", ".join(parts)
