"""One rank's part in a rehearsal: a real worker with emulated stages, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import nn

from penstock.base.errors import PeerError, RunError
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.channels import other_end
from penstock.core.schedule.segment import Segment
from penstock.core.timing.simulator import simulate
from penstock.engine.model.microbatches import Weighting
from penstock.engine.model.optimizer_factory import Parameters
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.rank.program import RankProgram
from penstock.engine.run.rank.updater import StageParameters, Updater
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.transport import Transport
from penstock.training.rehearsal.emulated_stage import EmulatedOptimizer, EmulatedStage
from penstock.training.rehearsal.job import Job
from penstock.training.rehearsal.links import PlannedLinks
from penstock.training.rehearsal.waits import Alarm, LogicalWaits, RelativeWaits, Waits


class Failure(NamedTuple):
    """What a rank says last if it fails.

    Attributes:
        kind: the class of the error.
        message: its text.
        followed: it is only about another rank's failure.
    """

    kind: str
    message: str
    followed: bool


def play(
    job: Job, rank: int, connect: Callable[[], Transport], alarm: Alarm, channel: Connection
) -> None:
    """Perform a rank's ops whenever the conductor names a moment to start, until it names none.

    Says over ``channel`` that it is ready; after each step, start and end of every op; or what has
    gone wrong.
    """
    try:
        _perform_steps(job, rank, connect(), alarm, channel)
    except Exception as error:
        said = str(error) if isinstance(error, RunError) else f"rank {rank}: {error}"
        failure = Failure(type(error).__name__, said, isinstance(error, PeerError))
        with suppress(OSError):  # nobody listens any more
            channel.send(failure)


def _perform_steps(
    job: Job, rank: int, transport: Transport, alarm: Alarm, channel: Connection
) -> None:
    schedule = job.schedule()
    waits = _waits(job, schedule, alarm)
    worker = _worker(job, schedule, rank, transport, alarm, waits)
    segment = Segment.whole(schedule)
    count = schedule.num_microbatches
    position = StreamPosition(
        synchronous=not job.versions.asynchronous, more_follow=job.overlapping
    )
    nothing = torch.zeros(())
    channel.send(None)
    for step, start in enumerate(iter(partial(_next_start, channel), None)):
        minibatch = Minibatch(step, [nothing] * count, [nothing] * count, [1.0] * count)
        waits.begin(start)
        alarm.until(start)
        harvest = worker.run(segment, minibatch, position)
        pairs = zip(harvest.starts, harvest.ends, strict=True)
        channel.send([time for times in pairs for time in times])


def _next_start(channel: Connection) -> float | None:
    try:
        start: float | None = channel.recv()
    except EOFError:
        return None
    return start


def _waits(job: Job, schedule: Schedule, alarm: Alarm) -> Waits:
    if job.waits == "relative":
        return RelativeWaits(alarm, job.costs)
    planned = simulate(schedule, job.costs)
    return LogicalWaits(alarm, {span.op: span.end for span in planned.spans})


def _worker(
    job: Job, schedule: Schedule, rank: int, transport: Transport, alarm: Alarm, waits: Waits
) -> Worker:
    own = schedule.stages_of[rank]
    last = schedule.num_stages - 1
    stages = {stage: EmulatedStage(stage, stage == last, job.message_bytes, waits) for stage in own}
    weights = {stage: _weights(job.message_bytes) for stage in own}
    holdings = {
        stage: StageParameters({str(stage): parameter}, {}) for stage, parameter in weights.items()
    }
    shared = [
        SharedWeights(stage, schedule.ranks_of(stage), frozenset({stage}), (weights[stage],))
        for stage in own
        if schedule.copies[stage] > 1
    ]
    updates = [op for op in schedule.ranks[rank] if op.kind is Kind.UPDATE]

    def optimizer(parameters: Parameters) -> EmulatedOptimizer:
        ((stage, _),) = parameters.named()
        stands_for = [op for op in updates if op.stage == int(stage)]
        return EmulatedOptimizer(parameters, stands_for, waits)

    # No loss: what a last stage gives is one already. Nothing is clipped, but all ranks ask.
    clip_norm = None if job.updates == "separate" else 1.0
    recipe = Recipe(
        optimizer=optimizer,
        clip_norm=clip_norm,
        post_validate=job.overlapping,
        versions=job.versions,
        weighting=Weighting("sum"),  # gradients are never computed, and dividing them takes time
    )
    links = _planned_links(job, schedule, rank, transport, alarm, shared)
    updater = Updater(rank, schedule.num_ranks, holdings, links, recipe, shared)
    return Worker(rank, stages, links, recipe, updater)


def _weights(num_bytes: int) -> nn.Parameter:
    """A stage's weights with their gradient, which its copies exchange."""
    weights = nn.Parameter(torch.zeros(-(-num_bytes // 4)))
    weights.grad = torch.zeros_like(weights)
    return weights


def _planned_links(
    job: Job,
    schedule: Schedule,
    rank: int,
    transport: Transport,
    alarm: Alarm,
    shared: Sequence[SharedWeights],
) -> Transport:
    """The transport, slowed down where the plan's links are slower."""
    edges = RankProgram(Segment.whole(schedule), rank).edges.items()
    hops = {edge: _hop(job, op) for op, edge in edges}
    busy = {edge: job.costs.occupies(min(op.stage, other_end(op).stage)) for op, edge in edges}
    for weights in shared:
        # What is planned is all of the sum: its first messages take as long, its second no time.
        update = Op(weights.tag, Kind.UPDATE, 0)
        for other in weights.others(rank):
            for edge in ((rank, other), (other, rank)):
                hops[weights.edge(*edge, Purpose.PART)] = job.costs.delay(update, update)
    if not any(hops.values()):
        return transport
    return PlannedLinks(transport, alarm, hops, busy)


def _hop(job: Job, op: Op) -> float:
    """Seconds that the message takes which a send sends or a receive receives."""
    return job.costs.delay(op, other_end(op))
