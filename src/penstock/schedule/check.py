"""Prove that a schedule can run before a device is touched.

Three proofs: every piece of work is there exactly once; all work of one (stage, microbatch) is on
one rank; and some order of events satisfies every rank's order and every data dependency, also when
a channel between two stages holds only ``capacity`` messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice

from penstock.errors import InputError, ScheduleError
from penstock.schedule.op import COMMUNICATION, COMPUTE, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.values import expect

_MOST_LISTED = 5


def check(schedule: Schedule, capacity: int | None = None) -> None:
    """Raise unless ``schedule`` is complete, unambiguous and free of deadlock.

    Args:
        schedule: compute only, or with communication lowered into it.
        capacity: how many messages a channel holds before its sender waits; ``None`` is unlimited.
            Bounds the ``SEND`` ops of a lowered schedule.

    Raises:
        ScheduleError: naming the ops concerned.
        InputError: ``capacity`` is below 1.
    """
    expect(schedule, Schedule, "the schedule", "build one with penstock.schedules.build")
    if capacity is not None and capacity < 1:
        raise InputError(f"capacity is {capacity}, but a channel must hold at least 1 message")
    _check_once(schedule)
    _check_complete(schedule)
    _check_one_rank(schedule)
    _check_communication(schedule)
    _check_progress(schedule, capacity)


def _check_once(schedule: Schedule) -> None:
    counts = Counter(op for ops in schedule.ranks for op in ops)
    repeated = [op for op, count in counts.items() if count > 1]
    if repeated:
        raise ScheduleError(
            f"{_listed(repeated)} stand(s) more than once; every op must stand exactly once"
        )


def _check_complete(schedule: Schedule) -> None:
    if not schedule.where:
        raise ScheduleError("the schedule has no ops")
    idle = [rank for rank, ops in enumerate(schedule.ranks) if not ops]
    if idle:
        raise ScheduleError(f"rank {idle[0]} has no ops; leave the rank out, or give it a stage")
    # A mistyped number (0F99999999) makes for endless missing ops: look for no more than are shown.
    missing = list(islice(_missing(schedule), _MOST_LISTED + 1))
    if missing:
        raise ScheduleError(
            f"{_listed(missing)} missing: every stage runs F and then B (or I and W) of each of "
            f"the {schedule.num_microbatches} microbatches"
        )
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    doubled = [
        op
        for op in schedule.where
        if op.kind is Kind.BACKWARD and any(op._replace(kind=k) in schedule.where for k in halves)
    ]
    if doubled:
        raise ScheduleError(
            f"{_listed(doubled)} also split into I or W; use either B or the pair I, W"
        )


def _missing(schedule: Schedule) -> Iterator[Op]:
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            has = {kind for kind in COMPUTE if Op(stage, kind, microbatch) in schedule.where}
            halves = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} & has
            if Kind.FORWARD not in has:
                yield Op(stage, Kind.FORWARD, microbatch)
            if Kind.BACKWARD not in has and not halves:
                yield Op(stage, Kind.BACKWARD, microbatch)
            elif Kind.BACKWARD not in has and len(halves) == 1:
                other = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT} - halves
                yield Op(stage, other.pop(), microbatch)


def _check_one_rank(schedule: Schedule) -> None:
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for op, rank in schedule.where.items():
        ranks[op.stage, op.microbatch].add(rank)
    for (stage, microbatch), places in ranks.items():
        if len(places) > 1:
            raise ScheduleError(
                f"stage {stage}, microbatch {microbatch} is spread over ranks {sorted(places)}; "
                "its forward and backward must share one rank, where its activations are"
            )


def _check_communication(schedule: Schedule) -> None:
    """Once any message is explicit, each one that crosses ranks must be: both of its ends."""
    if not any(op.kind in COMMUNICATION for op in schedule.where):
        return
    ends = {
        Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1), Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
        Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
    }  # fmt: skip
    for op, rank in schedule.where.items():
        if op.kind in ends:
            kind, offset = ends[op.kind]
            other = Op(op.stage + offset, kind, op.microbatch)
            if other not in schedule.where:
                raise ScheduleError(f"rank {rank} has {op}, but no rank has its other end, {other}")
        elif op.kind in COMPUTE:
            for needed in schedule.dependencies(op):
                if schedule.where[needed] != rank:
                    raise ScheduleError(
                        f"rank {rank} runs {op}, which needs {needed} of rank "
                        f"{schedule.where[needed]}, but nothing receives it"
                    )


def _check_progress(schedule: Schedule, capacity: int | None) -> None:
    room = dict(_room_needed(schedule, capacity)) if capacity is not None else {}
    for _ in executable_order(schedule, room):
        pass


def executable_order(
    schedule: Schedule, also_needs: Mapping[Op, Op] | None = None
) -> Iterator[tuple[int, Op]]:
    """Yield every (rank, op) so that each comes after all it depends on and its rank's order holds.

    Args:
        schedule: any ops, also an incomplete set such as the forwards alone.
        also_needs: one further dependency per op.

    Raises:
        ScheduleError: an op needs one that is not there, or ranks wait for each other for ever.
    """
    also_needs = also_needs or {}
    done: set[Op] = set()
    position = [0] * schedule.num_ranks
    waiting: dict[Op, list[int]] = defaultdict(list)
    runnable = list(reversed(range(schedule.num_ranks)))
    while runnable:
        rank = runnable.pop()
        ops = schedule.ranks[rank]
        while position[rank] < len(ops):
            op = ops[position[rank]]
            needed = schedule.dependencies(op)
            if op in also_needs:
                needed = (*needed, also_needs[op])
            missing = next((one for one in needed if one not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, op
            done.add(op)
            position[rank] += 1
            runnable += waiting.pop(op, ())
    if waiting:
        raise _deadlock(schedule, waiting, position)


def _deadlock(
    schedule: Schedule, waiting: Mapping[Op, list[int]], position: list[int]
) -> ScheduleError:
    absent = next((needed for needed in waiting if needed not in schedule.where), None)
    if absent is not None:
        rank = waiting[absent][0]
        op = schedule.ranks[rank][position[rank]]
        return ScheduleError(f"rank {rank}: {op} needs {absent}, which is not in the schedule")
    stuck = sorted(
        (rank, schedule.ranks[rank][position[rank]], needed)
        for needed, ranks in waiting.items()
        for rank in ranks
    )
    waits = "; ".join(f"rank {rank} waits to run {op} for {needed}" for rank, op, needed in stuck)
    return ScheduleError(f"schedule deadlocks: {waits}")


def _room_needed(schedule: Schedule, capacity: int) -> Iterator[tuple[Op, Op]]:
    """(send, receive) pairs: the n-th send of a channel waits for receive number n − capacity.

    Channels deliver in sending order, so the messages are counted in that order.
    """
    channels: dict[tuple[int, Kind], list[Op]] = defaultdict(list)
    for ops in schedule.ranks:
        for op in ops:
            if op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                channels[op.stage, op.kind].append(op)
    for (stage, kind), sends in channels.items():
        received = Kind.RECV_FORWARD if kind is Kind.SEND_FORWARD else Kind.RECV_BACKWARD
        target = stage + 1 if kind is Kind.SEND_FORWARD else stage - 1
        for index in range(capacity, len(sends)):
            yield sends[index], Op(target, received, sends[index - capacity].microbatch)


def _listed(ops: list[Op]) -> str:
    names = ", ".join(map(str, sorted(ops)[:_MOST_LISTED]))
    return names + (" and more" if len(ops) > _MOST_LISTED else "")
