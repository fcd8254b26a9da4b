"""What each rank holds from moment to moment, of a plan's timeline, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.base.errors import InputError
from penstock.base.values import expect
from penstock.core.schedule.memory import Curve
from penstock.core.timing.spans import Row
from penstock.core.timing.timeline import Timeline
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spilling import held_by_op, stage_bytes


def memory_over_time(plan: Plan, timeline: Timeline) -> tuple[Curve, ...]:
    """For each rank, (time, bytes held from then on): the weights, gradients and optimizer state of
    stages that are there, activations, and what always stays.

    The bytes are the plan's, the moments and the order those of the timeline. So the highest point
    of the plan's own prediction is ``plan.rank_bytes``, and a measured timeline differs from it
    where ops ran in another order or at another time.

    Args:
        timeline: of one step of this plan.

    Raises:
        InputError: the timeline has another number of ranks, or ops of stages that the plan lacks.
    """
    expect(timeline, Timeline, "the timeline", "take plan.simulate() or pipeline.timeline")
    if timeline.num_ranks != plan.num_ranks:
        raise InputError(
            f"the timeline has {timeline.num_ranks} ranks and the plan {plan.num_ranks}; take a "
            "timeline of this plan"
        )
    stages = {stage for row in timeline.rows for stage in {op.stage for op in row.ops}}
    if max(stages, default=0) >= len(plan.stages):
        raise InputError(
            f"the timeline has an op of stage {max(stages)} and the plan {len(plan.stages)} "
            "stages; take a timeline of this plan"
        )
    predicted = plan.simulate()
    return tuple(
        _curve(plan, timeline, row, most - _highest(plan, predicted, own))
        for row, own, most in zip(timeline.rows, predicted.rows, plan.rank_bytes, strict=True)
    )


def memory_limits(plan: Plan) -> tuple[float | None, ...]:
    """Bytes that each rank may hold, by the plan's budget or else by its devices; ``None`` where
    nobody says."""
    if plan.spill is not None and plan.spill.memory_bytes:
        return (plan.spill.memory_bytes,) * plan.num_ranks
    limits = (device.memory_bytes or None for device in plan.leaders)
    return tuple(limits) or (None,) * plan.num_ranks


def _curve(plan: Plan, timeline: Timeline, row: Row, always: float) -> Curve:
    points: list[tuple[float, float]] = []
    held = _held(plan, timeline, row)
    for begin, end, (during, behind) in zip(row.starts, row.ends, held, strict=True):
        points += [(begin, always + during), (end, always + behind)]
    return tuple(points)


def _highest(plan: Plan, timeline: Timeline, row: Row) -> float:
    return max((during for during, _ in _held(plan, timeline, row)), default=0.0)


def _held(plan: Plan, timeline: Timeline, row: Row) -> Iterator[tuple[float, float]]:
    own_bytes = stage_bytes(plan.stages) if plan.spill is not None else None
    return held_by_op(row.ops, plan.sizes, own_bytes, timeline.num_slices, timeline.activations)
