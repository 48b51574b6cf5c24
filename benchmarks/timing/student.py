"""Quantiles of Student's t distribution, without scipy: importing it takes a second on every rank."""

import math
from statistics import NormalDist


def two_sided_quantile(share: float, freedom: float) -> float:
    """Return the value that |t| exceeds with probability `share`, for `freedom` degrees of freedom, 1 or from 2 on.

    Hill 1970, Communications of the ACM 13(10), algorithm 396.
    """
    n = freedom
    if n == 1:
        return 1 / math.tan(share * math.pi / 2)
    if n == 2:
        return math.sqrt(2 / (share * (2 - share)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * share) ** (2 / n)
    if y <= 0.05 + a:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
        return math.sqrt(n * y)
    x = NormalDist().inv_cdf(share / 2)
    y = x**2
    if n < 5:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    return math.sqrt(n * math.expm1(a * y**2))
