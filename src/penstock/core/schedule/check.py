"""Prove that a schedule can run before a device is touched.

Four proofs: every piece of work is there exactly once; all work of one (stage, microbatch) is on
one rank; where stages or activations leave memory, every op finds there what it needs; and some
order of events satisfies every rank's order and every data dependency, also when a channel between
two stages holds only ``capacity`` messages, or when messages pass in the order of their sends and
nothing holds them until their receives are posted (a capacity of 0), as where accelerators exchange
them directly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice

from penstock.base.errors import ScheduleError
from penstock.base.values import expect
from penstock.core.schedule.channels import check_capacity, other_end, room_needed
from penstock.core.schedule.lower import add_communication, last_gradients
from penstock.core.schedule.offload import check_offload
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, RELEASING, Kind, Op
from penstock.core.schedule.planned import Planned, is_planned
from penstock.core.schedule.residence import check_residence
from penstock.core.schedule.schedule import MANY_OPS, Schedule

_MOST_LISTED = 5


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
    schedule.check_types()
    check_capacity(capacity)
    if _proven_at_once(schedule, capacity):
        return
    check_each_op(schedule)
    if capacity is not None:
        explicit = COMMUNICATION & schedule.kinds
        sent = schedule if explicit else add_communication(schedule, capacity)
        _check_progress(sent, capacity)


def check_each_op(schedule: Schedule) -> None:
    """What ``check`` does without a capacity, op by op: it says what is wrong."""
    _check_once(schedule)
    _check_complete(schedule)
    _check_one_rank(schedule)
    _check_memory(schedule)
    _check_updates(schedule)
    _check_communication(schedule)
    check_residence(schedule)
    check_offload(schedule)
    _check_progress(schedule, None)


def _proven_at_once(schedule: Schedule, capacity: int | None) -> bool:
    """Whether a large schedule is known to be right; op by op, that takes twenty times as long."""
    # Columns know channels that hold messages, not those that hand them over.
    if schedule.num_ops < MANY_OPS or schedule.columns is None or capacity == 0:
        return False
    # Only here, so that small schedules are checked before numpy is there.
    from penstock.core.schedule.columns.proof import is_proven

    return is_proven(schedule.columns, capacity)


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
    """Where free points are explicit, nothing may be kept for ever; where a stage recomputes, it
    does so for every microbatch."""
    frees = any(op.kind is Kind.FREE for op in schedule.where)
    recomputed = {op.stage for op in schedule.where if op.kind is Kind.RECOMPUTE}
    for op in schedule.where:
        if op.kind is not Kind.FORWARD:
            continue
        free, again = (op._replace(kind=kind) for kind in (Kind.FREE, Kind.RECOMPUTE))
        if frees and free not in schedule.where:
            raise ScheduleError(f"{op} is never freed: {free} is missing, though others are there")
        if op.stage in recomputed and again not in schedule.where:
            raise ScheduleError(
                f"{op} keeps only its input, as stage {op.stage} recomputes, but {again} is missing"
            )


def _check_updates(schedule: Schedule) -> None:
    """Once any gradients are reduced or applied, each rank must do so with all of its own: behind
    the last of them, and if other ranks hold copies of the stage, together with these."""
    kinds = {op.kind for op in schedule.where}
    for rank, ops in enumerate(schedule.ranks):
        last = {op.stage: position for position, op in enumerate(ops) if op.kind in RELEASING}
        for gradient in last_gradients(ops):
            stage, needed = gradient.stage, []
            if schedule.copies[stage] > 1 and kinds & {Kind.REDUCE, Kind.UPDATE}:
                needed.append(Kind.REDUCE)
            if Kind.UPDATE in kinds:
                needed.append(Kind.UPDATE)
            for kind in needed:
                op = Op(stage, kind, gradient.microbatch)
                if op not in ops[last[stage] + 1 :]:
                    raise ScheduleError(
                        f"rank {rank} needs {op} behind {ops[last[stage]]}, its last gradient of "
                        f"stage {stage}"
                    )


def _check_communication(schedule: Schedule) -> None:
    """Once any message is explicit, each one that crosses ranks must be: both of its ends."""
    if not any(op.kind in COMMUNICATION for op in schedule.where):
        return
    for op, rank in schedule.where.items():
        if op.kind in COMMUNICATION:
            other = other_end(op)
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
    room = dict(room_needed(schedule, capacity)) if capacity is not None else {}
    try:
        for _ in executable_order(schedule, room):
            pass
    except ScheduleError as error:
        if capacity is None:
            raise
        where, otherwise = f"with channels that hold {capacity} message(s)", "allow more"
        if capacity == 0:
            where = "where messages between two ranks pass in the order of their sends"
            otherwise = "receive them in that order"
        raise ScheduleError(
            f"{where}, {error}; {otherwise}, or move receives forward with "
            f"schedule.lower.add_communication(…, capacity={capacity})"
        ) from None


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
            missing = next((need for need in needed if need not in done), None)
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


def _listed(ops: list[Op]) -> str:
    names = ", ".join(map(str, sorted(ops)[:_MOST_LISTED]))
    return names + (" and more" if len(ops) > _MOST_LISTED else "")
