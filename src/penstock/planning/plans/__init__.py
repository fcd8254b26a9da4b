"""The plan: what planning ends with and running begins with.

``plan`` is the value that people read and edit, ``stage_plan`` one stage of it, ``orders`` the ops
of families that search, ``consistency`` what its parts must not contradict. ``prediction`` is what
follows from them, ``steady`` how long a minibatch takes where a pipeline never drains, ``spilling``
what it takes where stages come and go, ``offloading`` where activations do. ``title``, ``table``
and ``alternative`` are its text, ``picture`` its picture, ``explanation`` its asynchrony in words.

Decisions:

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
