"""Passes: pure functions from schedule to schedule.

A family emits compute only. These add what running it takes, without changing the order of the
compute ops. Apply them in the order in which they stand here: communication looks at what is there
already, so that a result is sent before anything else follows its op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from penstock.base.errors import InputError, ScheduleError
from penstock.base.values import expect
from penstock.core.schedule.columns import (
    CODES,
    KINDS,
    Codes,
    Columns,
    Ints,
    Longs,
)
from penstock.core.schedule.messages import (
    Messages,
    bounded,
    hoist,
    in_new_order,
    messages_of,
)
from penstock.core.schedule.needs import Walk
from penstock.core.schedule.op import (
    BACKWARD,
    COMMUNICATION,
    RECEIVED_BY,
    RELEASING,
    SENT_BY,
    Kind,
    check_capacity,
)
from penstock.core.schedule.rounds import Rounds
from penstock.core.schedule.schedule import Schedule


def _codes_by_kind(table: Mapping[Kind, Kind]) -> Codes:
    """The code of what a table has for a kind, by the code of that kind."""
    return np.array([CODES[table.get(kind, kind)] for kind in KINDS], np.int8)


_FREED_BY = dict.fromkeys(RELEASING, Kind.FREE) | {Kind.BACKWARD_INPUT: Kind.FREE_INPUT_PART}
_FREES, _SENDS, _RECEIVES = map(_codes_by_kind, (_FREED_BY, SENT_BY, RECEIVED_BY))


def split_backward(schedule: Schedule) -> Schedule:
    """Split each full backward into its two halves, the second right behind the first."""
    columns = schedule.columns
    full = np.flatnonzero(columns.are_of({Kind.BACKWARD}))
    split = _beside(columns, full, CODES[Kind.BACKWARD_WEIGHT], behind=True)
    first_half = np.where(
        split.kind == CODES[Kind.BACKWARD], CODES[Kind.BACKWARD_INPUT], split.kind
    )
    kinds = first_half.astype(np.int8)
    return schedule.with_columns(
        Columns(split.first, split.stage, kinds, split.microbatch, split.slice)
    )


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
    columns = schedule.columns
    again = columns.are_of(BACKWARD) & np.isin(columns.stage, list(chosen))
    numbers = np.flatnonzero(again)
    return schedule.with_columns(_beside(columns, numbers, CODES[Kind.RECOMPUTE]))


def add_free(schedule: Schedule) -> Schedule:
    """Say where memory comes back: behind an input gradient, what only that needed; behind the
    weight gradient or the full backward, all that is left of the microbatch."""
    _refuse_twice(schedule, {Kind.FREE})
    columns = schedule.columns
    numbers = np.flatnonzero(columns.are_of(_FREED_BY))
    kinds = _FREES[columns.kind[numbers]]
    return schedule.with_columns(_beside(columns, numbers, kinds, behind=True))


def add_reduce(schedule: Schedule, shared: Collection[int] = ()) -> Schedule:
    """Where a stage has copies on several ranks, or shares weights with others, let it hand in its
    gradients behind its last weight gradient; any other schedule stays as it is.

    Args:
        shared: the stages that share weights with stages on other ranks.
    """
    _refuse_twice(schedule, {Kind.REDUCE})
    return _with_further(
        schedule,
        (
            gradient.followed_by(Kind.REDUCE)
            for gradient in last_gradients(schedule.columns)
            if schedule.copies[gradient.stage] > 1 or gradient.stage in shared
        ),
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
    columns = schedule.columns
    late = set(columns.stages_with({Kind.REDUCE})) | set(last)
    if together:
        late = set(range(schedule.num_stages))
    return _with_further(
        schedule,
        (
            gradient.followed_by(Kind.UPDATE)
            if gradient.stage not in late
            else gradient.followed_by(Kind.UPDATE, int(columns.first[gradient.rank + 1]))
            # Of several at the end of a rank, those that come last do so.
            for gradient in sorted(last_gradients(columns), key=lambda own: own.stage in late)
        ),
    )


def add_updates(schedule: Schedule, rounds: Rounds) -> Schedule:
    """Let each stage update at the end of each of its rounds, while others are in flight; what an
    asynchronous pipeline does. Replicas hand in their gradients first. If the last round has no
    microbatch for a replica, it takes part all the same, in the name of the one that it lacks.

    Args:
        schedule: a stream of microbatches, as far as it goes.
        rounds: when stages update.
    """
    _refuse_twice(schedule, {Kind.REDUCE, Kind.UPDATE})
    columns, num_microbatches = schedule.columns, schedule.num_microbatches
    most = 1 + int(columns.microbatch.max(initial=-1))
    pairs, member = np.unique(
        columns.stage.astype(np.int64) * most + columns.microbatch, return_inverse=True
    )
    own_round = np.array([rounds.of(*divmod(pair, most)) for pair in pairs.tolist()])[member]
    last_round = np.zeros(schedule.num_stages, np.int64)
    np.maximum.at(last_round, columns.stage, own_round)
    closing = []
    for rank, span in enumerate(columns.spans()):
        # Where each round of each stage has its last gradient on this rank.
        done = np.flatnonzero(columns.are_of(_GRADIENT_DONE, span)) + span.start
        rounds_done = zip(columns.stage[done].tolist(), own_round[done].tolist(), strict=True)
        last = dict(zip(rounds_done, done.tolist(), strict=True))
        closing += [
            Gradient(rank, stage, int(columns.microbatch[number]), number, number)
            for (stage, _), number in last.items()
        ]
        # A replica without a microbatch in the last round hands in nothing, but must take part in
        # the sum: otherwise the others would wait for it.
        for stage in schedule.stages_of[rank]:
            if (stage, int(last_round[stage])) not in last:
                ranks = schedule.ranks_of(stage)
                ahead = (ranks.index(rank) - num_microbatches) % len(ranks)
                named = num_microbatches + ahead
                closing.append(Gradient(rank, stage, named, span.stop - 1, span.stop - 1))
    return _with_further(
        schedule,
        (
            gradient.followed_by(kind)
            for gradient in closing
            for kind in (Kind.REDUCE, Kind.UPDATE)
            if kind is Kind.UPDATE or schedule.copies[gradient.stage] > 1
        ),
    )


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
    columns, agreements = schedule.columns, []
    for rank, span in enumerate(columns.spans()):
        updates = np.flatnonzero(columns.are_of({Kind.UPDATE}, span)) + span.start
        waiting = updates
        if late:
            waiting = np.flatnonzero(columns.are_of(BACKWARD, span)) + span.start
        if updates.size and waiting.size:
            # One agreement per rank, named after its first update, before the first op that waits.
            named = columns.op(int(updates[0]))
            agreements.append(
                _Further(int(waiting[0]), rank, named.stage, Kind.AGREE, named.microbatch)
            )
    return _with_further(schedule, agreements)


def add_late_update(schedule: Schedule) -> Schedule:
    """Let each stage begin a minibatch with the update of the one before: where stages leave
    memory, an update that all ranks must agree on comes when the stage does."""
    _refuse_twice(schedule, {Kind.UPDATE, Kind.LATE_UPDATE})
    columns, updates = schedule.columns, []
    for rank, span in enumerate(columns.spans()):
        forwards = np.flatnonzero(columns.are_of({Kind.FORWARD}, span)) + span.start
        _, begins = np.unique(columns.stage[forwards], return_index=True)
        for number in sorted(forwards[begins].tolist()):
            named = columns.op(number)
            updates.append(_Further(number, rank, named.stage, Kind.LATE_UPDATE, named.microbatch))
    return _with_further(schedule, updates)


def add_late_agreement(schedule: Schedule) -> Schedule:
    """Let each rank end with the agreement on which the late updates of the next minibatch depend,
    named after its last gradient."""
    _refuse_twice(schedule, {Kind.AGREE})
    last = {gradient.rank: gradient for gradient in last_gradients(schedule.columns)}
    ends = schedule.columns.first[1:].tolist()
    return _with_further(
        schedule,
        (gradient.followed_by(Kind.AGREE, ends[rank]) for rank, gradient in last.items()),
    )


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
    columns = schedule.columns
    messages = messages_of(columns)
    kind = np.empty(messages.count, np.int8)
    kind[messages.number] = columns.kind
    kind[messages.sends] = _SENDS[columns.kind[messages.senders]]
    kind[messages.receives] = _RECEIVES[columns.kind[messages.readers]]
    stage, microbatch, part = (
        _with_ends(messages, field) for field in (columns.stage, columns.microbatch, columns.slice)
    )
    sent = Columns(messages.first, stage, kind, microbatch, part)
    if capacity is not None:
        needs, room = bounded(columns, messages, capacity)
        moved, places = hoist(Walk(messages.first, needs), messages, needs, room)
        sent = Columns(sent.first, *sent.fields(in_new_order(messages, moved, places)))
    return schedule.with_columns(sent)


def _with_ends(messages: Messages, field: Ints) -> Ints:
    """A field of ops and messages: a message has that of the op that it stands beside."""
    whole = np.empty(messages.count, np.int32)
    whole[messages.number] = field
    whole[messages.sends] = field[messages.senders]
    whole[messages.receives] = field[messages.readers]
    return whole


def lower(schedule: Schedule, capacity: int | None = None) -> Schedule:
    """All that running one flushed minibatch takes: free points, reduction, update, messages."""
    return add_communication(add_update(add_free(schedule)), capacity)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward ops alone: what evaluation runs."""
    columns = schedule.columns
    forwards = columns.only(columns.are_of({Kind.FORWARD}))
    return Schedule.of_columns(forwards, f"{schedule.name} forward")


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The schedule's order with only the first microbatches, for a minibatch that has no more."""
    columns = schedule.columns
    return schedule.with_columns(columns.only(columns.microbatch < num_microbatches))


