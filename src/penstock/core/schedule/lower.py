"""Passes: pure functions from schedule to schedule.

A family emits compute only. These add what running it takes, without changing the order of the
compute ops. Apply them in the order in which they stand here: communication looks at what is there
already, so that a result is sent before anything else follows its op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.base.errors import InputError, ScheduleError
from penstock.base.values import expect
from penstock.core.schedule.channels import RECEIVED_BY, SENT_BY, check_capacity, hoist_receives
from penstock.core.schedule.op import BACKWARD, COMMUNICATION, COMPUTE, RELEASING, Kind, Op
from penstock.core.schedule.rounds import Rounds
from penstock.core.schedule.schedule import MANY_OPS, Schedule

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Columns


def split_backward(schedule: Schedule) -> Schedule:
    """Split each full backward into its two halves, the second right behind the first."""

    def halves(op: Op) -> list[Op]:
        split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return [op._replace(kind=kind) for kind in split] if op.kind is Kind.BACKWARD else [op]

    return _each(schedule, halves)


def add_recompute(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Keep only the input of each forward, and run the forward again right before its backward.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

    Args:
        stages: which stages recompute; all by default.

    Raises:
        InputError: a stage is not in the schedule.
    """
    chosen = range(schedule.num_stages) if stages is None else stages
    expect(chosen, Collection, "the stages that recompute", "give a list of their numbers")
    absent = sorted(set(chosen) - set(range(schedule.num_stages)))
    if absent:
        raise InputError(
            f"cannot recompute stage {absent[0]}: the schedule has {schedule.num_stages} stages, "
            "numbered from 0"
        )
    _refuse_twice(schedule, {Kind.RECOMPUTE})
    columns = _large(schedule)
    if columns is not None:
        from penstock.core.schedule.columns.passes import with_recompute

        return schedule.with_columns(with_recompute(columns, chosen))

    def lowered(op: Op) -> list[Op]:
        recomputes = op.kind in BACKWARD and op.stage in chosen
        return [op._replace(kind=Kind.RECOMPUTE), op] if recomputes else [op]

    return _each(schedule, lowered)


def add_free(schedule: Schedule) -> Schedule:
    """Say where memory comes back: behind an input gradient, what only that needed; behind the
    weight gradient or the full backward, all that is left of the microbatch."""
    _refuse_twice(schedule, {Kind.FREE})
    columns = _large(schedule)
    if columns is not None:
        from penstock.core.schedule.columns.passes import with_frees

        return schedule.with_columns(with_frees(columns))

    def lowered(op: Op) -> list[Op]:
        if op.kind in RELEASING:
            return [op, op._replace(kind=Kind.FREE)]
        if op.kind is Kind.BACKWARD_INPUT:
            return [op, op._replace(kind=Kind.FREE_INPUT_PART)]
        return [op]

    return _each(schedule, lowered)


def add_reduce(schedule: Schedule, shared: Collection[int] = ()) -> Schedule:
    """Where a stage has copies on several ranks, or shares weights with others, let it hand in its
    gradients behind its last weight gradient; any other schedule stays as it is.

    Args:
        shared: the stages that share weights with stages on other ranks.
    """
    _refuse_twice(schedule, {Kind.REDUCE})
    return _behind_last_gradient(
        schedule, Kind.REDUCE, lambda stage: schedule.copies[stage] > 1 or stage in shared
    )


def add_update(
    schedule: Schedule, *, together: bool = False, last: Collection[int] = ()
) -> Schedule:
    """Put the flush's weight update of each stage behind its last weight gradient. A stage that
    shares its weights reduces first, and its update comes last on the rank: the sum has the rank's
    other work to arrive in, and no two ranks wait for each other's next reduction.

    Args:
        together: put all updates last, because ranks agree on something before the first.
        last: stages whose updates come last, because other stages of their ranks have gradients of
            weights that they update.
    """
    _refuse_twice(schedule, {Kind.UPDATE})
    if Kind.REDUCE not in schedule.kinds:
        schedule = add_reduce(schedule)  # without, the copies would drift apart
    late = set(range(schedule.num_stages)) if together else _reduced(schedule) | set(last)
    columns = _large(schedule)
    if columns is not None:
        from penstock.core.schedule.columns.passes import with_updates

        return schedule.with_columns(with_updates(columns, late))
    updated = _behind_last_gradient(schedule, Kind.UPDATE, lambda stage: stage not in late)
    ranks = (
        (*ops, *(op._replace(kind=Kind.UPDATE) for op in last_gradients(ops) if op.stage in late))
        for ops in updated.ranks
    )
    return schedule.with_ranks(ranks)


