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
from penstock.schedule.op import COMMUNICATION, COMPUTE, RELEASING, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.values import expect

_MOST_LISTED = 5
_OTHER_END = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1), Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1), Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
}  # fmt: skip


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
    _check_memory(schedule)
    _check_updates(schedule)
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
            for slice_ in range(schedule.num_slices):
                yield from _missing_of(schedule, Op(stage, Kind.FORWARD, microbatch, slice_))


def _missing_of(schedule: Schedule, forward: Op) -> Iterator[Op]:
    full, *halves = (
        forward._replace(kind=kind)
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if forward not in schedule.where:
        yield forward
    if full not in schedule.where:
        absent = [op for op in halves if op not in schedule.where]
        yield from absent if len(absent) < 2 else [full]


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


def _check_memory(schedule: Schedule) -> None:
    """Once any free point is explicit, nothing may be kept for ever."""
    if not any(op.kind is Kind.FREE for op in schedule.where):
        return
    for op in schedule.where:
        free = op._replace(kind=Kind.FREE)
        if op.kind is Kind.FORWARD and free not in schedule.where:
            raise ScheduleError(f"{op} is never freed: {free} is missing, though others are there")


def _check_updates(schedule: Schedule) -> None:
    """Once a stage's gradients are reduced or applied, none of them may still be to come."""
    for rank, ops in enumerate(schedule.ranks):
        applied: dict[int, Op] = {}
        for op in ops:
            if op.kind in (Kind.REDUCE, Kind.UPDATE):
                applied[op.stage] = op
            elif op.kind in RELEASING and op.stage in applied:
                earlier = applied[op.stage]
                if op.microbatch <= earlier.microbatch:
                    raise ScheduleError(f"rank {rank} runs {earlier} before {op} is in it")


def _check_communication(schedule: Schedule) -> None:
    """Once any message is explicit, each one that crosses ranks must be: both of its ends."""
    if not any(op.kind in COMMUNICATION for op in schedule.where):
        return
    for op, rank in schedule.where.items():
        if op.kind in COMMUNICATION:
            other = _other_end(op)
            if other not in schedule.where:
                raise ScheduleError(f"rank {rank} has {op}, but no rank has its other end, {other}")
        elif op.kind in COMPUTE:
            for needed in schedule.dependencies(op):
                if schedule.where[needed] != rank:
                    raise ScheduleError(
                        f"rank {rank} runs {op}, which needs {needed} of rank "
                        f"{schedule.where[needed]}, but nothing receives it"
                    )


def _other_end(op: Op) -> Op:
    """The receive of a send, the send of a receive."""
    kind, offset = _OTHER_END[op.kind]
    return op._replace(stage=op.stage + offset, kind=kind)


def _check_progress(schedule: Schedule, capacity: int | None) -> None:
    room = dict(room_needed(schedule, capacity)) if capacity is not None else {}
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


def room_needed(schedule: Schedule, capacity: int) -> Iterator[tuple[Op, Op]]:
    """(send, receive) pairs: the n-th send of a channel waits for receive number n − capacity.

    Channels deliver in sending order, so the messages are counted in that order. A channel leads
    from one stage to another on one pair of ranks: a stage may have several copies.
    """
    channels: dict[tuple[int, Kind, int, int], list[tuple[Op, Op]]] = defaultdict(list)
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                receive = _other_end(op)
                channel = (op.stage, op.kind, rank, schedule.where[receive])
                channels[channel].append((op, receive))
    for messages in channels.values():
        for (_, received), (send, _) in zip(messages, messages[capacity:], strict=False):
            yield send, received


def _listed(ops: list[Op]) -> str:
    names = ", ".join(map(str, sorted(ops)[:_MOST_LISTED]))
    return names + (" and more" if len(ops) > _MOST_LISTED else "")
