"""``Durations`` and ``Placement``: how long ops take, and which rank each stage is on.

A search asks ``Durations`` about time; ``penstock.Costs`` answers, and so can anything else. A
placement is a tuple with the rank of every stage. Straight pipelines need none: stage s is on rank
s.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.core.schedule.op import Kind, Op

Placement = tuple[int, ...]


def loop(num_ranks: int, stages_per_rank: int) -> Placement:
    """Round and round: 0 1 2, 0 1 2, … as in interleaved schedules.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * stages_per_rank


def snake(num_ranks: int, stages_per_rank: int) -> Placement:
    """There and back: 0 1 2, 2 1 0, … Two stages per rank make the V of ZB-V and V-Half; the
    stages at each turn share a rank, so that nothing is sent between them.

    >>> snake(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_ranks))
    back = there[::-1]
    return tuple(rank for lap in range(stages_per_rank) for rank in (back if lap % 2 else there))


@runtime_checkable
class Durations(Protocol):
    """How long ops and messages take."""

    def duration(self, op: Op) -> float:
        """How long ``op`` keeps its rank busy."""

    def delay(self, needed: Op, op: Op) -> float:
        """How long the result of ``needed`` takes to reach ``op`` on another rank."""

    def check_stages(self, num_stages: int) -> None:
        """Raise ``InputError`` unless these are durations for ``num_stages``."""


class UnitDurations:
    """F, I and W take 1, a full backward 2, messages nothing."""

    def duration(self, op: Op) -> float:
        """As ``Durations`` promises."""
        return 2.0 if op.kind is Kind.BACKWARD else 1.0

    def delay(self, needed: Op, op: Op) -> float:
        """As ``Durations`` promises."""
        return 0.0

    def check_stages(self, num_stages: int) -> None:
        """As ``Durations`` promises."""


class WholeBackward(UnitDurations):
    """Unit durations where the backward is not split: I takes all of it, W nothing."""

    def duration(self, op: Op) -> float:
        """As ``Durations`` promises."""
        lengths = {Kind.BACKWARD_INPUT: 2.0, Kind.BACKWARD_WEIGHT: 0.0}
        return lengths.get(op.kind, super().duration(op))