def add_updates(schedule: Schedule, rounds: Rounds) -> Schedule:
    """Let each stage update at the end of each of its rounds, while others are in flight; what an
    asynchronous pipeline does. Replicas hand in their gradients first. If the last round has no
    microbatch for a replica, it takes part all the same, in the name of the one that it lacks.

    Args:
        schedule: a stream of microbatches, as far as it goes.
        rounds: when stages update.
    """
    _refuse_twice(schedule, {Kind.REDUCE, Kind.UPDATE})
    last_round: Counter[int] = Counter()
    for op in schedule.where:
        last_round[op.stage] = max(last_round[op.stage], rounds.of(op.stage, op.microbatch))

    def closing(stage: int, microbatch: int) -> list[Op]:
        kinds = [Kind.REDUCE] * (schedule.copies[stage] > 1) + [Kind.UPDATE]
        return [Op(stage, kind, microbatch) for kind in kinds]

    def lowered(rank: int, ops: tuple[Op, ...]) -> Iterator[Op]:
        # Where each round of each stage has its last gradient on this rank; updates go behind that.
        last: dict[tuple[int, int], int] = {}
        for position, op in enumerate(ops):
            if op.kind in RELEASING or op.kind is Kind.FREE:
                last[op.stage, rounds.of(op.stage, op.microbatch)] = position
        for position, op in enumerate(ops):
            yield op
            if last.get((op.stage, rounds.of(op.stage, op.microbatch))) == position:
                yield from closing(op.stage, op.microbatch)
        # A replica without a microbatch in the last round hands in nothing, but must take part in
        # the sum: otherwise the others would wait for it.
        for stage in schedule.stages_of[rank]:
            if (stage, last_round[stage]) not in last:
                ranks, count = schedule.ranks_of(stage), schedule.num_microbatches
                ahead = (ranks.index(rank) - count) % len(ranks)
                yield from closing(stage, count + ahead)

    return schedule.with_ranks(lowered(rank, ops) for rank, ops in enumerate(schedule.ranks))


def add_agreement(schedule: Schedule, *, late: bool = False) -> Schedule:
    """Let each rank wait for every rank's share of the gradients' norm.

    Args:
        schedule: with updates; those of a rank together unless ``late``.
        late: not before the rank's first update, but before its first backward, so about the
            previous minibatch: post-validation. When a rank gets there, all others have begun the
            same minibatch and told their share long ago. Qi et al., "Zero Bubble Pipeline
            Parallelism", arXiv 2401.10241, section 4.
    """
    _refuse_twice(schedule, {Kind.AGREE})
    followers = BACKWARD if late else {Kind.UPDATE}

    def lowered(ops: tuple[Op, ...]) -> Iterator[Op]:
        # One agreement per rank, named after its first update, before the first op that waits.
        first_update = next((op for op in ops if op.kind is Kind.UPDATE), None)
        for op in ops:
            if first_update is not None and op.kind in followers:
                yield first_update._replace(kind=Kind.AGREE)
                first_update = None
            yield op

    return schedule.with_ranks(map(lowered, schedule.ranks))


def add_late_update(schedule: Schedule) -> Schedule:
    """Let each stage begin a minibatch with the update of the one before: where stages leave
    memory, an update that all ranks must agree on comes when the stage does."""
    _refuse_twice(schedule, {Kind.UPDATE, Kind.LATE_UPDATE})

    def lowered(ops: tuple[Op, ...]) -> Iterator[Op]:
        begun: set[int] = set()
        for op in ops:
            if op.kind is Kind.FORWARD and op.stage not in begun:
                begun.add(op.stage)
                yield op._replace(kind=Kind.LATE_UPDATE)
            yield op

    return Schedule.of(map(lowered, schedule.ranks), schedule.name)


def add_late_agreement(schedule: Schedule) -> Schedule:
    """Let each rank end with the agreement on which the late updates of the next minibatch depend,
    named after its last gradient."""
    _refuse_twice(schedule, {Kind.AGREE})
    ranks = ((*ops, last_gradients(ops)[-1]._replace(kind=Kind.AGREE)) for ops in schedule.ranks)
    return Schedule.of(ranks, schedule.name)


