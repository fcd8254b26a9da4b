"""Arithmetic on costs: a default, another pace, and shares of slices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace

from penstock.schedule import Schedule
from penstock.timing.costs import Costs

OP_SECONDS = 10e-3
"""What F, I and W of all of a rank's layers take where nobody says."""

_NAMES = tuple(field.name for field in fields(Costs))
_COMPUTE = ("forward", "backward_input", "backward_weight", "backward", "recompute")


def default_costs(schedule: Schedule) -> Costs:
    """F, I and W of a whole rank's layers take ``OP_SECONDS`` each."""
    per_rank = schedule.num_stages / schedule.num_ranks
    return scaled(Costs().spread(per_rank), OP_SECONDS)


def scaled(costs: Costs, factor: float) -> Costs:
    """All durations times ``factor``."""
    return _multiplied(costs, factor, _NAMES)


def costs_of_slices(costs: Costs, num_slices: int) -> Costs:
    """What each slice takes where ``costs`` are those of a whole microbatch: an even share of the
    compute; a hop is paid per message, and an update once."""
    return _multiplied(costs, 1 / num_slices, _COMPUTE)


def with_hop(costs: Costs, more_seconds: float) -> Costs:
    """The same costs with each hop longer."""
    hop = costs.hop
    if isinstance(hop, int | float):
        return replace(costs, hop=hop + more_seconds)
    return replace(costs, hop=[one + more_seconds for one in hop])


def _multiplied(costs: Costs, factor: float, names: Collection[str]) -> Costs:
    changed = {}
    for name in names:
        value = getattr(costs, name)
        if value is not None:
            listed = isinstance(value, tuple)
            changed[name] = [one * factor for one in value] if listed else value * factor
    return replace(costs, **changed)
