"""Schedules op by op, as one reads their definitions: what columns are held to.

``check``, passes, memory and the simulator of the package go over whole columns. Here is the same
as plain loops over ops; nothing in the package uses it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from itertools import accumulate, islice, repeat, zip_longest

from penstock import Kind, Op, Schedule
from penstock.base.errors import ScheduleError
from penstock.core.schedule.offload import check_offload
from penstock.core.schedule.op import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARDS,
    RECEIVED_BY,
    RELEASING,
    SENDS,
    SENT_BY,
    STASHES,
    other_end,
)
from penstock.core.schedule.residence import check_residence
from penstock.core.timing.spans import Row
from penstock.core.timing.timeline import Timeline

_MOST_LISTED = 5
SLICED = COMPUTE | {Kind.RECOMPUTE}


def check_each_op(schedule):
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


def _check_once(schedule):
    counts = Counter(op for ops in schedule.ranks for op in ops)
    repeated = [op for op, count in counts.items() if count > 1]
    if repeated:
        raise ScheduleError(
            f"{_listed(repeated)} stand(s) more than once; every op must stand exactly once"
        )


def _check_complete(schedule):
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


def _missing(schedule):
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for slice_ in range(schedule.num_slices):
                yield from _missing_of(schedule, Op(stage, Kind.FORWARD, microbatch, slice_))


def _missing_of(schedule, forward):
    full, *halves = (
        forward._replace(kind=kind)
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if forward not in schedule.where:
        yield forward
    if full not in schedule.where:
        absent = [op for op in halves if op not in schedule.where]
        yield from absent if len(absent) < 2 else [full]


def _check_one_rank(schedule):
    ranks = defaultdict(set)
    for op, rank in schedule.where.items():
        ranks[op.stage, op.microbatch].add(rank)
    for (stage, microbatch), places in ranks.items():
        if len(places) > 1:
            raise ScheduleError(
                f"stage {stage}, microbatch {microbatch} is spread over ranks {sorted(places)}; "
                "its forward and backward must share one rank, where its activations are"
            )


def _check_memory(schedule):
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


def _check_updates(schedule):
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


def _check_communication(schedule):
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


def check_room(schedule, capacity):
    """Whether channels that hold so many messages are enough."""
    explicit = COMMUNICATION & schedule.kinds
    _check_progress(schedule if explicit else add_communication(schedule, capacity), capacity)


def _check_progress(schedule, capacity):
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


def executable_order(schedule, also_needs=None):
    """Yield every (rank, op) so that each comes after all it depends on and its
    rank's order holds."""
    also_needs = also_needs or {}
    done = set()
    position = [0] * schedule.num_ranks
    waiting = defaultdict(list)
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


def _deadlock(schedule, waiting, position):
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


def _listed(ops):
    names = ", ".join(map(str, sorted(ops)[:_MOST_LISTED]))
    return names + (" and more" if len(ops) > _MOST_LISTED else "")


def split_backward(schedule):
    """Split each full backward into its two halves, the second right behind the first."""

    def halves(op):
        split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return [op._replace(kind=kind) for kind in split] if op.kind is Kind.BACKWARD else [op]

    return _each(schedule, halves)


def add_recompute(schedule, stages=None):
    """Keep only the input of each forward, and run the forward again right before its backward."""
    chosen = range(schedule.num_stages) if stages is None else stages

    def lowered(op):
        recomputes = op.kind in BACKWARD and op.stage in chosen
        return [op._replace(kind=Kind.RECOMPUTE), op] if recomputes else [op]

    return _each(schedule, lowered)


def add_free(schedule):
    """Say where memory comes back: behind an input gradient, what only that needed; behind the
    weight gradient or the full backward, all that is left of the microbatch."""

    def lowered(op):
        if op.kind in RELEASING:
            return [op, op._replace(kind=Kind.FREE)]
        if op.kind is Kind.BACKWARD_INPUT:
            return [op, op._replace(kind=Kind.FREE_INPUT_PART)]
        return [op]

    return _each(schedule, lowered)


