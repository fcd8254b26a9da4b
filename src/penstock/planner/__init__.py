"""From a profile and a cluster to a plan."""

from penstock.planner.alternative import Alternative
from penstock.planner.plan import Plan
from penstock.planner.search import plan
from penstock.planner.stage_plan import StagePlan
from penstock.planner.what_if import WhatIf, what_if

__all__ = ["Alternative", "Plan", "StagePlan", "WhatIf", "plan", "what_if"]
