"""The plan: what planning ends with and running begins with.

``plan`` is the value that people read and edit, ``draft`` what they may write and how it becomes
one; ``stage_plan`` is one stage of it, ``orders`` the ops of families that search, ``consistency``
what its parts must not contradict. ``prediction`` is what follows from them, ``spilling`` what it
takes where stages or activations come and go, ``summing`` who sums gradients. ``table`` is its
text, ``picture`` its picture, ``explanation`` its asynchrony in words.

Decisions:

A plan is complete and checked, and never changes. Whoever makes one may leave out what follows from
the rest, and an order that is to be searched; that is worked out before there is a plan
(``draft.completed``), so that reading what ``save`` wrote, or copying with another reason, searches
nothing.

What follows from a plan is worked out when it is first asked for and kept with it
(``Plan.prediction``), so that text, picture and explanation speak of one simulation. It stands
beside the plan's fields, where no file, comparison or copy sees it. The planner's candidates have a
prediction of the same kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.lazily import loaded_when_used

if TYPE_CHECKING:
    from penstock.planning.plans.plan import Plan
    from penstock.planning.plans.stage_plan import StagePlan
    from penstock.planning.plans.table import Alternative
else:
    __getattr__ = loaded_when_used(
        __name__,
        {
            "penstock.planning.plans.table": ("Alternative",),
            "penstock.planning.plans.plan": ("Plan",),
            "penstock.planning.plans.stage_plan": ("StagePlan",),
        },
    )

__all__ = ["Alternative", "Plan", "StagePlan"]
