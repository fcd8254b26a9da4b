"""The process that forks the ranks of a rehearsal, and a rank's part in it: a real worker with
emulated stages, step after step.

``python -m penstock.training.rehearsal.launch``, with the descriptors of the ranks' channels. It is
a process of its own, because only one without threads can be forked safely, and who asks for a
rehearsal may have any number of them. It reads a ``RehearsalJob`` from standard input, writes which
rank has died to standard output, and ends all ranks when its standard input is closed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
from torch import nn

from penstock.base.errors import PeerError, RunError
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.op import other_end
from penstock.core.schedule.rounds import Segment
from penstock.core.timing.simulator import simulate
from penstock.engine.model.microbatches import Weighting
from penstock.engine.model.optimizer_factory import Parameters
from penstock.engine.reduce.reducer import Purpose, SharedWeights
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.rank.program import RankProgram
from penstock.engine.run.rank.updater import StageParameters, Updater
from penstock.engine.run.rank.worker import Worker
from penstock.engine.run.recipe import Recipe
from penstock.engine.transport import SharedMemoryExchange, Transport
from penstock.training.rehearsal.conductor import RehearsalJob, ReportedFailure
from penstock.training.rehearsal.emulated import (
    Alarm,
    EmulatedOptimizer,
    EmulatedStage,
    PlannedLinks,
    Waits,
)


def main() -> None:
    """Rehearse the job on standard input."""
    job = RehearsalJob.from_json(sys.stdin.buffer.readline())
    channels = [Connection(int(descriptor)) for descriptor in sys.argv[1:]]
    # Before the first kernel: a pool of threads would not survive the fork.
    torch.set_num_threads(1)
    # The first optimizer makes torch load what takes a second: once here, not once in every rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    try:
        with _ranks(job, channels) as ranks:
            _tell_deaths(ranks)
    except (RunError, OSError) as error:
        _tell(str(error))


@contextmanager
def _ranks(job: RehearsalJob, channels: list[Connection]) -> Iterator[list[ForkProcess]]:
    """Fork all ranks; whatever happens, none is left in the end."""
    context = multiprocessing.get_context("fork")
    exchange = SharedMemoryExchange(len(channels), job.deadline_seconds)
    alarm = Alarm.calibrated()
    gc.freeze()  # what is there stays: collections in the ranks need not copy its pages
    ranks: list[ForkProcess] = []
    try:
        for number in range(len(channels)):
            connect = partial(exchange.transport, number)
            mine = job, number, connect, alarm, channels
            process = context.Process(target=_be_rank, args=mine, daemon=True)
            process.start()
            ranks.append(process)
        for channel in channels:
            channel.close()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        exchange.close()


def _be_rank(
    job: RehearsalJob,
    rank: int,
    connect: Callable[[], Transport],
    alarm: Alarm,
    channels: list[Connection],
) -> None:
    """In the fork: hold open nothing by whose closing the end of another process is seen."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for channel in channels[:rank] + channels[rank + 1 :]:
        channel.close()
    play(job, rank, connect, alarm, channels[rank])


def _tell_deaths(ranks: Sequence[ForkProcess]) -> None:
    """Say of each rank that ends as it must not how that was, until standard input is closed."""
    asker, running = sys.stdin.fileno(), {process.sentinel: process for process in ranks}
    while asker not in (ready := wait([asker, *running])):
        for process in [running.pop(end) for end in ready if isinstance(end, int)]:
            process.join()
            if death := _death(ranks.index(process), process.exitcode):
                _tell(death)


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _death(rank: int, code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
        return f"rank {rank}'s process was ended by {name}{hint},"
    return f"rank {rank}'s process ended with exit code {code}" if code else ""


def play(
    job: RehearsalJob,
    rank: int,
    connect: Callable[[], Transport],
    alarm: Alarm,
    channel: Connection,
) -> None:
    """Perform a rank's ops whenever the conductor names a moment to start, until it names none.

    Says over ``channel`` that it is ready; after each step, start and end of every op; or what has
    gone wrong.
    """
    try:
        _perform_steps(job, rank, connect(), alarm, channel)
    except Exception as error:
        said = str(error) if isinstance(error, RunError) else f"rank {rank}: {error}"
        failure = ReportedFailure(type(error).__name__, said, isinstance(error, PeerError))
        with suppress(OSError):  # nobody listens any more
            channel.send(failure)


def _perform_steps(
    job: RehearsalJob, rank: int, transport: Transport, alarm: Alarm, channel: Connection
) -> None:
    schedule = job.schedule()
    ends = None
    if job.waits == "logical":
        ends = {span.op: span.end for span in simulate(schedule, job.costs).spans}
    waits = Waits(alarm, job.costs, ends)
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
        waits.start = start
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


def _worker(
    job: RehearsalJob,
    schedule: Schedule,
    rank: int,
    transport: Transport,
    alarm: Alarm,
    waits: Waits,
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
    job: RehearsalJob,
    schedule: Schedule,
    rank: int,
    transport: Transport,
    alarm: Alarm,
    shared: Sequence[SharedWeights],
) -> Transport:
    """The transport, slowed down where the plan's links are slower."""
    edges = RankProgram(Segment.whole(schedule), rank).edges.items()
    hops = {edge: job.costs.delay(op, other_end(op)) for op, edge in edges}
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


if __name__ == "__main__":
    main()
