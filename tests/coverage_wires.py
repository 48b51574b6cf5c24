"""How often the line through lost times and exchanges holds what was planted: a table of `python -m tests.coverage`.

Studies are those of simulate.wired_study: 30 subsets of a DGX-1, one run each, scatter of 0.2 % of a step (0.1 ms).
"""

from simulate import WiredTruth, lines_by_quantity, wired_study

STUDIES = 100


def held(studies=STUDIES):
    """Return {quantity: (share of studies whose share is held, … whose fixed term is held)}."""
    truth, counts = WiredTruth(), {}
    for seed in range(studies):
        lines, _ = lines_by_quantity(wired_study(seed, truth))
        for quantity, line in lines.items():
            fixed, share = line.fixed_ms, line.share
            is_held = fixed.low is not None and fixed.low <= truth.fixed_ms <= fixed.high
            row = counts.setdefault(quantity, [0, 0])
            row[0] += share.low <= truth.share <= share.high
            row[1] += is_held
    return {name: (share / studies, fixed / studies) for name, (share, fixed) in counts.items()}


def tables(studies=STUDIES):
    """Yield the table, line by line."""
    yield f"Lines through lost time and exchanges, {studies} studies: the 95 % interval holds what was planted"
    yield f"{'lost':>22}{'share':>8}{'fixed':>8}"
    for quantity, (share, fixed) in held(studies).items():
        yield f"{quantity:>22}{share:>8.0%}" + (f"{fixed:>8.0%}" if fixed else f"{'none':>8}")
