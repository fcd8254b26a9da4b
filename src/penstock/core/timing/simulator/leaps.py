"""Steps of very many microbatches, without going through most of their ops.

Nearly all of such a step is a middle that ranks repeat (``schedule.repetition``). Every time in it
is the latest of a few others (its rank is free, what it needs is there, its link is free) and
something more. In the end, all turns are alike but for when they are. Before that, a rank that is a
little faster than another may take thousands of turns to use up its lead, and meanwhile there are
several paces, each as regular.

So the last few turns that were gone through are looked at. If each of their times is as much later
than it was some turns before, by a growth of its own, and each is decided by one that grows as
much as it does, then that goes on until some other one that grows more has caught up with what it
may delay. When this is, is known: so many turns are leapt over, and ranks go through a few more, op
by op, until all turns are through. That is no estimate: it comes to what going through all turns
comes to, but for rounding.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns import Longs
from penstock.core.schedule.needs import Needs
from penstock.core.schedule.repetition import Repetition
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.simulator.passage import (
    Floats,
    LinkUse,
    Progress,
    Sources,
    Times,
    go_through,
)

SAME = 1e-13
"""Relative to the times of a few turns: rounding."""


class Passage(NamedTuple):
    """All by which ranks go through their ops; see ``go_through``."""

    schedule: Schedule
    needs: Needs
    durations: Floats
    delays: Floats
    sources: Sources
    link_use: LinkUse | None

    def times(self, progress: Progress | None = None) -> Times:
        """When each op starts and ends, of all or of those that are to come."""
        return go_through(
            self.schedule,
            self.needs,
            self.durations,
            self.delays,
            self.sources,
            link_use=self.link_use,
            progress=progress,
        )


class TurnPace(NamedTuple):
    """How a few turns after the other are later.

    Attributes:
        turns: after how many all is the same again.
        growth: by how much each time of the last so many turns is later than it was as many before.
        lasts: for how many times as many turns this certainly goes on.
    """

    turns: int
    growth: Floats
    lasts: float

    def leap(self, most: int) -> int:
        """How many turns, at most so many, may be leapt over."""
        return int(min(self.lasts, most // self.turns)) * self.turns


def times_with(passage: Passage, times: Times, repetition: Repetition, more: int) -> Times:
    """When ops behind a repetition start and end if it has more turns.

    Args:
        times: of its schedule as it is.
        more: how many turns.

    Returns:
        For the ops of the last turn, and all behind it, their times; −∞ for what ended long ago.
    """
    turns, later = _TurnTimes(passage, repetition), 0.0
    while more:
        recent = turns.times_in(times)
        pace = turns.pace_of(recent)
        leap = 0 if pace is None else pace.leap(more - 1)
        walked = min(more - leap, repetition.turns - repetition.reach)
        before = _continued(recent, pace, leap + walked)[: repetition.turns - walked]
        since = float(before[-1].min())
        times, later = turns.go_on(before - since), later + since
        more -= leap + walked
    return Times(*(part + later for part in times))


def _continued(recent: Floats, pace: TurnPace | None, turns: int) -> Floats:
    """The times of as many turns as there are, ``turns`` later; those that no pace tells are not
    asked for."""
    places, count = np.arange(turns, turns + len(recent)), len(recent)
    if pace is None:
        return recent[np.minimum(places, count - 1)]
    times_later = np.maximum(0, (places - count) // pace.turns + 1)
    known = places - times_later * pace.turns
    growth = pace.growth[(known - count) % pace.turns]
    continued: Floats = recent[known] + times_later[:, None] * growth
    return continued


class _TurnTimes:
    """The times of a repetition, a row per turn: of each op when it ends, and if there are links,
    when its result leaves. Each is the latest of some others, in this turn or a little before, and
    something more.
    """

    def __init__(self, passage: Passage, repetition: Repetition) -> None:
        self._passage, self._repetition = passage, repetition
        self._ops = repetition.ops
        self._target, self._source, self._back, self._more = self._edges()

    def _edges(self) -> tuple[Longs, Longs, Longs, Floats]:
        """Which time follows on which other, how many turns back that is, and by how much it is
        later at least."""
        passage, width = self._passage, self._ops.shape[1]
        columns = passage.schedule.columns
        middle = self._repetition.turns // 2
        ops = self._ops[middle]
        own = np.arange(width)
        # 1. The number of the column of each op, and of its turn.
        column = np.full(columns.count + 2, -1)
        column[self._ops] = own
        turn = np.zeros(columns.count + 2, np.int64)
        turn[self._ops] = np.arange(len(self._ops))[:, None]
        # 2. Ends wait for the rank, and for what they need, which has left before.
        waits, makers, late = [own], [ops - 1], [np.zeros(width)]
        needed = passage.needs.single[ops]
        there = np.flatnonzero(needed < passage.needs.nothing)
        waits, makers = [*waits, there], [*makers, needed[there]]
        late.append(passage.delays[ops[there]])
        for place, op in enumerate(ops.tolist()):
            for need, delay in passage.sources.get(op, ()):
                if need < passage.needs.nothing:
                    waits.append(np.array([place]))
                    makers.append(np.array([need]))
                    late.append(np.array([delay]))
        target, maker = np.concatenate(waits), np.concatenate(makers).astype(np.int64)
        source, back = column[maker], middle - turn[maker]
        more = np.concatenate(late) + passage.durations[ops[target]]
        if passage.link_use is None:
            return target, source, back, more
        # 3. Results wait for their ends, and for their links.
        source = np.where(np.arange(len(source)) < width, source, source + width)
        sends, previous, busy = _previous_on_link(passage.link_use, ops, self._ops[middle - 1])
        return (
            np.concatenate([target, own + width, own[sends] + width]),
            np.concatenate([source, own, column[previous] + width]),
            np.concatenate([back, np.zeros(width, np.int64), middle - turn[previous]]),
            np.concatenate([more, np.zeros(width), busy]),
        )

    def times_in(self, times: Times) -> Floats:
        """The times of all turns."""
        ends = times.end[self._ops]
        if self._passage.link_use is None:
            return ends
        return np.concatenate([ends, times.sent[self._ops]], axis=1)

    def pace_of(self, recent: Floats) -> TurnPace | None:
        """The pace of the last turns, if they have one."""
        reach, count = self._repetition.reach, len(recent)
        hair = SAME * float(np.abs(recent).max())
        for turns in range(1, (count - reach) // 2 + 1):
            begin = count - 2 * turns - reach
            growth = recent[begin + turns :] - recent[begin : count - turns]
            if np.abs(growth[turns:] - growth[:reach]).max() <= hair:
                return self._lasting(recent, growth[-turns:], hair)
        return None

    def _lasting(self, recent: Floats, growth: Floats, hair: float) -> TurnPace | None:
        """For how long a growth goes on; ``None`` if it has not begun."""
        turns, count = len(growth), len(recent)
        rows = np.arange(count - turns, count)[:, None]
        sources = rows - self._back
        slack = recent[rows, self._target] - recent[sources, self._source] - self._more
        own = growth[rows - (count - turns), self._target]
        faster = growth[(sources - (count - 2 * turns)) % turns, self._source] - own
        decided = np.zeros((turns, recent.shape[1]), np.bool_)
        decides = (slack <= hair) & (np.abs(faster) <= hair)
        row, edge = np.nonzero(decides)
        decided[row, self._target[edge]] = True
        if not decided.all():
            return None
        catching_up = faster > hair
        lasts = np.floor(np.maximum(slack[catching_up], 0.0) / faster[catching_up])
        return TurnPace(turns, growth, float(lasts.min(initial=inf)))

    def go_on(self, before: Floats) -> Times:
        """Let ranks go through the turns behind those whose times are known, and all that follows.

        Args:
            before: the times of all turns but the last ones.
        """
        passage, repetition = self._passage, self._repetition
        columns, known = passage.schedule.columns, self._ops[: len(before)]
        position = (repetition.begins + len(before) * repetition.lengths).tolist()
        ends = np.full(columns.count + 2, inf)
        for begin, reached in zip(columns.first.tolist(), position, strict=False):
            ends[begin:reached] = -inf
        ends[passage.needs.nothing] = -inf
        leaves, links, width = ends.copy(), list[float](), known.shape[1]
        ends[known], leaves[known] = before[:, :width], before[:, -width:]
        end = sent = array("d", ends.tobytes())
        if (link_use := passage.link_use) is not None:
            free = np.full(link_use.num_links + 1, -inf)  # the last one is for what stays
            np.maximum.at(free, link_use.links[known], leaves[known] + link_use.busy[known])
            sent, links = array("d", leaves.tobytes()), free.tolist()
        done = [end[reached - 1] for reached in position]
        return passage.times(Progress(position, done, end, sent, links))


def _previous_on_link(link_use: LinkUse, ops: Longs, before: Longs) -> tuple[Longs, Longs, Floats]:
    """The places of ops whose results go over a link, the ops whose results went over it before
    these, and for how long.

    Args:
        ops: of a turn.
        before: the same ones of the turn before.
    """
    latest = dict(zip(link_use.links[before].tolist(), before.tolist(), strict=True))
    places, previous = [], []
    for place, op in enumerate(ops.tolist()):
        link = int(link_use.links[op])
        if link >= 0:
            places.append(place)
            previous.append(latest[link])
            latest[link] = op
    numbers = np.array(previous, np.int64)
    return np.array(places, np.int64), numbers, link_use.busy[numbers]
