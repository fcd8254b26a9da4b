"""What ranks with any number of stages hold at their worst moments, without a walk through all ops
for each way to cut the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.schedule import Kind, Op, Schedule
from penstock.planning.partition.chain import Floats

_INPUT, _WHOLE, _FOR_WEIGHT = range(3)
_CHANGES = {
    Kind.RECOMPUTE: ((_INPUT, -1), (_WHOLE, 1)),
    Kind.BACKWARD: ((_WHOLE, -1),),
    Kind.BACKWARD_INPUT: ((_WHOLE, -1), (_FOR_WEIGHT, 1)),
    Kind.BACKWARD_WEIGHT: ((_FOR_WEIGHT, -1),),
}

StageSizes = tuple[float, float, float]
"""Bytes that a microbatch keeps at a stage: its input only, all, or what the weight gradient
needs."""


class Moments(NamedTuple):
    """How many microbatches a rank holds at a time, and how.

    Attributes:
        stages: those that the rank has.
        counts: a row per moment that differs from all others, three columns per stage: as
            ``StageSizes``.
    """

    stages: tuple[int, ...]
    counts: Floats

    def most_bytes(self, sizes: Callable[[int], StageSizes]) -> float:
        """Bytes that the rank holds at its worst moment, if ``sizes`` tells what a microbatch
        keeps at a stage."""
        flat = [size for stage in self.stages for size in sizes(stage)]
        return float((self.counts @ flat).max())


def moments_of(schedule: Schedule) -> tuple[Moments, ...]:
    """The moments of each rank.

    Args:
        schedule: compute only, of whole microbatches, perhaps with recomputes.
    """
    return tuple(
        _moments(ops, stages)
        for ops, stages in zip(schedule.rank_ops, schedule.stages_of, strict=True)
    )


def _moments(ops: Sequence[Op], stages: Sequence[int]) -> Moments:
    first_column = {stage: 3 * index for index, stage in enumerate(stages)}
    recomputed = {op.stage for op in ops if op.kind is Kind.RECOMPUTE}
    changes = np.zeros((len(ops) + 1, 3 * len(stages)))
    for row, op in enumerate(ops, start=1):
        kept = _INPUT if op.stage in recomputed else _WHOLE
        for part, change in _CHANGES.get(op.kind, ((kept, 1),)):
            changes[row, first_column[op.stage] + part] += change
    return Moments(tuple(stages), np.unique(changes.cumsum(axis=0), axis=0))