class _Further(NamedTuple):
    """An op of a whole microbatch that comes to the others.

    Attributes:
        place: the number of the op that it comes before; for the end of a rank, one behind its
            last.
        rank, stage, kind, microbatch: its own.
    """

    place: int
    rank: int
    stage: int
    kind: Kind
    microbatch: int


class Gradient(NamedTuple):
    """The gradient that a rank has made of a stage, when it is done with it.

    Attributes:
        rank, stage: whose.
        microbatch: the last one, after which is named what follows.
        last: the number of the last op that makes the gradient, or frees what it was made of.
        made: that of the last op that makes it.
    """

    rank: int
    stage: int
    microbatch: int
    last: int
    made: int

    def followed_by(self, kind: Kind, place: int = 0) -> _Further:
        """An op of a kind behind this, or further behind, at a given place."""
        return _Further(place or self.last + 1, self.rank, self.stage, kind, self.microbatch)


_GRADIENT_DONE = RELEASING | {Kind.FREE}


def last_gradients(columns: Columns) -> list[Gradient]:
    """The whole gradient of each stage of each rank, in the order in which they are done."""
    makes = columns.are_of(RELEASING)
    numbers = np.flatnonzero(columns.are_of(_GRADIENT_DONE))
    groups, member = np.unique(
        columns.rank[numbers].astype(np.int64) * columns.num_stages + columns.stage[numbers],
        return_inverse=True,
    )
    made, last = np.full((2, len(groups)), -1, np.int64)
    newest = np.zeros(len(groups), np.int64)
    np.maximum.at(last, member, numbers)
    own = makes[numbers]
    np.maximum.at(made, member[own], numbers[own])
    np.maximum.at(newest, member[own], columns.microbatch[numbers[own]])
    ranks, stages = np.divmod(groups, columns.num_stages)
    # The order is that of the gradients, wherever they are freed.
    order = made.argsort()[np.count_nonzero(made < 0) :]
    fields = (field[order].tolist() for field in (ranks, stages, newest, last, made))
    return [*map(Gradient, *fields)]


