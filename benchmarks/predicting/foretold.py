"""Plans whose steps are predicted and then measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import penstock as pk

APART = 0.05
"""By how much predictions must differ for their order to mean something."""


@dataclass(kw_only=True)
class Foretold:
    """A plan, and what its steps took.

    Attributes:
        plan: as the planner made it.
        seconds: measured.
    """

    plan: pk.Plan
    seconds: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """The usual step."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.plan.step_seconds / self.measured - 1


def orders(those: Sequence[Foretold]) -> list[bool]:
    """Of every pair whose predictions are clearly apart: whether it was measured in that order."""
    return [
        (a.plan.step_seconds < b.plan.step_seconds) == (a.measured < b.measured)
        for a, b in itertools.combinations(those, 2)
        if abs(a.plan.step_seconds / b.plan.step_seconds - 1) > APART
    ]
