"""``seconds_of_ranks``: what each rank of a plan does with the seconds of a step.

A rank works, or waits. What it works is counted, op by op. Why it waits has no single cause (see
``core.timing.analysis``), so the step is predicted again with one cause left out after the other:
sums of gradients, then what comes from tiers, then hops between stages. What is left of the waiting
is the bubble, which the order of ops forces. So each part is what it adds to the step beyond what
compute hides, and together they are the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.base.values import expect
from penstock.core.cluster.parts import Tier
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.columns import CODES
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.prediction import Prediction
from penstock.planning.plans.spilling import Spill
from penstock.planning.plans.stage_plan import StagePlan, costs_of

_AT_ONCE = Tier()
"""A tier that takes no time."""


class SecondsOfRank(NamedTuple):
    """The seconds of a step on one rank; they add up to the step. Without a flush, of a minibatch
    in the steady state.

    Attributes:
        compute: forwards and backwards of its layers.
        collectives: what its tensor ranks exchange inside layers.
        launch: what every op takes beside its layers.
        recompute: forwards that run again.
        update: the optimizer's steps.
        hops: what messages between stages add.
        sums: what sums of gradients add beyond the backwards that they run beside.
        tiers: what stages, or activations, add that come from a tier or go there.
        bubble: waiting that the order of the schedule forces.
    """

    compute: float = 0.0
    collectives: float = 0.0
    launch: float = 0.0
    recompute: float = 0.0
    update: float = 0.0
    hops: float = 0.0
    sums: float = 0.0
    tiers: float = 0.0
    bubble: float = 0.0

    @property
    def busy(self) -> float:
        """How long the rank works."""
        return self.compute + self.collectives + self.launch + self.recompute + self.update


def seconds_of_ranks(plan: Plan) -> tuple[SecondsOfRank, ...]:
    """Say what each rank does with the seconds of a step.

    Raises:
        InputError: this is no plan.
    """
    expect(plan, Plan, "the plan", "make one with penstock.plan")
    step = plan.step_seconds
    work = [_work_of(plan, rank) for rank in range(plan.num_ranks)]
    least = max((rank.busy for rank in work), default=0.0)
    # From the step as it is to one in which ranks wait for nothing but each other.
    lengths, prediction = [step], plan.prediction
    for without in (_without_sums, _without_tiers, _without_hops):
        prediction = without(prediction)
        # Where messages share a card, one that goes sooner may make another one late.
        lengths.append(min(max(prediction.step_seconds, least), lengths[-1]))
    sums, tiers, hops = (longer - shorter for longer, shorter in pairwise(lengths))
    return tuple(
        rank._replace(
            sums=sums, tiers=tiers, hops=hops, bubble=step - rank.busy - sums - tiers - hops
        )
        for rank in work
    )


MARKS = dict(zip(SecondsOfRank._fields, "█▓░▒U→Σ⇄·", strict=True))
"""How a bar of characters shows each part."""

MEANINGS = {
    "compute": "forwards and backwards of layers",
    "collectives": "tensor ranks exchange inside layers",
    "launch": "every op takes beside its layers",
    "recompute": "forwards that run again",
    "update": "the optimizer's step",
    "hops": "messages between stages add",
    "sums": "sums of gradients add beyond what backwards hide",
    "tiers": "what comes and goes adds beyond what compute hides",
    "bubble": "idle, as the order of the schedule forces it",
}


def bar_of(parts: SecondsOfRank, width: int) -> str:
    """The parts of a step as a bar of so many characters.

    >>> bar_of(SecondsOfRank(compute=3.0, bubble=1.0), 8)
    '██████··'
    """
    whole, bar, done = sum(parts), "", 0.0
    for mark, seconds in zip(MARKS.values(), parts, strict=True):
        done += seconds
        bar += mark * (round(done / whole * width) - len(bar)) if whole else ""
    return bar


def slowest_of(ranks: Sequence[SecondsOfRank]) -> int:
    """The number of the rank that works longest."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank].busy)


def _work_of(plan: Plan, rank: int) -> SecondsOfRank:
    parts, costs = SecondsOfRank(), costs_of(plan.stages)
    schedule, updates = plan.placement, plan.updates_per_minibatch
    for index in schedule.stages_of[rank]:
        stage, counts = plan.stages[index], _microbatches(plan, rank, index)
        passes = sum(counts.values())
        took = sum(costs.duration(Op(index, kind, 0)) * n for kind, n in counts.items())
        again = stage.again_seconds * counts[Kind.RECOMPUTE]
        if stage.recompute == "layers":  # as parts of backwards
            again = stage.again_seconds * (counts[Kind.BACKWARD] + counts[Kind.BACKWARD_INPUT])
        launch = stage.launch_seconds * (passes - counts[Kind.RECOMPUTE])
        collectives = stage.collective_seconds * counts[Kind.FORWARD]
        parts = SecondsOfRank(
            parts.compute + took - again - launch - collectives,
            parts.collectives + collectives,
            parts.launch + launch,
            parts.recompute + again,
            parts.update + stage.update_seconds * updates[index],
        )
    return parts


_PASSES = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.RECOMPUTE,
)


def _microbatches(plan: Plan, rank: int, stage: int) -> dict[Kind, float]:
    """How many microbatches of a minibatch each kind of pass has at a stage of a rank."""
    columns, schedule = plan.placement.columns, plan.placement
    begin, end = columns.first[rank : rank + 2].tolist()
    own = columns.kind[begin:end][columns.stage[begin:end] == stage]
    counts = np.bincount(own, minlength=len(CODES))
    whole = float(columns.num_slices)
    if plan.versions.asynchronous:  # of a stream, only what belongs to a minibatch
        whole = int(counts[CODES[Kind.FORWARD]]) * schedule.copies[stage] / plan.num_microbatches
    others = plan.prediction.left_out / schedule.copies[stage]
    return {
        kind: float(counts[CODES[kind]]) / whole + (others if counts[CODES[kind]] else 0.0)
        for kind in _PASSES
    }


def _with_stages(prediction: Prediction, **changes: object) -> Prediction:
    stages: list[StagePlan] = [replace(stage, **changes) for stage in prediction.stages]
    return replaced(prediction, stages=tuple(stages))


def _without_sums(prediction: Prediction) -> Prediction:
    return _with_stages(prediction, reduce_seconds=0.0, reduce_parts=1, reduce_steps=())


def _without_hops(prediction: Prediction) -> Prediction:
    return _with_stages(prediction, hop_seconds=0.0, link_seconds=0.0)


def _without_tiers(prediction: Prediction) -> Prediction:
    spill, offload = prediction.spill, prediction.offload
    return replaced(
        prediction,
        spill=spill and Spill(tier=_AT_ONCE, memory_bytes=spill.memory_bytes, ahead=spill.ahead),
        offload=offload and replace(offload, tier=_AT_ONCE),
    )
