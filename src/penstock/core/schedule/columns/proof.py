"""The proofs of ``check`` on whole columns: for schedules of millions of ops.

They say yes or no. What is wrong, and in which words, ``check`` finds out op by op.
"""

from __future__ import annotations

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.core.schedule.channels import OTHER_END
from penstock.core.schedule.columns.columns import Columns
from penstock.core.schedule.columns.messages import bounded, hoist, messages_of
from penstock.core.schedule.columns.needs import Numbers, needs_of
from penstock.core.schedule.columns.walk import Walk
from penstock.core.schedule.offload import check_offload
from penstock.core.schedule.op import (
    COMMUNICATION,
    COMPUTE,
    OF_A_ROUND,
    RELEASING,
    RESIDENCE,
    STASHES,
    Kind,
)
from penstock.core.schedule.residence import check_residence
from penstock.core.schedule.schedule import Schedule


def is_proven(columns: Columns, capacity: int | None = None) -> bool:
    """Whether a schedule passes every check that ``check`` makes.

    Args:
        columns: the schedule.
        capacity: how many messages a channel holds before its sender waits; ``None`` is unlimited.
    """
    numbers = Numbers(columns)
    return bool(
        numbers.fits
        and numbers.once
        and _complete(numbers)
        and _one_rank(columns)
        and _memory(numbers)
        and _updates(numbers)
        and _communication(numbers)
        and _residence(columns)
        and _progress(numbers)
        and (capacity is None or _room(columns, capacity))
    )


def _complete(numbers: Numbers) -> bool:
    columns = numbers.columns
    if not columns.count or not np.diff(columns.first).all():
        return False
    forward, full, inputs, weights = (
        numbers.there(kind)[:, : columns.num_microbatches]
        for kind in (
            Kind.FORWARD,
            Kind.BACKWARD,
            Kind.BACKWARD_INPUT,
            Kind.BACKWARD_WEIGHT,
        )
    )
    # Both halves, and exactly one of these and the whole.
    return bool((forward & (inputs == weights) & (full != inputs)).all())


def _one_rank(columns: Columns) -> bool:
    microbatches = 1 + int(columns.microbatch.max())
    places = columns.stage.astype(np.int64) * microbatches + columns.microbatch
    home = np.zeros(columns.num_stages * microbatches, np.int32)
    home[places] = columns.rank
    return bool((home[places] == columns.rank).all())


def _memory(numbers: Numbers) -> bool:
    columns = numbers.columns
    forward, free, again = map(numbers.there, (Kind.FORWARD, Kind.FREE, Kind.RECOMPUTE))
    if Kind.FREE in columns.kinds and not free[forward].all():
        return False
    recomputed = columns.stage[columns.are_of({Kind.RECOMPUTE})]
    stages = np.unique(recomputed)
    return bool((again[stages] >= forward[stages]).all())


def _residence(columns: Columns) -> bool:
    if not (RESIDENCE | STASHES) & set(columns.kinds):
        return True
    try:  # op by op, as a rank performs them
        schedule = Schedule.of_columns(columns)
        check_residence(schedule)
        check_offload(schedule)
    except ScheduleError:
        return False
    return True


def _updates(numbers: Numbers) -> bool:
    columns = numbers.columns
    if not OF_A_ROUND & set(columns.kinds):
        return True
    # One group for each stage of each rank.
    gradients = np.flatnonzero(columns.are_of(RELEASING))
    group = columns.rank[gradients].astype(np.int64) * columns.num_stages
    group += columns.stage[gradients]
    groups, member = np.unique(group, return_inverse=True)
    last, newest = np.zeros((2, len(groups)), np.int64)
    np.maximum.at(last, member, gradients)
    np.maximum.at(newest, member, columns.microbatch[gradients])
    rank, stage = np.divmod(groups, columns.num_stages)
    shared = np.array([numbers.copies[index] > 1 for index in stage.tolist()], np.bool_)
    for kind, wanted in ((Kind.REDUCE, shared), (Kind.UPDATE, Kind.UPDATE in columns.kinds)):
        number = numbers.at(stage, kind, newest)
        behind = (number > last) & (number < columns.first[rank + 1])
        if not (behind | ~np.broadcast_to(wanted, behind.shape)).all():
            return False
    return True


def _communication(numbers: Numbers) -> bool:
    columns = numbers.columns
    if not COMMUNICATION & set(columns.kinds):
        return True
    for kind, ops, needs in numbers.rule():
        if kind in COMMUNICATION:
            stages, other = OTHER_END[kind]
            if (numbers.other(ops, other, stages) == numbers.absent).any():
                return False
        elif kind in COMPUTE:
            for need in needs:
                there = need < numbers.nothing
                if (columns.rank[need[there]] != columns.rank[ops[there]]).any():
                    return False
    return True


def _progress(numbers: Numbers) -> bool:
    needs = needs_of(numbers.columns, numbers)
    return needs is not None and Walk(numbers.columns.first, needs).to_the_end()


def _room(columns: Columns, capacity: int) -> bool:
    """Whether channels that hold so much are enough; as ``add_communication`` lays messages out,
    where there are none."""
    messages = messages_of(columns)
    if messages is None:
        return False
    needs = bounded(columns, messages, capacity)
    walk = Walk(messages.first, needs)
    if not COMMUNICATION & columns.kinds:
        hoist(walk, messages, needs)
    return walk.to_the_end()
