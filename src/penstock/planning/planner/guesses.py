"""``guessed_seconds``: about how long a minibatch takes with an offer, before anything is built.

Of deep models on large clusters there are thousands of offers, of which bounds that never lie rule
out hardly any: those are built that a guess puts first, until it puts all others behind the best
that was simulated. It has even stages, a pipeline's beginning and end as the families' own pages
count them, what must run twice where activations have too little room, and the sums of copies.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from penstock.planning.planner.limits import least_state_bytes
from penstock.planning.planner.offers import Offer, stages_of_pipeline
from penstock.planning.planner.pricing import SummedSetting
from penstock.planning.planner.task import Task


class _Habit(NamedTuple):
    """What a family is like where all stages cost the same.

    Attributes:
        idle: seconds that ranks wait at a step's beginning and end, over those that 1F1B's do.
        peak: microbatches in flight where most are, over ranks.
        late: of these, those whose weight gradients are still to come where most are, over ranks.
            What they need is there however much runs forward twice.
    """

    idle: float = 1.0
    peak: float = 1.0
    late: float = 0.0


_HABITS = {
    "gpipe": _Habit(peak=inf),
    "breadth-first": _Habit(peak=inf),
    "eager-1f1b": _Habit(peak=2.0),
    "interleaved-1f1b": _Habit(peak=1.5),
    "zb-h1": _Habit(idle=0.33, late=1.0),
    "interleaved-zb": _Habit(idle=0.33, late=0.4),
    "zb-h2": _Habit(idle=0.0, peak=2.0, late=1.0),
    "zb-v": _Habit(idle=0.0, late=0.4),
    "dualpipe-v": _Habit(idle=0.2),
    "v-half": _Habit(idle=0.6, peak=0.5),
    "v-min": _Habit(idle=1.0, peak=0.34),
}
"""Of the others, those of 1F1B."""


def guessed_seconds(task: Task, offer: Offer) -> float:
    """About how long a minibatch takes; infinite where weights, or what weight gradients need that
    come late, have no room."""
    own = offer.copies or (1,) * offer.num_ranks
    depth, width = len(own), offer.num_ranks / len(own)
    count = ceil(task.num_microbatches / width)
    again = _again_seconds(task, offer, depth, count)
    if again == inf:
        return inf
    passes, habit = sum(task.layers.compute_seconds) + again, _HABITS.get(offer.family, _Habit())
    per_rank = stages_of_pipeline(offer.family, depth, offer.options) / depth
    slowest = task.least_slowest(depth) if per_rank == 1 and depth <= task.num_layers else 0.0
    steady = count * max(passes / depth, slowest)
    ends = habit.idle * (depth - 1) / max(per_rank, 1) * passes / depth
    return steady + ends + _sum_seconds(task, offer, depth) / max(per_rank, 1)


def _again_seconds(task: Task, offer: Offer, depth: int, count: int) -> float:
    """Seconds of what runs forward twice for a microbatch."""
    again, whole, for_weight = (
        task.layers.sum(name, 0, task.num_layers)
        for name in ("recompute_seconds", "activation_bytes", "weight_kept_bytes")
    )
    if offer.recompute in {"stage", "layers"}:
        return again
    free = (
        task.devices.tensor_limits[offer.devices[0]] - least_state_bytes(task, offer.copies) / depth
    )
    habit = _HABITS.get(offer.family, _Habit())
    if free < for_weight / depth * min(count, habit.late * depth):
        return inf
    kept = whole / depth * min(count, max(habit.peak * depth, 1.0))
    share = max(1 - free / kept, 0.0) if kept else 0.0
    return share * again


def _sum_seconds(task: Task, offer: Offer, depth: int) -> float:
    """Seconds of the sum of one rank's copies that have an even share of the model."""
    if not offer.copies or offer.copies[0] < 2:
        return 0.0
    num_bytes = task.layers.sum("gradient_bytes", 0, task.num_layers) / depth
    way = SummedSetting(task, task.reducer, offer.devices)
    return way.exchange(num_bytes, range(offer.copies[0])).total
