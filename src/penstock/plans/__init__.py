"""The plan: what planning ends with and running begins with.

``plan`` is the value that people read and edit, ``stage_plan`` one stage of it, ``orders`` the ops
of families that search, ``consistency`` what its parts must not contradict. ``steady`` is how long
a minibatch takes where a pipeline never drains. ``table`` and ``alternative`` are its text,
``picture`` its picture, ``explanation`` its asynchrony in words.
"""

from penstock.plans.alternative import Alternative
from penstock.plans.plan import Plan
from penstock.plans.stage_plan import StagePlan

__all__ = ["Alternative", "Plan", "StagePlan"]
