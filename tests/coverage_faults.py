"""Which faults in time are seen, at the noise of H200s: a table of `python -m tests.coverage`.

The steps of a cell are simulated from its first one, and go through the product's warm-up, stopping rule and checks.
"""

import numpy as np
from coverage_within import (
    LEAST_MS,
    MOST_WARM_UP_S,
    STEP_MS,
    STEPS,
    WARM_UP_ITERATIONS,
    timed,
    told,
)

from benchmarks.timing import statistics

STUDIES = 200
NOISE = 0.001
WARM_UP_STEPS = int(MOST_WARM_UP_S * 1e3 / STEP_MS) + 1
SIZE = WARM_UP_STEPS + STEPS


def change(share, at=60):
    return lambda number, since: share * (since >= at)


def decay(share, tau_s):
    return lambda number, since: share * np.exp(-number * STEP_MS / 1e3 / tau_s)


def pause(every, seconds):
    return lambda number, since: 1e3 * seconds / STEP_MS * (number % every == every - 1)


# How much longer a step is, as a share: by its number since the start and since the timed windows began.
FAULTS = {
    "none": change(0.0),
    **{f"step +{share:.0%} from iteration 60": change(share) for share in (0.05, 0.10, 0.20, 0.30)},
    "trend of 2 % in 100 steps": lambda number, since: 0.0002 * np.maximum(since, 0),
    "spell of 30 steps, +5%": lambda number, since: 0.05 * ((since >= 40) & (since < 70)),
    **{
        f"warm-up: {share:.0%} decaying over {tau} s": decay(share, tau)
        for share, tau in ((0.02, 10), (0.05, 30), (0.2, 10), (0.2, 30), (0.5, 30))
    },
    "pause of 0.25 s, every 25th step": pause(25, 0.25),
    "pause of 0.25 s, every 100th step": pause(100, 0.25),
}


def flat(ms):
    return statistics.flat(ms, WARM_UP_ITERATIONS, LEAST_MS)


def run(fault, seed):
    """Return (steps of the warm-up, whether it was flat, the timed run) of one cell."""
    noise = 1 + np.random.default_rng(seed).normal(0, NOISE, SIZE)
    number = np.arange(SIZE)
    warm = STEP_MS * (1 + FAULTS[fault](number, np.full(SIZE, -1))) * noise
    done = next(
        (count for count in range(5, WARM_UP_STEPS, 9) if flat(warm[:count])), WARM_UP_STEPS
    )
    ms = STEP_MS * (1 + FAULTS[fault](number, number - done)) * noise
    return done, flat(warm[:done]), timed(ms[done : done + STEPS])


def seen(fault, studies=STUDIES):
    """Return seconds of warm-up, the median error of the rate, and the share of each code."""
    runs, codes = [run(fault, seed) for seed in range(studies)], []
    for _, was_flat, windows in runs:
        missed = set() if was_flat else {"warmup_not_flat"}
        codes.append(told(np.concatenate(windows).tolist()) | missed)
    shares = {}
    for code in sorted(set().union(*codes)):
        shares[code] = float(np.mean([code in one for one in codes]))
    means = [np.mean(np.concatenate(windows)) for _, _, windows in runs]
    return {
        "warm_up_s": np.median([done for done, _, _ in runs]) * STEP_MS / 1e3,
        "off": float(np.median(means)) / STEP_MS - 1,
        "codes": shares,
        "any": float(np.mean([bool(one) for one in codes])),
    }


def tables(studies: int = STUDIES):
    """Yield the table of faults."""
    yield f"\nFaults in time: {studies} cells each, noise of a step {NOISE:.1%}, from the first step to the verdict\n"
    yield f"{'planted':36} {'step off':>8} {'warm-up':>8} {'told':>6}  codes"
    for fault in FAULTS:
        found = seen(fault, studies)
        words = ", ".join(f"{code} {share:.0%}" for code, share in found["codes"].items())
        yield (
            f"{fault:36} {found['off']:8.2%} {found['warm_up_s']:6.1f} s {found['any']:6.0%}  {words}"
        )