def _refuse_twice(schedule: Schedule, kinds: Collection[Kind]) -> None:
    """A pass applied a second time would double what the first one added."""
    there = np.flatnonzero(schedule.columns.are_of(kinds))
    if there.size:
        op = schedule.columns.op(int(there[0]))
        raise ScheduleError(f"the schedule has {op} already; apply each pass once")


def _beside(
    columns: Columns, numbers: Longs, kinds: Codes | int, *, behind: bool = False
) -> Columns:
    """The columns with an op of a kind before, or behind, each op of some numbers, named after
    it."""
    stages, _, microbatches, parts = columns.fields(numbers)
    ranks = columns.rank[numbers]
    return columns.with_more(kinds, numbers + behind, stages, microbatches, parts, ranks)


def _with_further(schedule: Schedule, further: Iterable[_Further]) -> Schedule:
    ordered = sorted(further, key=lambda op: (op.place, op.rank))
    if not ordered:
        return schedule
    numbers = [(op.place, op.rank, op.stage, op.microbatch) for op in ordered]
    places, ranks, stages, microbatches = np.array(numbers).T
    codes = np.array([CODES[op.kind] for op in ordered], np.int8)
    slices = np.zeros(len(ordered), np.int32)
    return schedule.with_columns(
        schedule.columns.with_more(codes, places, stages, microbatches, slices, ranks)
    )
