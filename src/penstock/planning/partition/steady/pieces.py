"""Stages while they are searched: how many replicas, not yet which devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

Fits = Callable[[Sequence[int], int, int], bool]
"""(layers by index, replicas, microbatches in flight) → may a stage be like that?"""


@dataclass(frozen=True)
class Piece:
    """A stage between two states, by their indices."""

    start: int
    stop: int
    replicas: int


def all_fit(fits: Fits, stages: Sequence[tuple[Sequence[int], int]]) -> bool:
    """Whether a whole pipeline may be like that.

    Args:
        fits: whether one stage may.
        stages: (layers by index, replicas) of each, from the model's input to its output.
    """
    behind = 0
    for layers, replicas in reversed(stages):
        if not fits(layers, replicas, 1 + ceil(behind / replicas)):
            return False
        behind += replicas
    return True
