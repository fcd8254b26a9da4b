"""From a profile and a cluster to a plan."""

from penstock.planner.changes import WhatIf, what_if
from penstock.planner.search import plan

__all__ = ["WhatIf", "plan", "what_if"]
