"""What a search asks about time. ``penstock.Costs`` answers it; so can anything else."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.core.schedule.op import Kind, Op


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
