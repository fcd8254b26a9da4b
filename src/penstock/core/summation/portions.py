"""In how many portions gradients leave, by which both who sends them and who predicts it go."""

from __future__ import annotations

MOST_PORTIONS = 8
"""Each costs two messages per pair of ranks."""

LEAST_PORTION_BYTES = 256 * 1024


def num_portions(num_bytes: float, most: int = MOST_PORTIONS) -> int:
    """In how many portions so many bytes leave.

    >>> num_portions(1e5), num_portions(1e6), num_portions(1e9)
    (1, 3, 8)
    """
    return max(min(most, int(num_bytes // LEAST_PORTION_BYTES)), 1)
