"""Search for an order of ops: any durations, any placement, any limit on what is in flight."""

from penstock.schedule.search.climb import search
from penstock.schedule.search.greedy import Rules, greedy
from penstock.schedule.search.problem import (
    Objective,
    Orders,
    Problem,
    check_objective,
    whole_ranks,
)

__all__ = [
    "Objective",
    "Orders",
    "Problem",
    "Rules",
    "check_objective",
    "greedy",
    "search",
    "whole_ranks",
]
