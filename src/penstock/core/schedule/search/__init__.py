"""Search for an order of ops: any durations, any placement, any limit on what is in flight.

Decisions:

A search asks a ``Durations`` protocol, not ``Costs``, because schedules lie below costs.
``zb-auto`` evaluates orders as plain integers, thousands per second; its arithmetic is the
simulator's, and it starts from every fixed family that keeps to the limit, so "never worse" holds
to the last bit. It climbs in the space of rules that a list scheduler follows: changing a rank's
rule changes its whole order consistently, where moving single ops stays where it is. ``optimal``
takes its answer as the bound from above.
"""

from penstock.core.schedule.search.climb import search
from penstock.core.schedule.search.greedy import Phase, Rules, greedy
from penstock.core.schedule.search.problem import (
    Objective,
    OrderingProblem,
    Orders,
    check_objective,
    whole_ranks,
)

__all__ = [
    "Objective",
    "OrderingProblem",
    "Orders",
    "Phase",
    "Rules",
    "check_objective",
    "greedy",
    "search",
    "whole_ranks",
]
