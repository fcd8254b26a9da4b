"""From a profile and a cluster to a plan."""

from penstock.planner.plan import Plan, StagePlan
from penstock.planner.search import plan

__all__ = ["Plan", "StagePlan", "plan"]
