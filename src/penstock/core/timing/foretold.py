"""A plan, as far as the simulator sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

from penstock.core.schedule.planned import Planned

if TYPE_CHECKING:
    from penstock.core.timing.costs import Costs
    from penstock.core.timing.timeline import Timeline


class Foretold(Planned, Protocol):
    """A ``Plan``: a schedule with costs of its own, and what they come to."""

    @property
    def costs(self) -> Costs:
        """Durations of what its stages do."""

    def simulate(self) -> Timeline:
        """The predicted timeline of a step, or of a stream that shows its steady state."""


def is_foretold(value: object) -> TypeGuard[Foretold]:
    """Whether a value is a plan.

    >>> is_foretold("1f1b")
    False
    """
    return all(hasattr(type(value), name) for name in ("build_schedule", "costs", "simulate"))