def add_reduce(schedule, shared=()):
    """Where a stage has copies on several ranks, or shares weights with others, let it hand in its
    gradients behind its last weight gradient; any other schedule stays as it is."""
    return _behind_last_gradient(
        schedule, Kind.REDUCE, lambda stage: schedule.copies[stage] > 1 or stage in shared
    )


def add_update(schedule, *, together=False, last=()):
    """Put the flush's weight update of each stage behind its last weight gradient. A stage that
    shares its weights reduces first, and its update comes last on the rank: the sum has the rank's
    other work to arrive in, and no two ranks wait for each other's next reduction."""
    if Kind.REDUCE not in schedule.kinds:
        schedule = add_reduce(schedule)  # without, the copies would drift apart
    late = (
        set(range(schedule.num_stages))
        if together
        else {op.stage for ops in schedule.ranks for op in ops if op.kind is Kind.REDUCE}
        | set(last)
    )
    updated = _behind_last_gradient(schedule, Kind.UPDATE, lambda stage: stage not in late)
    ranks = (
        (*ops, *(op._replace(kind=Kind.UPDATE) for op in last_gradients(ops) if op.stage in late))
        for ops in updated.ranks
    )
    return schedule.with_ranks(ranks)


def add_updates(schedule, rounds):
    """Let each stage update at the end of each of its rounds, while others are in flight; what an
    asynchronous pipeline does. Replicas hand in their gradients first. If the last round has no
    microbatch for a replica, it takes part all the same, in the name of the one that it lacks."""
    last_round = Counter()
    for op in schedule.where:
        last_round[op.stage] = max(last_round[op.stage], rounds.of(op.stage, op.microbatch))

    def closing(stage, microbatch):
        kinds = [Kind.REDUCE] * (schedule.copies[stage] > 1) + [Kind.UPDATE]
        return [Op(stage, kind, microbatch) for kind in kinds]

    def lowered(rank, ops):
        last = {}
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


def add_agreement(schedule, *, late=False):
    """Let each rank wait for every rank's share of the gradients' norm."""
    followers = BACKWARD if late else {Kind.UPDATE}

    def lowered(ops):
        first_update = next((op for op in ops if op.kind is Kind.UPDATE), None)
        for op in ops:
            if first_update is not None and op.kind in followers:
                yield first_update._replace(kind=Kind.AGREE)
                first_update = None
            yield op

    return schedule.with_ranks(map(lowered, schedule.ranks))


def add_late_update(schedule):
    """Let each stage begin a minibatch with the update of the one before: where stages leave
    memory, an update that all ranks must agree on comes when the stage does."""

    def lowered(ops):
        begun = set()
        for op in ops:
            if op.kind is Kind.FORWARD and op.stage not in begun:
                begun.add(op.stage)
                yield op._replace(kind=Kind.LATE_UPDATE)
            yield op

    return Schedule.of(map(lowered, schedule.ranks), schedule.name)


def add_late_agreement(schedule):
    """Let each rank end with the agreement on which the late updates of the next minibatch depend,
    named after its last gradient."""
    ranks = ((*ops, last_gradients(ops)[-1]._replace(kind=Kind.AGREE)) for ops in schedule.ranks)
    return Schedule.of(ranks, schedule.name)


def add_communication(schedule, capacity=None):
    """Put a send right behind each op whose result another rank needs, and a receive right before
    the op that needs it."""
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
    def lowered(op):
        if op in readers:
            yield op._replace(kind=RECEIVED_BY[op.kind])
        yield op
        if op in senders:
            yield op._replace(kind=SENT_BY[op.kind])

    sent = _each(schedule, lowered)
    # 3. Where channels are full too soon, some receives go to the front.
    return sent if capacity is None else hoist_receives(sent, capacity)


def lower(schedule, capacity=None):
    """All that running one flushed minibatch takes: free points, reduction, update, messages."""
    return add_communication(add_update(add_free(schedule)), capacity)


def forward_only(schedule):
    """The forward ops alone: what evaluation runs."""
    ranks = (tuple(op for op in ops if op.kind is Kind.FORWARD) for ops in schedule.ranks)
    return Schedule.of(ranks, f"{schedule.name} forward")


