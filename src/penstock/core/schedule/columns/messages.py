"""Messages between the ranks of large schedules, and the receives that full channels move forward:
what ``channels`` and ``lower.add_communication`` do op by op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.schedule.channels import RECEIVES
from penstock.core.schedule.columns.columns import Columns, Ints, Longs, codes_of
from penstock.core.schedule.columns.needs import Needs, needs_of
from penstock.core.schedule.columns.walk import Walk
from penstock.core.schedule.op import COMMUNICATION, COMPUTE, Kind

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


def messages_of(columns: Columns) -> Messages | None:
    """The messages that a schedule has or, where it has none, those that it takes to run it.
    ``None`` where ops wait for something else than such messages: then it is looked at op by op."""
    needs = needs_of(columns)
    if needs is None:
        return None
    return (_explicit if COMMUNICATION & columns.kinds else _implied)(columns, needs)


def _explicit(columns: Columns, needs: Needs) -> Messages | None:
    received = np.flatnonzero(columns.are_of(RECEIVES))
    if (needs.single[received] >= columns.count).any():
        return None
    sends, receives = _by_sender(columns, needs, received)
    ends = np.count_nonzero(columns.are_of(COMMUNICATION))
    if 2 * len(sends) != ends or (needs.single[sends] != needs.nothing).any():
        return None
    numbers = np.arange(columns.count)
    return Messages(columns.first, numbers, sends, receives, sends, receives)


def _implied(columns: Columns, needs: Needs) -> Messages | None:
    computes = columns.are_of(COMPUTE)
    if any(computes[op] for op in needs.several):
        return None
    readers = np.flatnonzero(computes & (needs.single < columns.count))
    readers = readers[columns.rank[readers] != columns.rank[needs.single[readers]]]
    crossing = len(readers)
    senders, readers = _by_sender(columns, needs, readers)
    # A message goes from stage to stage, and its result to one op.
    if len(senders) < crossing or (columns.stage[senders] == columns.stage[readers]).any():
        return None
    received, sent = np.zeros((2, columns.count + 1), np.int64)
    received[readers] = 1
    sent[senders + 1] = 1
    before = (received + sent).cumsum()
    number = np.arange(columns.count) + before[:-1]
    first = columns.first + (before - received)[columns.first]
    return Messages(first, number, number[senders] + 1, number[readers] - 1, senders, readers)


def _by_sender(columns: Columns, needs: Needs, readers: Longs) -> tuple[Longs, Longs]:
    """The ops that some ops need, ascending, and for each of them the last that needs it."""
    reader = np.full(columns.count, -1, np.int64)
    reader[needs.single[readers]] = readers
    senders = np.flatnonzero(reader >= 0)
    return senders, reader[senders]


def bounded(columns: Columns, messages: Messages, capacity: int) -> Needs:
    """What ops and messages wait for where a channel holds so many messages.

    Args:
        columns, messages: as ``messages_of`` gives them, so that needs are known.
        capacity: how many messages a channel holds before its sender waits.
    """
    needs = needs_of(columns)
    assert needs is not None
    nothing, absent = messages.count, messages.count + 1
    single = np.full(messages.count, nothing, np.int32)
    number = np.concatenate((messages.number, (nothing, absent))).astype(np.int32)
    single[messages.number] = number[needs.single]
    # 1. Whoever waited for a result finds it in front; its receive waits for the send.
    single[number[messages.readers]] = nothing
    single[messages.receives] = messages.sends
    # 2. A send waits for room.
    waiting, freeing = _room(columns, messages, capacity)
    single[messages.sends[waiting]] = messages.receives[freeing]
    several = {int(number[op]): number[own].tolist() for op, own in needs.several.items()}
    return Needs(single, several, nothing, absent)


def _room(columns: Columns, messages: Messages, capacity: int) -> tuple[Longs, Longs]:
    """Which messages wait until which others have been received: ``channels.room_needed``."""
    waiting, freeing = [], []
    forward = _FORWARD[columns.kind[messages.senders]]
    for way in np.flatnonzero(forward), np.flatnonzero(~forward):
        senders, readers = messages.senders[way], messages.readers[way]
        # With the sender's rank in front, most come sorted.
        channel = columns.rank[senders].astype(np.int64) * columns.num_stages
        channel += columns.stage[senders]
        channel = channel * columns.num_ranks + columns.rank[readers]
        order = channel.argsort(kind="stable")
        channel, number = channel[order], way[order]
        same = channel[capacity:] == channel[:-capacity]
        waiting.append(number[capacity:][same])
        freeing.append(number[:-capacity][same])
    return np.concatenate(waiting), np.concatenate(freeing)


def hoist(walk: Walk, messages: Messages, needs: Needs) -> tuple[Longs, Longs]:
    """Let a walk go to its end, if it comes there by moving receives to where their ranks wait.

    Args:
        walk: at its beginning.
        messages, needs: of the walk.

    Returns:
        The receives that had to move, and before which ops they belong. Of those with one place,
        the first stays first.
    """
    is_send = np.zeros(messages.count, np.bool_)
    is_send[messages.sends] = True
    moved: list[Ints] = [np.empty(0, np.int32)]
    places: list[Longs] = [np.empty(0, np.int64)]
    while not walk.to_the_end():
        waiting = walk.waiting()
        # What it takes to make room was sent before, on the same rank: it can be taken out.
        wanted = needs.single[waiting[is_send[waiting]]]
        if not wanted.size:
            break
        ranks = np.searchsorted(messages.first, wanted, "right") - 1
        # Each comes right to where its rank is, before those that have come there.
        moved.append(wanted[::-1])
        places.append(walk.waits_at(ranks)[::-1])
        walk.run(wanted)
    return np.concatenate(moved).astype(np.int64), np.concatenate(places)


def in_new_order(messages: Messages, moved: Longs, places: Longs) -> Longs:
    """The numbers of all ops and messages, in the order in which they stand after ``hoist``."""
    staying = np.delete(np.arange(messages.count), moved)
    return np.insert(staying, np.searchsorted(staying, places), moved)
