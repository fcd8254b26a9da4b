"""What a notebook shows of a plan, and of two plans beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.drawing import cells
from penstock.planning.plans.picture import picture_of
from penstock.planning.plans.plan import Plan


class _Changed(Protocol):
    """A plan before and after changes, as the planner gives them."""

    changes: str
    before: Plan
    after: Plan

    def rows(self) -> Sequence[tuple[str, str, str, str]]: ...


def plan_cell(plan: Plan) -> str:
    """A plan's devices and stages, and its predicted timeline."""
    return cells.plan_cell(picture_of(plan), plan.prediction.shown)


def what_if_cell(asked: _Changed) -> str:
    """What changes, as a table, and both plans' timelines on one axis."""
    names = ("now", f"with {asked.changes}")
    timelines = (plan.prediction.shown for plan in (asked.before, asked.after))
    pair = list(zip(names, timelines, strict=True))
    table = cells.table(("", *names, ""), asked.rows(), 4)
    return cells.cell(table, cells.timelines_image(pair))