def first_microbatches(schedule, num_microbatches):
    """The schedule's order with only the first microbatches, for a minibatch that has no more."""
    ranks = (tuple(op for op in ops if op.microbatch < num_microbatches) for ops in schedule.ranks)
    return schedule.with_ranks(ranks)


def _each(schedule, lowered):
    ranks = ((new for op in ops for new in lowered(op)) for ops in schedule.ranks)
    return schedule.with_ranks(ranks)


def _behind_last_gradient(schedule, kind, wanted):
    """Put one op per wanted stage and rank, named after the last microbatch it stands for."""

    def lowered(ops):
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


def last_gradients(ops):
    """The gradient of the last microbatch of each stage of a rank, in the order in which the
    stages are done."""
    newest = {}
    for op in ops:
        if op.kind in RELEASING:
            later = max(newest.pop(op.stage, op), op, key=lambda gradient: gradient.microbatch)
            newest[op.stage] = later._replace(slice=0)
    return list(newest.values())


def room_needed(schedule, capacity):
    """(op, receive) pairs, of which the op waits for the receive."""
    if capacity == 0:
        yield from _in_sending_order(schedule)
        return
    channels = defaultdict(list)
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if op.kind in SENDS:
                receive = other_end(op)
                channel = (op.stage, op.kind, rank, schedule.where[receive])
                channels[channel].append((op, receive))
    for messages in channels.values():
        for (_, received), (send, _) in zip(messages, messages[capacity:], strict=False):
            yield send, received


def _in_sending_order(schedule):
    """Each receive, and the one whose message the same rank has sent to the same rank before."""
    for ops in schedule.ranks:
        last = {}
        for op in ops:
            if op.kind in SENDS:
                receive = other_end(op)
                target = schedule.where[receive]
                if target in last:
                    yield receive, last[target]
                last[target] = receive


def hoist_receives(schedule, capacity):
    """Move as few receives to the front as keep a schedule from deadlock where a channel holds
    ``capacity`` messages and a full one makes its sender wait."""
    rows = [list(ops) for ops in schedule.ranks]
    room = dict(room_needed(schedule, capacity))
    position = [0] * len(rows)
    done = set()
    while any(next_op < len(row) for next_op, row in zip(position, rows, strict=True)):
        # 1. Every rank goes on as far as it can.
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and _can_run(schedule, row[position[rank]], room, done):
                done.add(row[position[rank]])
                position[rank] += 1
                moved = True
        if moved:
            continue
        # 2. Nothing goes on. A full channel is to blame, unless the schedule deadlocks by itself.
        waits = [
            row[next_op] for next_op, row in zip(position, rows, strict=True) if next_op < len(row)
        ]
        blamed = [_first_to_make_room(op, room, done) for op in waits]
        wanted = [
            receive
            for receive, op in zip(blamed, waits, strict=True)
            if receive != op and _can_run(schedule, receive, room, done)
        ]
        if not wanted:
            break
        # 3. The receives that would make room come to where their ranks wait.
        for receive in wanted:
            rank = schedule.where[receive]
            rows[rank].remove(receive)
            rows[rank].insert(position[rank], receive)
    return schedule.with_ranks(rows)


def _first_to_make_room(op, room, done):
    """The first of the receives that must happen before an op finds room; the op if none must."""
    while op in room and room[op] not in done:
        op = room[op]
    return op


def _can_run(schedule, op, room, done):
    return (op not in room or room[op] in done) and done.issuperset(schedule.dependencies(op))


def changes(ops, sizes, num_slices=1, activations="own"):
    """For each op of one rank, (whether at its start, by how much it changes what is held)."""
    left = _left_behind(ops, sizes, num_slices)
    held = {}
    leaving = 0.0
    for op in ops:
        holder = op.stage if activations == "newest" else op._replace(kind=Kind.FORWARD)
        before = held.get(holder, 0.0)
        after = held[holder] = left.get(op[:2], before)
        if op.kind in STASHES:
            written, leaving = leaving, before if op.kind is Kind.LEAVE_STASH else 0.0  # [1]
            yield True, after - before + leaving - written
        else:
            yield op.kind in FORWARDS, after - before


