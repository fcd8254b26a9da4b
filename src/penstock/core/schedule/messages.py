"""Messages between ranks, and the receives that full channels move forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.core.schedule.columns import Bools, Columns, Ints, Longs, codes_of
from penstock.core.schedule.needs import Needs, Numbers, Walk, needs_of
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, OTHER_END, RECEIVES, Kind

_FORWARD = codes_of({Kind.FORWARD, Kind.SEND_FORWARD})


@dataclass(frozen=True, eq=False)
class Messages:
    """Where the ops of some columns and their messages stand, once these are ops, too: a receive
    right before the op that needs it, a send right behind the one that makes it.

    Attributes:
        first: the number of each rank's first op, and behind them the count of all.
        number: of each op of the columns.
        sends, receives: the numbers of both ends of each message, by the place of its send.
        senders, readers: the numbers in the columns of the ops that they stand beside; of the ends
            themselves, where the columns have these.
    """

    first: Longs
    number: Longs
    sends: Longs
    receives: Longs
    senders: Longs
    readers: Longs

    @property
    def count(self) -> int:
        """How many ops and messages' ends there are."""
        return int(self.first[-1])


def messages_of(columns: Columns) -> Messages:
    """The messages that a schedule has or, where it has none, those that it takes to run it.

    Raises:
        ScheduleError: an op stands twice, or what ops need of other ranks is no message from stage
            to stage; ``check`` says more.
    """
    return (_explicit if COMMUNICATION & columns.kinds else _implied)(columns)


def _explicit(columns: Columns) -> Messages:
    numbers = Numbers(columns)
    numbers.check()
    receives = np.flatnonzero(columns.are_of(RECEIVES))
    sends = np.empty(len(receives), np.int64)
    for kind in RECEIVES & columns.kinds:
        own = columns.are_of({kind})[receives]
        stages, send = OTHER_END[kind]
        sends[own] = numbers.other(receives[own], send, stages)
    alone = np.flatnonzero(sends == numbers.absent)
    if alone.size:
        raise ScheduleError(f"{columns.op(int(receives[alone[0]]))} has no send on any rank")
    order = sends.argsort()
    sends, receives = sends[order], receives[order]
    numbering = np.arange(columns.count)
    return Messages(columns.first, numbering, sends, receives, sends, receives)


def _implied(columns: Columns) -> Messages:
    needs = needs_of(columns)
    single, computes = needs.single.copy(), columns.are_of(COMPUTE)
    for op in filter(computes.__getitem__, needs.several):
        there = [need for need in needs.several[op] if need < columns.count]
        elsewhere = [need for need in there if columns.rank[need] != columns.rank[op]]
        if len(elsewhere) > 1:
            raise ScheduleError(f"{columns.op(op)} needs more than one result of other ranks")
        single[op] = (elsewhere or [needs.nothing])[0]
    readers = np.flatnonzero(computes & (single < columns.count))
    readers = readers[columns.rank[readers] != columns.rank[single[readers]]]
    needed = single[readers]
    reader = np.full(columns.count, -1, np.int64)
    reader[needed] = readers
    senders = np.flatnonzero(reader >= 0)
    # A message goes from stage to stage, and its result to one op.
    again = needed[reader[needed] != readers]
    inside = senders[columns.stage[senders] == columns.stage[reader[senders]]]
    for odd in (*again[:1].tolist(), *inside[:1].tolist()):
        raise ScheduleError(f"{columns.op(odd)} is needed where no message goes: see check")
    readers = reader[senders]
    received, sent = np.zeros((2, columns.count + 1), np.int64)
    received[readers] = 1
    sent[senders + 1] = 1
    before = (received + sent).cumsum()
    number = np.arange(columns.count) + before[:-1]
    first = columns.first + (before - received)[columns.first]
    return Messages(first, number, number[senders] + 1, number[readers] - 1, senders, readers)


