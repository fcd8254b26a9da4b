"""Channels between ranks: what travels where, and what a channel that holds only so many messages
makes the ranks wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.core.schedule.op import NEEDS, Kind, Op
from penstock.core.schedule.schedule import Schedule

SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})

# The table of needs says what comes from where; here it is read from the sender's side, too.
RECEIVED_BY = {
    kind: receive
    for kind, needs in NEEDS.items()
    for ((_, receive), *_) in needs
    if receive in RECEIVES
}
"""The receive that brings a kind of compute what it needs from another rank."""
SENT_BY = {made: send for send in SENDS for _, made in NEEDS[send][0]}
"""The send that takes the result of a kind of compute to another rank."""
_SENDER = {receive: NEEDS[receive][0][0] for receive in RECEIVES}
OTHER_END = _SENDER | {send: (-offset, receive) for receive, (offset, send) in _SENDER.items()}
"""(stages further, kind) of the receive of a send, and of the send of a receive."""


def check_capacity(capacity: int | None) -> None:
    """Raise ``InputError`` unless a channel's capacity is ``None`` or a whole number ≥ 0."""
    if capacity is not None and (not is_whole(capacity) or capacity < 0):
        raise InputError(
            f"capacity is {capacity!r}, but a channel holds a whole number of messages; 0 is for "
            "channels that hold none and deliver in the order of sending"
        )


def other_end(op: Op) -> Op:
    """The receive of a send, the send of a receive."""
    offset, kind = OTHER_END[op.kind]
    return op._replace(stage=op.stage + offset, kind=kind)


def room_needed(schedule: Schedule, capacity: int) -> Iterator[tuple[Op, Op]]:
    """(op, receive) pairs, of which the op waits for the receive.

    The n-th send of a channel waits for receive number n − capacity. Channels deliver in sending
    order, so the messages are counted in that order. A channel leads from one stage to another on
    one pair of ranks: a stage may have several copies.

    With a capacity of 0, nothing lies in a channel: a message passes once its receive is posted.
    Posting a send makes nobody wait, but the messages from one rank to another pass in the order of
    their sends, whatever they hold. So there each receive waits for the one before, in that order.
    """
    if capacity == 0:
        yield from _in_sending_order(schedule)
        return
    channels: dict[tuple[int, Kind, int, int], list[tuple[Op, Op]]] = defaultdict(list)
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if op.kind in SENDS:
                receive = other_end(op)
                channel = (op.stage, op.kind, rank, schedule.where[receive])
                channels[channel].append((op, receive))
    for messages in channels.values():
        for (_, received), (send, _) in zip(messages, messages[capacity:], strict=False):
            yield send, received


def _in_sending_order(schedule: Schedule) -> Iterator[tuple[Op, Op]]:
    """Each receive, and the one whose message the same rank has sent to the same rank before."""
    for ops in schedule.ranks:
        last: dict[int, Op] = {}
        for op in ops:
            if op.kind in SENDS:
                receive = other_end(op)
                target = schedule.where[receive]
                if target in last:
                    yield receive, last[target]
                last[target] = receive


def hoist_receives(schedule: Schedule, capacity: int) -> Schedule:
    """Move as few receives to the front as keep a schedule from deadlock where a channel holds
    ``capacity`` messages and a full one makes its sender wait.

    Receives stand right before the ops that use them. Some orders, breadth-first for one, send many
    messages long before the first is used; a receive then has to take its message out of the way.
    It is moved only once nothing else can go on, and to where its rank waits at that moment.

    With a capacity of 0, the receives that come forward are those of messages that were sent before
    the one that a rank waits for.

    Args:
        schedule: lowered: with explicit messages.
    """
    rows = [list(ops) for ops in schedule.ranks]
    room = dict(room_needed(schedule, capacity))
    position = [0] * len(rows)
    done: set[Op] = set()
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


def _first_to_make_room(op: Op, room: dict[Op, Op], done: set[Op]) -> Op:
    """The first of the receives that must happen before an op finds room; the op if none must."""
    while op in room and room[op] not in done:
        op = room[op]
    return op


def _can_run(schedule: Schedule, op: Op, room: dict[Op, Op], done: set[Op]) -> bool:
    return (op not in room or room[op] in done) and done.issuperset(schedule.dependencies(op))
