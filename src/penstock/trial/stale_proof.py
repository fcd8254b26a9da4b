"""The reference of a plan with stale updates: the replay of its pipeline's journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.summation.staleness import StaleStream
from penstock.planning.plans import Plan
from penstock.trial.reference.stale_replay import CopyOf, StaleReplay
from penstock.trial.workload import Batch, Workload

Journal = Mapping[int, StaleStream]
"""Of one stream, by stage, what the updates of a parameter server were made of."""


def copies_of(plan: Plan) -> CopyOf:
    """Which copy of a stage runs a microbatch, as the plan's schedule says."""
    schedules: dict[int, Schedule] = {}

    def copy_of(stage: int, microbatch: int, count: int) -> int:
        count = max(count, plan.num_microbatches)  # what a minibatch lacks counts for nothing
        if count not in schedules:
            schedules[count] = plan.build_schedule(count)
        rank = schedules[count].where[Op(stage, Kind.FORWARD, microbatch)]
        return plan.placement.ranks_of(stage).index(rank)

    return copy_of


def replayed(
    twin: nn.Module,
    plan: Plan,
    workload: Workload,
    streams: Sequence[Sequence[Batch]],
    journals: Sequence[Journal],
    seed: int,
) -> list[Tensor]:
    """The losses of all minibatches; the twin has the weights afterwards.

    Args:
        streams: the minibatches of each stream.
        journals: of each stream.
        seed: of random layers.
    """
    replay = StaleReplay(
        twin,
        [len(stage.layers) for stage in plan.stages],
        plan.num_microbatches,
        workload.loss,
        workload.optimizer,
        copy_of=copies_of(plan),
        seed=seed,
    )
    pairs = zip(streams, journals, strict=True)
    return [loss for batches, journal in pairs for loss in replay.train(batches, journal)]


def latest(journals: Sequence[Journal]) -> int:
    """By how many updates the latest gradient was late."""
    delays = (stream.delays for journal in journals for stream in journal.values())
    return max((delay for own in delays for delay in own.values()), default=0)


def too_late(journals: Sequence[Journal], most_stale: int) -> list[tuple[int, int]]:
    """(stage, minibatch) of gradients that were later than they may be."""
    return [
        (stage, contribution.minibatch)
        for journal in journals
        for stage, stream in journal.items()
        for contribution, delay in stream.delays.items()
        if delay > most_stale
    ]
