"""Prove that a schedule can run before a device is touched.

Four proofs: every piece of work is there exactly once; all work of one (stage, microbatch) is on
one rank; where stages or activations leave memory, every op finds there what it needs; and some
order of events satisfies every rank's order and every data dependency, also when a channel between
two stages holds only ``capacity`` messages, or when messages pass in the order of their sends and
nothing holds them until their receives are posted (a capacity of 0), as where accelerators exchange
them directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.base.values import expect
from penstock.core.schedule.columns import Columns, Longs
from penstock.core.schedule.lower import add_communication, last_gradients
from penstock.core.schedule.messages import bounded, messages_of
from penstock.core.schedule.needs import (
    MOST_LISTED,
    Needs,
    Numbers,
    Walk,
    check_once,
    listed,
    needs_of,
)
from penstock.core.schedule.offload import check_offload
from penstock.core.schedule.op import (
    COMMUNICATION,
    COMPUTE,
    OF_A_ROUND,
    OTHER_END,
    Kind,
    Op,
    check_capacity,
    other_end,
)
from penstock.core.schedule.residence import check_residence
from penstock.core.schedule.schedule import Planned, Schedule, is_planned


def check(schedule: Schedule | Planned, capacity: int | None = None) -> None:
    """Raise unless ``schedule`` is complete, unambiguous and free of deadlock.

    Args:
        schedule: compute only, or lowered; or a ``Plan``, whose schedule is meant.
        capacity: how many messages a channel holds before its sender waits; ``None`` is unlimited.
            Bounds the ``SEND`` ops of a lowered schedule; to a schedule without any, communication
            is added as ``schedule.lower.add_communication`` does for this capacity. 0: no sender
            waits, but between two ranks messages pass in the order in which they are sent, each
            once its receive is posted.

    Raises:
        ScheduleError: naming the ops concerned.
        InputError: ``capacity`` is no whole number ≥ 0.
    """
    if is_planned(schedule):
        schedule = schedule.build_schedule()
    expect(schedule, Schedule, "the schedule", "build one with penstock.schedules.build")
    assert isinstance(schedule, Schedule)  # nothing else is expected
    check_capacity(capacity)
    columns = schedule.columns
    numbers = Numbers(columns)
    if not (numbers.fits and numbers.once):
        check_once(columns)
    _check_complete(schedule, numbers)
    numbers.check()
    _check_one_rank(columns)
    _check_memory(numbers)
    _check_updates(schedule, numbers)
    _check_communication(schedule, numbers)
    check_residence(schedule)
    check_offload(schedule)
    _check_progress(schedule, needs_of(columns))
    if capacity is not None:
        _check_room(schedule, capacity)


def _check_complete(schedule: Schedule, numbers: Numbers) -> None:
    columns = schedule.columns
    if not columns.count:
        raise ScheduleError("the schedule has no ops")
    idle = np.flatnonzero(np.diff(columns.first) == 0)
    if idle.size:
        raise ScheduleError(f"rank {idle[0]} has no ops; leave the rank out, or give it a stage")
    whole = (Kind.FORWARD, Kind.BACKWARD)
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    forward = full = inputs = weights = np.zeros(1, np.bool_)
    if numbers.fits:
        forward, full, inputs, weights = (
            numbers.there(kind)[:, : columns.num_microbatches] for kind in (*whole, *halves)
        )
    if not (forward & (full | (inputs & weights))).all():
        # A mistyped number (0F99999999) makes for endless missing ops: look for no more than are
        # shown.
        missing = list(islice(_missing(schedule), MOST_LISTED + 1))
        if missing:
            raise ScheduleError(
                f"{listed(missing)} missing: every stage runs F and then B (or I and W) of each of "
                f"the {schedule.num_microbatches} microbatches"
            )
    doubled = np.argwhere(full & (inputs | weights)).tolist()
    if doubled:
        ops = [Op(stage, Kind.BACKWARD, *rest) for stage, *rest in doubled]
        raise ScheduleError(f"{listed(ops)} also split into I or W; use either B or the pair I, W")


def _missing(schedule: Schedule) -> Iterator[Op]:
    there = frozenset(op for ops in schedule.ranks for op in ops)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for slice_ in range(schedule.num_slices):
                forward, full, *halves = (
                    Op(stage, kind, microbatch, slice_)
                    for kind in (
                        Kind.FORWARD,
                        Kind.BACKWARD,
                        Kind.BACKWARD_INPUT,
                        Kind.BACKWARD_WEIGHT,
                    )
                )
                if forward not in there:
                    yield forward
                if full not in there:
                    absent = [op for op in halves if op not in there]
                    yield from absent if len(absent) < 2 else [full]


def _check_one_rank(columns: Columns) -> None:
    microbatches = 1 + int(columns.microbatch.max())
    places = columns.stage.astype(np.int64) * microbatches + columns.microbatch
    home = np.zeros(columns.num_stages * microbatches, np.int32)
    home[places] = columns.rank
    spread = places[home[places] != columns.rank]
    if spread.size:
        of_these = np.isin(places, spread)
        place = int(places[of_these][0])
        stage, microbatch = divmod(place, microbatches)
        ranks = np.unique(columns.rank[places == place]).tolist()
        raise ScheduleError(
            f"stage {stage}, microbatch {microbatch} is spread over ranks {ranks}; "
            "its forward and backward must share one rank, where its activations are"
        )


def _check_memory(numbers: Numbers) -> None:
    """Where free points are explicit, nothing may be kept for ever; where a stage recomputes, it
    does so for every microbatch."""
    columns = numbers.columns
    forwards = np.flatnonzero(columns.are_of({Kind.FORWARD}))
    frees = Kind.FREE in columns.kinds
    kept = (numbers.other(forwards, Kind.FREE) == numbers.absent) & frees
    recomputing = np.isin(columns.stage[forwards], columns.stages_with({Kind.RECOMPUTE}))
    gone = (numbers.other(forwards, Kind.RECOMPUTE) == numbers.absent) & recomputing
    for number in forwards[kept | gone][:1].tolist():
        op = columns.op(number)
        free, again = (op._replace(kind=kind) for kind in (Kind.FREE, Kind.RECOMPUTE))
        if kept[forwards == number].any():
            raise ScheduleError(f"{op} is never freed: {free} is missing, though others are there")
        raise ScheduleError(
            f"{op} keeps only its input, as stage {op.stage} recomputes, but {again} is missing"
        )


def _check_updates(schedule: Schedule, numbers: Numbers) -> None:
    """Once any gradients are reduced or applied, each rank must do so with all of its own: behind
    the last of them, and if other ranks hold copies of the stage, together with these."""
    columns = schedule.columns
    if not OF_A_ROUND & columns.kinds:
        return
    ends = columns.first.tolist()
    for gradient in last_gradients(columns):
        needed = [Kind.REDUCE] * (schedule.copies[gradient.stage] > 1)
        needed += [Kind.UPDATE] * (Kind.UPDATE in columns.kinds)
        for kind in needed:
            number = numbers.number(gradient.stage, kind, gradient.microbatch)
            if not gradient.made < number < ends[gradient.rank + 1]:
                op = Op(gradient.stage, kind, gradient.microbatch)
                raise ScheduleError(
                    f"rank {gradient.rank} needs {op} behind {columns.op(gradient.made)}, its last "
                    f"gradient of stage {gradient.stage}"
                )


def _check_communication(schedule: Schedule, numbers: Numbers) -> None:
    """Once any message is explicit, each one that crosses ranks must be: both of its ends."""
    columns = schedule.columns
    if not COMMUNICATION & columns.kinds:
        return
    wrong = []
    for kind, ops, needs in numbers.rule():
        if kind in COMMUNICATION:
            stages, other = OTHER_END[kind]
            wrong += ops[numbers.other(ops, other, stages) == numbers.absent].tolist()
        elif kind in COMPUTE:
            for need in needs:
                there = need < numbers.nothing
                crosses = columns.rank[need[there]] != columns.rank[ops[there]]
                wrong += ops[there][crosses].tolist()
    if not wrong:
        return
    op, rank = columns.op(min(wrong)), int(columns.rank[min(wrong)])
    if op.kind in COMMUNICATION:
        raise ScheduleError(f"rank {rank} has {op}, but no rank has its other end, {other_end(op)}")
    needed = next(need for need in schedule.dependencies(op) if schedule.where[need] != rank)
    raise ScheduleError(
        f"rank {rank} runs {op}, which needs {needed} of rank {schedule.where[needed]}, but "
        "nothing receives it"
    )


def _check_progress(schedule: Schedule, needs: Needs) -> None:
    walk = Walk(schedule.columns.first, needs)
    if not walk.to_the_end():
        raise deadlock(schedule, walk.waiting(), needs)


def _check_room(schedule: Schedule, capacity: int) -> None:
    """See that channels that hold so many messages are enough, as ``add_communication`` lays
    messages out, where there are none."""
    if not COMMUNICATION & schedule.kinds:
        schedule = add_communication(schedule, capacity)
    columns = schedule.columns
    needs, _ = bounded(columns, messages_of(columns), capacity)
    try:
        _check_progress(schedule, needs)
    except ScheduleError as error:
        where, otherwise = f"with channels that hold {capacity} message(s)", "allow more"
        if capacity == 0:
            where = "where messages between two ranks pass in the order of their sends"
            otherwise = "receive them in that order"
        raise ScheduleError(
            f"{where}, {error}; {otherwise}, or move receives forward with "
            f"schedule.lower.add_communication(…, capacity={capacity})"
        ) from None


def deadlock(schedule: Schedule, waiting: Longs, needs: Needs) -> ScheduleError:
    """Why ranks do not come to their ends.

    Args:
        schedule: of the ranks.
        waiting: the number of the op that waits at each rank that is not at its end.
        needs: what ops wait for.
    """
    columns = schedule.columns
    reached = columns.first[1:].copy()
    reached[columns.rank[waiting]] = waiting
    waits = []
    for number in waiting.tolist():
        op, rank = columns.op(number), int(columns.rank[number])
        for need in needs.of(number):
            if need == needs.absent:
                absent = next(n for n in schedule.dependencies(op) if n not in schedule.where)
                return ScheduleError(
                    f"rank {rank}: {op} needs {absent}, which is not in the schedule"
                )
            if need < needs.nothing and need >= reached[columns.rank[need]]:
                waits.append(f"rank {rank} waits to run {op} for {columns.op(need)}")
                break
    return ScheduleError(f"schedule deadlocks: {'; '.join(waits)}")
