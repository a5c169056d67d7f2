"""Quantiles of the Beta distribution, for reporting: accurate to about 1e-9, free of scipy, not for hot loops."""

from __future__ import annotations

import math

_TINY = 1e-300


def beta_cdf(x: float, alpha: float, beta: float) -> float:
    """Regularised incomplete beta function I_x(alpha, beta)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = (
        math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta) + alpha * math.log(x) + beta * math.log1p(-x)
    )
    front = math.exp(log_front)
    if x < (alpha + 1.0) / (alpha + beta + 2.0):
        return front * _continued_fraction(x, alpha, beta) / alpha
    return 1.0 - front * _continued_fraction(1.0 - x, beta, alpha) / beta


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of the continued fraction of I_x(a, b) (Abramowitz and Stegun 26.5.8)."""
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for term in (even, odd):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + term / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return value


def beta_quantile(probability: float, alpha: float, beta: float) -> float:
    """Inverse of :func:`beta_cdf` by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if beta_cdf(middle, alpha, beta) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
