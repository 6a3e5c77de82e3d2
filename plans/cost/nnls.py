"""Non-negative least squares (Lawson and Hanson, 1974): small and dense, numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def non_negative_least_squares(matrix: FloatArray, target: FloatArray, *, tolerance: float = 1e-12) -> FloatArray:
    """Return x >= 0 that minimises |matrix x - target|.

    Args:
        matrix: rows of observations [m, n].
        target: observed values [m].
        tolerance: gradient below which a variable stays at zero, relative to the problem's scale.

    Returns:
        The solution [n]; variables that the data do not identify are 0. O(n) least-squares solves in practice.
    """
    num = matrix.shape[1]
    free = np.zeros(num, dtype=bool)
    x = np.zeros(num)
    scale = tolerance * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(3 * num + 10):
        gradient = matrix.T @ (target - matrix @ x)
        blocked = np.where(free, -np.inf, gradient)
        best = int(np.argmax(blocked))
        if blocked[best] <= scale:
            break
        free[best] = True
        x = _descend(matrix, target, x, free)
    return x


def _descend(matrix: FloatArray, target: FloatArray, x: FloatArray, free: NDArray[np.bool_]) -> FloatArray:
    """Move to the unconstrained solution over the free variables, dropping those that would turn negative."""
    while free.any():
        trial = np.zeros_like(x)
        trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = free & (trial <= 0.0)
        if not negative.any():
            return trial
        step = float(np.min(x[negative] / (x[negative] - trial[negative])))
        x = x + step * (trial - x)
        free &= ~(negative & (x <= 1e-15))
        x[~free] = 0.0
    return np.zeros_like(x)