def add_communication(schedule: Schedule, capacity: int | None = None) -> Schedule:
    """Put a send right behind each op whose result another rank needs, and a receive right before
    the op that needs it.

    Receives are not front-loaded: one is posted only when its op is next, so that no buffers pile
    up and no background receive competes with compute.

    Args:
        capacity: how many messages a channel holds before its sender has to wait; then those
            receives come earlier without which the ranks would wait for each other for ever.
            ``None`` is unlimited. 0: the messages from one rank to another pass in the order in
            which they are sent, each once its receive is posted, and no sender waits; receives come
            in that order then.
    """
    check_capacity(capacity)
    _refuse_twice(schedule, COMMUNICATION)
    columns = None if capacity == 0 else _large(schedule)
    if columns is not None:
        from penstock.core.schedule.columns.passes import with_messages

        with_ends = with_messages(columns, capacity)
        if with_ends is not None:
            return schedule.with_columns(with_ends)
    # 1. Which results are needed on another rank than their own, and by which ops.
    crossing = [
        (needed, op)
        for op, rank in schedule.where.items()
        if op.kind in COMPUTE
        for needed in schedule.dependencies(op)
        if schedule.where.get(needed, rank) != rank
    ]
    senders, readers = {needed for needed, _ in crossing}, {op for _, op in crossing}

    # 2. A receive before each of those ops, a send behind each of those results.
    def lowered(op: Op) -> Iterator[Op]:
        if op in readers:
            yield op._replace(kind=RECEIVED_BY[op.kind])
        yield op
        if op in senders:
            yield op._replace(kind=SENT_BY[op.kind])

    sent = _each(schedule, lowered)
    # 3. Where channels are full too soon, some receives go to the front.
    return sent if capacity is None else hoist_receives(sent, capacity)


def lower(schedule: Schedule, capacity: int | None = None) -> Schedule:
    """All that running one flushed minibatch takes: free points, reduction, update, messages."""
    return add_communication(add_update(add_free(schedule)), capacity)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward ops alone: what evaluation runs."""
    ranks = (tuple(op for op in ops if op.kind is Kind.FORWARD) for ops in schedule.ranks)
    return Schedule.of(ranks, f"{schedule.name} forward")


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule's order with only the first microbatches, for a minibatch that has no more."""
    ranks = (tuple(op for op in ops if op.microbatch < num_microbatches) for ops in schedule.ranks)
    return schedule.with_ranks(ranks)


def _large(schedule: Schedule) -> Columns | None:
    """The columns of a schedule that is large enough for them."""
    return schedule.columns if schedule.num_ops >= MANY_OPS else None


def _reduced(schedule: Schedule) -> set[int]:
    """The stages that hand in their gradients."""
    columns = _large(schedule)
    if columns is not None:
        return set(columns.stages_with({Kind.REDUCE}))
    return {op.stage for ops in schedule.ranks for op in ops if op.kind is Kind.REDUCE}


def _refuse_twice(schedule: Schedule, kinds: Collection[Kind]) -> None:
    """A pass applied a second time would double what the first one added."""
    if not schedule.kinds & set(kinds):
        return
    there = next((op for op in schedule.where if op.kind in kinds), None)
    if there is not None:
        raise ScheduleError(f"the schedule has {there} already; apply each pass once")


def _each(schedule: Schedule, lowered: Callable[[Op], Iterable[Op]]) -> Schedule:
    ranks = ((new for op in ops for new in lowered(op)) for ops in schedule.ranks)
    return schedule.with_ranks(ranks)


def _behind_last_gradient(
    schedule: Schedule, kind: Kind, wanted: Callable[[int], bool]
) -> Schedule:
    """Put one op per wanted stage and rank, named after the last microbatch it stands for."""
    columns = _large(schedule)
    if columns is not None:
        from penstock.core.schedule.columns.passes import with_one_behind_last

        return schedule.with_columns(with_one_behind_last(columns, kind, wanted))

    def lowered(ops: tuple[Op, ...]) -> Iterator[Op]:
        newest = {op.stage: op for op in last_gradients(ops)}
        last = {
            op.stage: position
            for position, op in enumerate(ops)
            if op.kind in RELEASING | {Kind.FREE} and wanted(op.stage)
        }
        for position, op in enumerate(ops):
            yield op
            if last.get(op.stage) == position:
                yield newest[op.stage]._replace(kind=kind)

    return schedule.with_ranks(map(lowered, schedule.ranks))


def last_gradients(ops: Iterable[Op]) -> list[Op]:
    """The gradient of the last microbatch of each stage of a rank, in the order in which the
    stages are done."""
    newest: dict[int, Op] = {}
    for op in ops:
        if op.kind in RELEASING:
            later = max(newest.pop(op.stage, op), op, key=lambda gradient: gradient.microbatch)
            newest[op.stage] = later._replace(slice=0)
    return list(newest.values())
