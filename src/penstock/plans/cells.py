"""What a notebook shows of a plan, and of two plans beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.drawing import cells
from penstock.plans.picture import picture_of
from penstock.plans.plan import Plan
from penstock.plans.prediction import SHOWN_TICKS
from penstock.timing.timeline import Timeline


class _Changed(Protocol):
    """A plan before and after changes, as the planner gives them."""

    changes: str
    before: Plan
    after: Plan

    def rows(self) -> Sequence[tuple[str, str, str, str]]: ...


def plan_cell(plan: Plan) -> str:
    """A plan's devices and stages, and its predicted timeline."""
    return cells.plan_cell(picture_of(plan), _shown(plan))


def what_if_cell(asked: _Changed) -> str:
    """What changes, as a table, and both plans' timelines on one axis."""
    names = ("now", f"with {asked.changes}")
    pair = list(zip(names, map(_shown, (asked.before, asked.after)), strict=True))
    table = cells.table(("", *names, ""), asked.rows(), 4)
    return cells.cell(table, cells.timelines_image(pair))


def _shown(plan: Plan) -> Timeline:
    """Its timeline; of a live stream, its steady state."""
    timeline = plan.simulate()
    return timeline.steady(SHOWN_TICKS) if plan.prediction.is_live else timeline
