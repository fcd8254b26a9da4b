"""Lower bounds of the seconds of a minibatch: they decide what need not be simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, lcm

from penstock.planning.planner.setting import Setting
from penstock.planning.plans.stage_plan import StagePlan


def least_step_seconds(
    stages: Sequence[StagePlan], setting: Setting, num_microbatches: int
) -> float:
    """No step with a flush is shorter: the first microbatch must reach each rank, the rank must do
    its work, and where a rank has one stage and whole backwards, the last gradient must travel
    back."""
    # The first slice of a microbatch need not wait for the others.
    share = 1 / setting.schedule.num_slices
    way_in = _way([share * stage.forward_seconds + stage.hop_seconds for stage in stages])
    way_back = _way([share * stage.backward_input_seconds + stage.hop_seconds for stage in stages])
    returns = setting.is_single and not setting.schedule.splits_backward
    bounds = []
    for rank_stages in setting.schedule.stages_of:
        work = sum(
            ceil(num_microbatches / setting.replicas_of(stage)) * stages[stage].busy_seconds
            for stage in rank_stages
        )
        updates = sum(stages[stage].update_seconds for stage in rank_stages)
        first = rank_stages[0]
        bounds.append(way_in[first] + work + updates)
        if returns and not setting.replicas:
            bounds.append(way_in[first] + work + way_back[first])
    return max(bounds)


def least_steady_seconds(
    stages: Sequence[StagePlan], setting: Setting, num_microbatches: int
) -> float:
    """No minibatch without a flush is shorter: a full pipeline is as fast as its slowest rank or
    link."""
    replicas = [setting.replicas_of(index) for index in range(len(stages))]
    ranks = (
        num_microbatches * stage.busy_seconds / count
        for stage, count in zip(stages, replicas, strict=True)
    )
    # Microbatches take turns on the pairs of replicas at the ends of a cut.
    links = (
        num_microbatches * stage.link_seconds / lcm(*ends)
        for stage, ends in zip(stages, pairwise(replicas), strict=False)
    )
    return max(*ranks, *links, 0.0)


def _way(seconds: Sequence[float]) -> list[float]:
    """When each stage is reached if the ones before it take so long."""
    return list(accumulate(seconds, initial=0.0))
