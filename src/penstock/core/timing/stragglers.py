"""How the ranks of a measured timeline did: how long each worked and waited, and which of them took
longer than the others, beside what was predicted."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.core.timing.timeline import Timeline

STRAGGLES = 1.1
"""A rank straggles that takes so many times as long as the usual one."""


class RankShare(NamedTuple):
    """A rank in a step.

    Attributes:
        rank: its number.
        busy: how long it worked.
        idle: how long it did not, while any rank did.
        predicted: how long it was predicted to work; ``None`` where nothing was.
        pace: its work over what was predicted, or over the usual rank's, both relative to the
            median of the ranks; 1 is usual.
    """

    rank: int
    busy: float
    idle: float
    predicted: float | None
    pace: float

    @property
    def straggles(self) -> bool:
        """Whether it takes longer than the others do."""
        return self.pace >= STRAGGLES


def rank_shares(measured: Timeline, predicted: Timeline | None = None) -> tuple[RankShare, ...]:
    """How the ranks did.

    Args:
        measured: of a step.
        predicted: of the same plan's. With it, a rank straggles if it is slower than predicted
            more than the others are; without, if it works longer than they do.

    Raises:
        InputError: the two have other ranks, or other stages on them.
    """
    if predicted is not None and measured.stages_of != predicted.stages_of:
        raise InputError(
            f"the measured timeline has stages {measured.stages_of} on its ranks, the predicted "
            f"one {predicted.stages_of}; compare a run with the plan that it ran"
        )
    expected = predicted.busy if predicted else (1.0,) * measured.num_ranks
    paces = [
        busy / usual if usual else 1.0 for busy, usual in zip(measured.busy, expected, strict=True)
    ]
    middle = median(paces) if paces else 1.0
    return tuple(
        RankShare(
            rank,
            busy,
            measured.makespan - busy,
            expected[rank] if predicted else None,
            pace / middle if middle else 1.0,
        )
        for rank, (busy, pace) in enumerate(zip(measured.busy, paces, strict=True))
    )
