"""From a profile and a cluster to a plan."""

from penstock.planner.alternative import Alternative
from penstock.planner.changes import WhatIf, what_if
from penstock.planner.plan import Plan
from penstock.planner.search import plan
from penstock.planner.stage_plan import StagePlan

__all__ = ["Alternative", "Plan", "StagePlan", "WhatIf", "plan", "what_if"]
