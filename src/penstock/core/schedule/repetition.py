"""The middle of a schedule, in which ranks do the same again and again for later microbatches; and
schedules without most of it.

Of many microbatches, nearly all of a schedule is such a middle: each turn of it takes every rank a
few microbatches further. It holds no more at once than it does in its first turns, so a schedule of
some hundred microbatches tells what one of a million needs, and how long that takes follows from
it, too (``timing.simulator.leaps``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.core.schedule.check import check
from penstock.core.schedule.columns import Columns, Longs, Span
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule

MANY = 1_000
"""Microbatches from which on most are left out; fewer are quickly gone through."""

_FEWEST, _MOST, _MOST_PER_RANK = 64, 2_048, 32
"""Microbatches of a short schedule."""
_TIMES_SHORTER = 4
_FEWEST_TURNS = 16
"""More than see the beginning or the end."""
_CALM = 1
"""Turns that are left to what comes before them."""
_LONGEST_TURN, _PER_RANK = 256, 8
"""Microbatches of a turn, for which is looked."""
MOST_PARTS = 16
"""That a rank goes through one after the other: forwards and backwards of eight stages."""


class Repetition(NamedTuple):
    """A part of a schedule that ranks repeat, turn after turn. No op waits for one of a later turn.

    Attributes:
        begins: of each rank, the number of the first op of its first turn.
        lengths: of each rank, how many ops a turn has.
        turns: how many there are.
        stops: of each rank, the number of the op behind the part in which it does this: behind its
            last op, its last forward, or the last op of one of its stages.
        microbatches: how many further each turn is than the one before.
        reach: how many turns back the ops are, at most, that those of a turn wait for.
    """

    begins: Longs
    lengths: Longs
    turns: int
    stops: Longs
    microbatches: int
    reach: int

    @property
    def ends(self) -> Longs:
        """Of each rank, the number of the op behind its last turn."""
        return self.begins + self.turns * self.lengths

    @property
    def ops(self) -> Longs:
        """The numbers of all ops of the turns, a row per turn, rank by rank."""
        within = np.concatenate([np.arange(length) for length in self.lengths])
        first = np.repeat(self.begins, self.lengths) + within
        later = np.arange(self.turns)[:, None] * np.repeat(self.lengths, self.lengths)
        numbers: Longs = first + later
        return numbers

    def shows_pace(self, num_ranks: int) -> bool:
        """Whether there are enough turns to show how long they take."""
        # Ranks that hold each other up have a rhythm of as many microbatches as there are ranks.
        rhythm = -(-num_ranks // self.microbatches)
        return self.turns >= max(_FEWEST_TURNS, 2 * (rhythm + self.reach))


def repetitions_of(columns: Columns) -> tuple[Repetition, ...]:
    """The parts of a schedule that ranks repeat, in their order, worked out once: one part where
    forwards and backwards take turns, two where all forwards come first, more where all
    microbatches pass one stage of a rank before they pass its next; none where nothing repeats,
    not in a way that is known here, or not often enough to show a pace."""
    kept = vars(columns)  # as ``needs_of`` keeps what it finds
    if "repetitions" not in kept:
        own = _parts_of(columns)
        begins = [columns.first[:-1], *(part.stops for part in own)]
        parts = [_in_step(columns, part, begin) for part, begin in zip(own, begins, strict=False)]
        kept["repetitions"] = () if None in parts else tuple(parts)
    repetitions: tuple[Repetition, ...] = kept["repetitions"]
    return repetitions


def abridged(
    build: Callable[[int], Schedule], num_microbatches: int, fewest: int, most_parts: int = 1
) -> Schedule | None:
    """The schedule of so few microbatches that the one of ``num_microbatches`` is this one with
    more turns of the same in its middle; ``None`` where that is not so, or spares little.

    Args:
        build: makes the schedule of any number of microbatches.
        num_microbatches: of the whole one.
        fewest: so many are enough for ``build``, twice as many as there are ranks.
        most_parts: that ranks may repeat. Where there are several, a later turn of forwards holds
            more than an earlier one.
    """
    few, most = max(_FEWEST, fewest), max(_MOST, _MOST_PER_RANK * fewest)
    while few <= most and num_microbatches >= max(MANY, _TIMES_SHORTER * few):
        short = build(few)
        turns = repetitions_of(short.columns)
        if 0 < len(turns) <= most_parts:
            rest = (num_microbatches - few) % turns[0].microbatches
            short = build(few + rest) if rest else short
            if _goes_on(short, build, turns[0].microbatches):
                return short
        few *= 2
    return None


def _goes_on(short: Schedule, build: Callable[[int], Schedule], microbatches: int) -> bool:
    """Whether the schedule of so many microbatches more has one turn more."""
    turns = repetitions_of(short.columns)
    if not turns or turns[0].microbatches != microbatches:
        return False
    return with_turns(short, turns, 1) == build(short.num_microbatches + microbatches)


def shortened(schedule: Schedule) -> tuple[Schedule, int]:
    """A schedule of very many microbatches without most turns of its middle, and how many
    microbatches it leaves out; any other one as it is."""
    columns = schedule.columns
    if schedule.num_microbatches < MANY:
        return schedule, 0
    kept = vars(columns)
    if "shortened" not in kept:
        kept["shortened"] = _shortened(schedule) or (schedule, 0)
    short: tuple[Schedule, int] = kept["shortened"]
    return short


def _shortened(schedule: Schedule) -> tuple[Schedule, int] | None:
    parts = _parts_of(schedule.columns)
    few = _FEWEST
    while parts and few * _TIMES_SHORTER <= min(part.turns for part in parts):
        spared = min(part.turns for part in parts) - few
        short = with_turns(schedule, parts, -spared)
        turns = repetitions_of(short.columns)
        same = len(turns) == len(parts) and turns[0].microbatches == parts[0].microbatches
        if same and _is_complete(short):
            return short, spared * parts[0].microbatches
        few *= 2
    return None


def _is_complete(schedule: Schedule) -> bool:
    """Whether nothing is missing: somebody may have written an order that begins with a microbatch
    of its end."""
    with suppress(ScheduleError):
        check(schedule)
        return True
    return False


def with_turns(schedule: Schedule, repetitions: Sequence[Repetition], more: int) -> Schedule:
    """A schedule with so many turns more of each of its repetitions, or fewer if negative."""
    columns, numbers, later = schedule.columns, list[Longs](), list[Longs]()
    for rank, span in enumerate(columns.spans()):
        begin = span.start
        for repetition in repetitions:
            length, stop = int(repetition.lengths[rank]), int(repetition.stops[rank])
            end, shift = int(repetition.ends[rank]), more * repetition.microbatches
            before, behind = np.arange(begin, end + min(more, 0) * length), np.arange(end, stop)
            again = np.tile(np.arange(end - length, end), max(more, 0))
            turn = np.repeat(np.arange(1, max(more, 0) + 1), length)
            numbers += [before, again, behind]
            later += [0 * before, turn * repetition.microbatches, np.full(len(behind), shift)]
            begin = stop
    further = sum(more * repetition.lengths for repetition in repetitions)
    first = columns.first + np.concatenate(([0], np.cumsum(further)))
    stage, kind, microbatch, part = columns.fields(np.concatenate(numbers))
    moved = (microbatch + np.concatenate(later)).astype(np.int32)
    return schedule.with_columns(Columns(first, stage, kind, moved, part))


def _parts_of(columns: Columns) -> list[Repetition]:
    """As ``repetitions_of``, but that ranks may have turns with different beginnings, so that ops
    wait for some of a later turn."""
    ways = [[columns.spans()], *_one_after_the_other(columns)]
    most = max(_LONGEST_TURN, _PER_RANK * columns.num_ranks)
    longest = min(columns.num_microbatches // _FEWEST_TURNS, most)
    for microbatches in range(1, longest + 1):
        for way in ways:
            parts = [_repeated(columns, spans, microbatches) for spans in way]
            if None not in parts:
                return list(filter(None, parts))
    return []


def _one_after_the_other(columns: Columns) -> Iterator[list[list[Span]]]:
    """The ops of ranks in parts: where all forwards come first, and where all microbatches pass one
    stage of a rank before they pass its next."""
    every = columns.spans()
    forwards = [columns.are_of({Kind.FORWARD}, span) for span in every]
    counts = [int(np.count_nonzero(own)) for own in forwards]
    if all(own[:count].all() for own, count in zip(forwards, counts, strict=True)):
        yield _cut(every, [[count] for count in counts])
    changes = []
    for span, own in zip(every, forwards, strict=True):
        stage = columns.fields(span)[0]
        changes.append(np.flatnonzero((np.diff(stage) != 0) | (own[1:] != own[:-1])) + 1)
        if not 1 < len(changes[-1]) < MOST_PARTS or len(changes[-1]) != len(changes[0]):
            return
    yield _cut(every, [own.tolist() for own in changes])


def _cut(spans: Sequence[Span], places: Sequence[Sequence[int]]) -> list[list[Span]]:
    """Of each part, the spans of all ranks.

    Args:
        places: of each rank, where a part ends and the next begins.
    """
    ends = [[0, *own, span.stop - span.start] for span, own in zip(spans, places, strict=True)]
    return [
        [
            slice(span.start + own[number], span.start + own[number + 1])
            for span, own in zip(spans, ends, strict=True)
        ]
        for number in range(len(ends[0]) - 1)
    ]


def _repeated(columns: Columns, spans: list[Span], microbatches: int) -> Repetition | None:
    """What ranks repeat among some of their ops, so many microbatches later each time."""
    runs = []
    for span in spans:
        run = _longest_run(columns, span, microbatches)
        if run[-1] < _FEWEST_TURNS:
            return None
        runs.append(run)
    begins, lengths, turns = np.array(runs, np.int64).T
    stops = np.array([span.stop for span in spans], np.int64)
    return Repetition(begins, lengths, int(turns.min()), stops, microbatches, 0)


def _longest_run(columns: Columns, span: Span, microbatches: int) -> tuple[int, int, int]:
    """Where a rank does longest the same again: the number of the first op, how many ops a turn
    has, and how many turns there are."""
    stage, kind, microbatch, part = columns.fields(span)
    middle = columns.num_microbatches // 2
    length = int(np.count_nonzero((microbatch >= middle) & (microbatch < middle + microbatches)))
    if not length or 2 * length > len(kind):
        return 0, 0, 0
    probe = (len(kind) - length) // 2
    if microbatch[probe + length] != microbatch[probe] + microbatches:
        return 0, 0, 0
    same = microbatch[length:] == microbatch[:-length] + microbatches
    for field in (stage, kind, part):
        same &= field[length:] == field[:-length]
    breaks = np.concatenate(([-1], np.flatnonzero(~same), [len(same)]))
    runs = np.diff(breaks) - 1
    longest = int(runs.argmax())
    begin = span.start + int(breaks[longest]) + 1
    return begin, length, int(runs[longest]) // length + 1


def _in_step(columns: Columns, part: Repetition, first: Longs) -> Repetition | None:
    """A part in which turns are counted so that no op waits for one of a later turn; ``None`` where
    one waits for what is outside of them, or where too few are left.

    Args:
        first: of each rank, the number of the part's first op. What came through the whole part
            before, some ranks' numbers of microbatches ago, nobody waits for.
    """
    begins = _complete(columns, part.begins + _CALM * part.lengths)
    turns = int(((part.ends - begins) // part.lengths).min())
    own = part._replace(begins=begins, turns=turns)
    if turns < _FEWEST_TURNS:
        return None
    middle = turns // 2
    makers = _awaited(columns, own.ops[middle])
    makers = makers[makers >= first[columns.rank[makers]]]
    source = columns.rank[makers]
    turn = (makers - begins[source]) // part.lengths[source]
    if ((makers < begins[source]) | (turn > middle)).any():
        return None
    reach = max(1, int((middle - turn).max(initial=0)))
    own = own._replace(reach=reach)
    return own if own.shows_pace(columns.num_ranks) else None


def _complete(columns: Columns, position: Longs) -> Longs:
    """How far ranks are, at least so far each, if all is done that what is done has waited for."""
    begun, position = columns.first[:-1], position.copy()
    while (begun < position).any():
        spans = zip(begun.tolist(), position.tolist(), strict=True)
        ops = np.concatenate([np.arange(*span) for span in spans])
        begun = position.copy()
        makers = _awaited(columns, ops)
        np.maximum.at(position, columns.rank[makers], makers + 1)
    return position


def _awaited(columns: Columns, ops: Longs) -> Longs:
    """What some ops wait for."""
    needs = needs_of(columns)
    single = needs.single[ops].astype(np.int64)
    further = [need for op in {*ops.tolist()} & {*needs.several} for need in needs.several[op]]
    awaited = np.concatenate((single, np.array(further, np.int64)))
    return awaited[awaited < needs.nothing]
