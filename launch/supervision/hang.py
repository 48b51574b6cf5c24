"""Name the rank for which the others wait, from what the kernel says of it, where it stands, and how far it came."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.host.processes import ENDED
from benchmarks.record import Failure
from launch.supervision.progress import Rank, Watch
from launch.supervision.stacks import Place, Standing

STUCK = ("stopped", "disk-sleep", "tracing-stop", "zombie", "gone", "not started")


def hang(watch: Watch, what: str, found: Mapping[int, str], places: Mapping[int, Place]) -> Failure:
    """Return a hang that names the rank that is not where the others are.

    Args:
        watch: what the ranks have reported.
        what: what the rank did, as the end of a sentence.
        found: what each process did when the deadline had passed, by number; one that has not started is absent.
        places: where each rank stands, by number, as far as it said so.
    """
    states = {rank.number: found.get(rank.number, "not started") for rank in watch.everyone}
    waiting = [rank for rank in watch.everyone if not rank.done]
    waiting = waiting or [rank for rank in watch.everyone if states[rank.number] not in ENDED] or watch.everyone
    counts = {rank.number: watch.count(rank) for rank in waiting}
    rank, why = _suspect(watch, waiting, states, counts, places)
    each = _together(waiting, states, places)
    if rank is None:
        phase = waiting[0].phase or "start"
        return Failure("hang", None, f"no rank is behind the others; each {what} in phase {phase!r}: {each}")
    where = f"in phase {rank.phase or 'start'!r} after {counts[rank.number]} iterations"
    others = _together([one for one in waiting if one is not rank], states, places)
    does = _does(rank, states, places)
    message = f"{rank.name} {what}, {where}: it {does}" + (f", while {others}" if others else "") + why
    return Failure("hang", rank.number, message)


def _suspect(
    watch: Watch,
    waiting: Sequence[Rank],
    states: Mapping[int, str],
    counts: Mapping[int, int],
    places: Mapping[int, Place],
) -> tuple[Rank | None, str]:
    """Return the rank to name, and the end of the sentence where that needs a reason.

    In this order: a process that cannot go on; a rank that is asleep or in foreign code while another waits; one that wrote no
    stack though others did; one that began another collective than the others; the fewest iterations; one that works while
    others wait; one that waits elsewhere than most, or where foreign code began the wait; the last of those that wait in
    different places.
    """
    if stuck := [rank for rank in waiting if states[rank.number] in STUCK]:
        return stuck[0], ""
    if len(waiting) == 1:
        return waiting[0], ""
    standing = {rank.number: places[rank.number].standing for rank in waiting if rank.number in places}
    least = min(standing.values(), default=Standing.WAITING)
    away = [rank for rank in waiting if standing.get(rank.number) == least]
    apart = bool(standing) and least < max(standing.values())
    if apart and least <= Standing.FOREIGN:
        return away[0], ""
    if mute := [rank for rank in waiting if standing and rank.number not in standing]:
        return mute[0], ""
    if different := _different(waiting, places):
        return different
    # Servers count pushes, not steps: they are not compared.
    stepping = [rank for rank in waiting if rank in watch.ranks]
    fewest = min((counts[rank.number] for rank in stepping), default=0)
    behind = [rank for rank in stepping if counts[rank.number] == fewest]
    if len(behind) < len(stepping):
        return behind[0], ""
    if apart:
        return away[0], ""
    return _elsewhere([rank for rank in stepping if rank.number in places], places)


def _different(ranks: Sequence[Rank], places: Mapping[int, Place]) -> tuple[Rank, str] | None:
    """Return the rank that was the first to begin another collective than the others, and the end of the sentence.

    It is the one whose collective the fewest ranks began, else the only one whose was begun by foreign code; else None.
    """
    recorded = {rank.number: places[rank.number].collectives for rank in ranks if rank.number in places}
    recorded = {number: one for number, one in recorded.items() if one}
    common = set.intersection(*(set(one) for one in recorded.values())) if len(recorded) > 1 else set()
    for key in sorted(common, key=lambda key: key[1]):
        begun = {number: one[key] for number, one in recorded.items()}
        names = Counter(one.name for one in begun.values())
        if len(names) < 2:
            continue
        odd = [number for number, one in begun.items() if names[one.name] < max(names.values())]
        odd = odd or [number for number, one in begun.items() if one.foreign]
        if len(odd) != 1:
            return None
        (rank,) = [rank for rank in ranks if rank.number == odd[0]]
        its = begun[odd[0]].name
        others = next(name for name in names if name != its)
        return rank, f"; its collective {key[1]} was {its} where that of the others was {others}"
    return None


def _elsewhere(ranks: Sequence[Rank], places: Mapping[int, Place]) -> tuple[Rank | None, str]:
    """Return the rank that waits elsewhere than the others; None if all wait in one place."""
    words = Counter(places[rank.number].words for rank in ranks)
    if len(words) < 2:
        return None, ""
    most = max(words.values())
    minority = [rank for rank in ranks if words[places[rank.number].words] < most]
    if minority:
        return minority[0], ""
    foreign = [rank for rank in ranks if places[rank.number].called_from_foreign]
    if foreign and len(foreign) < len(ranks):
        return foreign[0], "; it is named because code outside Ringside and torch began its wait"
    return ranks[-1], "; nothing tells which of them is wrong, and the last is named"


def _does(rank: Rank, states: Mapping[int, str], places: Mapping[int, Place]) -> str:
    """Return what a rank does, as the end of a sentence."""
    state = states[rank.number]
    if state not in STUCK and rank.number in places:
        return places[rank.number].words
    return f"is {state}" if state in STUCK else f"wrote no stack, and its process is {state}"


def _together(ranks: Sequence[Rank], states: Mapping[int, str], places: Mapping[int, Place]) -> str:
    """Return what several ranks do, those that do the same together: 'rank 0, rank 2 wait…'."""
    found: dict[str, list[str]] = {}
    for rank in ranks:
        found.setdefault(_does(rank, states, places), []).append(rank.name)
    return ", ".join(f"{_names(names)} {does}" for does, names in found.items())


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"
