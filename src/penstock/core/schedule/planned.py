"""A schedule that somebody has planned, as far as rooms below the planner see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from penstock.core.schedule.schedule import Schedule


class Planned(Protocol):
    """A ``Plan``, or whatever else builds a schedule of its own."""

    def build_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The checked schedule."""


def is_planned(value: object) -> TypeGuard[Planned]:
    """Whether a value builds a schedule of its own.

    >>> is_planned("1f1b")
    False
    """
    return hasattr(type(value), "build_schedule")
