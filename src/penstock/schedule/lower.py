"""Passes: pure functions from schedule to schedule.

A family emits compute only. These add what running it takes, without changing the order of the
compute ops.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.op import COMPUTE, RELEASING, Kind, Op
from penstock.schedule.schedule import Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Put a send right behind each op whose result another rank needs, and a receive right before
    the op that needs it.

    Receives are not front-loaded: one is posted only when its op is next, so that no buffers pile
    up and no background receive competes with compute.
    """

    def lowered(rank: int, ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            receive, send = _messages(schedule, op, rank)
            yield from receive
            yield op
            yield from send

    ranks = (lowered(rank, ops) for rank, ops in enumerate(schedule.ranks))
    return Schedule.of(ranks, schedule.name)


def _messages(schedule: Schedule, op: Op, rank: int) -> tuple[list[Op], list[Op]]:
    """What ``op`` receives before and sends after, on ``rank``."""
    stage, kind, microbatch = op
    where, last = schedule.where, schedule.num_stages - 1

    def elsewhere(stage: int) -> bool:
        return where[Op(stage, Kind.FORWARD, microbatch)] != rank

    receive, send = [], []
    if kind is Kind.FORWARD:
        if stage > 0 and elsewhere(stage - 1):
            receive = [Op(stage, Kind.RECV_FORWARD, microbatch)]
        if stage < last and elsewhere(stage + 1):
            send = [Op(stage, Kind.SEND_FORWARD, microbatch)]
    elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        if stage < last and elsewhere(stage + 1):
            receive = [Op(stage, Kind.RECV_BACKWARD, microbatch)]
        if stage > 0 and elsewhere(stage - 1):
            send = [Op(stage, Kind.SEND_BACKWARD, microbatch)]
    return receive, send


def add_update(schedule: Schedule) -> Schedule:
    """Put the flush's weight update of each stage behind its last weight gradient.

    Apply it before ``add_communication``, so that the last gradient is sent before the update.
    """

    def lowered(ops: tuple[Op, ...]) -> Iterator[Op]:
        last = {op.stage: op for op in ops if op.kind in RELEASING}
        for op in ops:
            yield op
            if last.get(op.stage) is op:
                yield Op(op.stage, Kind.UPDATE, schedule.num_microbatches - 1)

    return Schedule.of(map(lowered, schedule.ranks), schedule.name)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward ops alone: what evaluation runs."""
    ranks = (tuple(op for op in ops if op.kind is Kind.FORWARD) for ops in schedule.ranks)
    return Schedule.of(ranks, f"{schedule.name} forward")


def compute_only(schedule: Schedule) -> Schedule:
    """Undo the passes: the compute ops in their order."""
    ranks = (tuple(op for op in ops if op.kind in COMPUTE) for ops in schedule.ranks)
    return Schedule.of(ranks, schedule.name)