def _left_behind(ops, sizes, num_slices):
    """By stage and kind, what is held of a microbatch behind an op of a rank; nothing is said where
    that is as much as before."""
    kinds = {op.kind for op in ops}
    recomputed = {op.stage for op in ops if op.kind is Kind.RECOMPUTE}
    frees_part = Kind.FREE_INPUT_PART if Kind.FREE in kinds else Kind.BACKWARD_INPUT
    frees_rest = {Kind.FREE} if Kind.FREE in kinds else RELEASING
    left = {}
    for stage in {op.stage for op in ops}:
        forward = sizes.stage_input if stage in recomputed else sizes.activation
        left[stage, Kind.FORWARD] = forward[stage] / num_slices
        left[stage, Kind.RECOMPUTE] = sizes.activation[stage] / num_slices
        left[stage, frees_part] = sizes.kept_for_weight[stage] / num_slices
        left.update(dict.fromkeys(((stage, kind) for kind in frees_rest), 0.0))
        left[stage, Kind.LEAVE_STASH] = 0.0
        left[stage, Kind.FETCH_STASH] = sizes.activation[stage] / num_slices  # [2]
    return left


def peaks(ranks, sizes, num_slices=1, activations="own"):
    """Per rank, the most that is held at once."""
    each = (changes(ops, sizes, num_slices, activations) for ops in ranks)
    return tuple(max(accumulate((change for _, change in steps), initial=0.0)) for steps in each)


def simulate(schedule, costs):
    """The times of every op: one after the other, each as early as it can start."""
    end, free = {}, [0.0] * schedule.num_ranks
    rows = [Row(ops, array("d"), array("d")) for ops in schedule.ranks]
    for rank, op in executable_order(schedule):
        ready = free[rank]
        for needed in schedule.dependencies(op):
            crosses = schedule.where[needed] != rank
            ready = max(ready, end[needed] + (costs.delay(needed, op) if crosses else 0.0))
        # A message's time is the wait for it.
        rows[rank].starts.append(free[rank] if op.kind in COMMUNICATION else ready)
        duration = costs.duration(op)
        end[op] = free[rank] = ready + duration / (schedule.num_slices if op.kind in SLICED else 1)
        rows[rank].ends.append(end[op])
    return Timeline(tuple(rows), schedule.name, activations=schedule.activations)


def turns(order):
    """The ops of ``Turns``."""
    forwards, backwards, *weights = map(line, order.lines)
    late = ([*[None] * order.delay, *ops] for ops in weights)
    columns = [forwards[order.warm_up :], backwards, *late]
    return [
        *forwards[: order.warm_up],
        *(op for turn in zip_longest(*columns) for op in turn if op is not None),
    ]


def line(own):
    """The ops of a ``Line``."""
    laps, parts = (list(map(int, given)) or repeat(0) for given in (own.laps, own.slices))
    return [
        Op(own.stage + own.per_lap * lap, own.kind, int(microbatch), part)
        for lap, microbatch, part in zip(laps, own.microbatches, parts, strict=False)
    ]


def slots(order):
    """The ops of ``Slots``."""
    timed = (
        (start + timed.offset, op)
        for timed in order.lines
        for start, op in zip(timed.starts, line(timed.line), strict=True)
    )
    return [op for _, op in sorted(timed)]


def phases(order):
    """The ops of ``Phases``."""
    ops, seen, waiting = [], Counter(), deque()
    for pattern, repeats in order.phases:
        for step in pattern.split() * repeats:
            if step == Kind.BACKWARD_WEIGHT:
                ops.append(waiting.popleft())
                continue
            kind, stage = Kind(step[0]), order.stages[int(step[1:])]
            # I and B are two ways to do the same microbatch's backward: one count for both.
            microbatch = seen[stage, kind in BACKWARD]
            seen[stage, kind in BACKWARD] += 1
            ops.append(Op(stage, kind, microbatch))
            if kind is Kind.BACKWARD_INPUT:
                waiting.append(Op(stage, Kind.BACKWARD_WEIGHT, microbatch))
    return ops