def bounded(columns: Columns, messages: Messages, capacity: int) -> tuple[Needs, Ints]:
    """The needs of ops and messages where a channel holds so many messages; and for each of them,
    the receive that makes room for it, or ``Needs.nothing``.

    With a capacity of 0, nothing lies in a channel: a message passes once its receive is posted.
    Posting a send makes nobody wait, but the messages from one rank to another pass in the order of
    their sends, whatever they hold. So there each receive waits for the one before, in that order.

    Args:
        columns, messages: as ``messages_of`` gives them.
        capacity: how many messages a channel holds before its sender waits.
    """
    needs = needs_of(columns)
    nothing, absent = messages.count, messages.count + 1
    single, room = np.full((2, messages.count), nothing, np.int32)
    number = np.concatenate((messages.number, (nothing, absent))).astype(np.int32)
    single[messages.number] = number[needs.single]
    several = {int(number[op]): number[own].tolist() for op, own in needs.several.items()}
    # 1. Whoever waited for a result finds it in front; its receive waits for the send.
    single[number[messages.readers]] = nothing
    single[messages.receives] = messages.sends
    # 2. A send waits for room; or a receive, for those before.
    if capacity:
        waiting, freeing = _room(columns, messages, capacity)
        room[messages.sends[waiting]] = messages.receives[freeing]
        single[messages.sends[waiting]] = messages.receives[freeing]
    else:
        later, before = _in_sending_order(columns, messages)
        room[messages.receives[later]] = messages.receives[before]
        for message, other in zip(later.tolist(), before.tolist(), strict=True):
            receive = int(messages.receives[message])
            several[receive] = [int(messages.sends[message]), int(messages.receives[other])]
        single[[*several]] = absent
    return Needs(single, several, nothing, absent), room


def _room(columns: Columns, messages: Messages, capacity: int) -> tuple[Longs, Longs]:
    """Which messages wait until which others have been received: the n-th send of a channel waits
    for receive number n − capacity. A channel leads from one stage to another on one pair of ranks:
    a stage may have several copies."""
    waiting, freeing = [], []
    forward = _FORWARD[columns.kind[messages.senders]]
    for way in np.flatnonzero(forward), np.flatnonzero(~forward):
        senders, readers = messages.senders[way], messages.readers[way]
        # With the sender's rank in front, most come sorted.
        channel = columns.rank[senders].astype(np.int64) * columns.num_stages
        channel += columns.stage[senders]
        channel = channel * columns.num_ranks + columns.rank[readers]
        later, before = _neighbours(channel, capacity)
        waiting.append(way[later])
        freeing.append(way[before])
    return np.concatenate(waiting), np.concatenate(freeing)


def _in_sending_order(columns: Columns, messages: Messages) -> tuple[Longs, Longs]:
    """Messages, and those that the same rank has sent to the same rank before them."""
    pair = columns.rank[messages.senders].astype(np.int64) * columns.num_ranks
    return _neighbours(pair + columns.rank[messages.readers], 1)


def _neighbours(channel: Longs, distance: int) -> tuple[Longs, Longs]:
    """The places of a channel's messages, and of those so many before them in it."""
    order = channel.argsort(kind="stable")
    same = channel[order][distance:] == channel[order][:-distance]
    return order[distance:][same], order[:-distance][same]


def hoist(walk: Walk, messages: Messages, needs: Needs, room: Ints) -> tuple[Longs, Longs]:
    """Let a walk go to its end, if it comes there by moving receives to where their ranks wait.

    Receives stand right before the ops that use them. Some orders, breadth-first for one, send many
    messages long before the first is used; a receive then has to take its message out of the way.
    It is moved only once nothing else can go on, and to where its rank waits at that moment.

    Args:
        walk: at its beginning.
        messages, needs, room: of the walk.

    Returns:
        The receives that had to move, and before which ops they belong. Of those with one place,
        the first stays first.
    """
    moved: list[Longs] = [np.empty(0, np.int64)]
    places: list[Longs] = [np.empty(0, np.int64)]
    while not walk.to_the_end():
        waiting = walk.waiting()
        wanted = _first_to_make_room(walk, waiting, room, needs.nothing)
        wanted = wanted[(wanted != waiting) & _can_run(walk, wanted, needs)]
        if not wanted.size:
            break
        ranks = np.searchsorted(messages.first, wanted, "right") - 1
        # Each comes right to where its rank is, before those that have come there.
        moved.append(wanted[::-1])
        places.append(walk.waits_at(ranks)[::-1])
        walk.run(wanted)
    return np.concatenate(moved), np.concatenate(places)


def _first_to_make_room(walk: Walk, ops: Longs, room: Ints, nothing: int) -> Longs:
    """The first of the receives that must happen before an op finds room; the op if none must."""
    first = ops.copy()
    while True:
        further = room[first]
        blocked = (further != nothing) & ~walk.are_done(further)
        if not blocked.any():
            return first
        first[blocked] = further[blocked]


def _can_run(walk: Walk, ops: Longs, needs: Needs) -> Bools:
    wanted = (needs.of(op) for op in ops.tolist())
    return np.array([walk.are_done(np.array(own)).all() for own in wanted], np.bool_)


def in_new_order(messages: Messages, moved: Longs, places: Longs) -> Longs:
    """The numbers of all ops and messages, in the order in which they stand after ``hoist``."""
    staying = np.delete(np.arange(messages.count), moved)
    return np.insert(staying, np.searchsorted(staying, places), moved)
