"""From a profile and a cluster to a plan."""

from penstock.planner.plan import Alternative, Plan
from penstock.planner.search import plan
from penstock.planner.stage_plan import StagePlan

__all__ = ["Alternative", "Plan", "StagePlan", "plan"]
