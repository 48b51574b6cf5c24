"""Find the rank at fault in a hang by state, stack, collectives and iteration count."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.agent.processes import ENDED
from benchmarks.record import Failure
from launch.supervision.watch import Rank, StackState, Watch, doubted_network

STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")


class Suspect(NamedTuple):
    """The rank to name, and why where that needs a reason."""

    rank: Rank | None
    # Its collective of this number was another than that of the others.
    collective: int = 0
    began: str = ""
    usual: str = ""
    is_last: bool = False  # of those that wait in different places


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
    suspect = _suspect(watch, waiting)
    rank = suspect.rank
    between = ""
    all_wait = all(
        member.location and member.location.state is StackState.WAITING for member in waiting
    )
    if all_wait and not suspect.began:
        between = doubted_network(watch.everyone)
    if rank is None:
        phase = waiting[0].phase or "start"
        each = _activities(waiting)
        sentence = f"no rank is behind the others; each {what} in phase {phase!r}: {each}"
        return Failure("hang", None, f"{sentence}{between}")
    where = f"in phase {rank.phase or 'start'!r} after {watch.count(rank)} iterations"
    sentence = f"{rank.name} {what}, {where}: it {_activity(rank)}"
    rest = [peer for peer in waiting if peer is not rank]
    if rest:
        sentence += f", while {_activities(rest)}"
    if suspect.began:
        sentence += (
            f"; its collective {suspect.collective} was {suspect.began} where that of the others "
            f"was {suspect.usual}"
        )
    if suspect.is_last:
        sentence += "; nothing tells which of them is wrong, and the last is named"
    return Failure("hang", rank.index, f"{sentence}{between}")


def _suspect(watch: Watch, waiting: Sequence[Rank]) -> Suspect:
    """Return the rank to name.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while
    another waits; one that wrote no stack though others did; one that began another collective than
    the others; the fewest iterations; one that works while others wait; one that waits elsewhere
    than most; the last of those that wait in different places.
    """
    for rank in waiting:
        if rank.state in STUCK:
            return Suspect(rank)
    if len(waiting) == 1:
        return Suspect(waiting[0])
    by_state: dict[StackState, list[Rank]] = {}
    silent = []
    for rank in waiting:
        if rank.location:
            by_state.setdefault(rank.location.state, []).append(rank)
        else:
            silent.append(rank)
    least = min(by_state, default=StackState.WAITING)
    if len(by_state) > 1 and least <= StackState.FOREIGN:
        return Suspect(by_state[least][0])
    if by_state and silent:
        return Suspect(silent[0])
    suspect = _another_collective(waiting)
    if suspect.rank:
        return suspect
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    if len(set(map(watch.count, stepping))) > 1:
        return Suspect(min(stepping, key=watch.count))
    if len(by_state) > 1:
        return Suspect(by_state[least][0])
    by_words: dict[str, list[Rank]] = {}
    for rank in stepping:
        if rank.location:
            by_words.setdefault(rank.location.words, []).append(rank)
    most = max(map(len, by_words.values()), default=0)
    for group in by_words.values():
        if len(group) < most:
            return Suspect(group[0])
    if len(by_words) < 2:  # all wait in one place
        return Suspect(None)
    return Suspect(stepping[-1], is_last=True)


def _another_collective(ranks: Sequence[Rank]) -> Suspect:
    """Return the only rank that began another collective than most."""
    recorded = []
    for rank in ranks:
        if rank.location and rank.location.collectives:
            recorded.append((rank, rank.location.collectives))
    if len(recorded) < 2:
        return Suspect(None)
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
                for rank in group:
                    odd.append(Suspect(rank, key[1], name, usual))
        if len(odd) == 1:
            return odd[0]
        if len(ranks_by_name) > 1:
            break
    return Suspect(None)


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
