"""How often the line through losses and wires holds what was planted, and whom it accuses: tables of `python -m tests.coverage`.

Studies are those of tests/simulate.py: 30 subsets of a DGX-1, one run each, scatter of 0.2 % of a step (0.1 ms).
"""

from collections.abc import Iterator

from simulate import WiredTruth, lines_by_quantity, wire_verdicts, wired_study

STUDIES = 100
BAD = ((0, 3), (0, 5), (0, 1, 2, 3))  # over NV2, over PCIe, a set with many rings
LOST_MS = (0.3, 0.45, 0.6, 1.0)  # of a step of 54 ms


def held(studies=STUDIES):
    """Return, of clean studies, {quantity: (share held, fixed term held)} and how many accused a subset, all as shares."""
    truth, counts, accused = WiredTruth(), {}, 0
    for seed in range(studies):
        lines, _ = lines_by_quantity(wired_study(seed, truth))
        accused += any(point.verdict for line in lines.values() for point in line.points)
        for quantity, line in lines.items():
            share = line.share.low <= truth.share <= line.share.high
            fixed = (
                line.fixed_ms.low is not None
                and line.fixed_ms.low <= truth.fixed_ms <= line.fixed_ms.high
            )
            counts.setdefault(quantity, []).append((share, fixed))
    shares = {
        quantity: tuple(sum(column) / studies for column in zip(*found, strict=True))
        for quantity, found in counts.items()
    }
    return shares, accused / studies


def seen(lost_ms, studies=STUDIES // 5):
    """Return the share of studies in which the bad subset is told, and in which it alone is."""
    found = [
        (bad, wire_verdicts(wired_study(seed, lost={bad: lost_ms})))
        for bad in BAD
        for seed in range(studies)
    ]
    return sum(bad in said for bad, said in found) / len(found), sum(
        {bad} == {*said} for bad, said in found
    ) / len(found)


def tables(studies=STUDIES) -> Iterator[str]:
    """Yield the tables, line by line."""
    shares, accused = held(studies)
    yield f"Lines through lost time and link times, {studies} studies: the 95 % interval holds what was planted"
    yield f"{'lost':>22}{'share':>8}{'fixed':>8}"
    for quantity, (share, fixed) in shares.items():
        yield f"{quantity:>22}{share:>8.0%}" + (f"{fixed:>8.0%}" if fixed else f"{'none':>8}")
    yield f"Clean studies that accuse a subset: {accused:.0%}"
    yield ""
    yield f"A subset that loses more time than its links explain, {max(1, studies // 5)} studies of each of {len(BAD)} subsets"
    yield f"{'planted ms':>12}{'told':>8}{'alone':>8}"
    for lost_ms in LOST_MS:
        yield f"{lost_ms:>12g}" + "".join(
            f"{share:>8.0%}" for share in seen(lost_ms, max(1, studies // 5))
        )
