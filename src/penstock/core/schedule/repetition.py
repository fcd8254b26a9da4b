"""The middle of a schedule, in which ranks do the same again and again for later microbatches; and
schedules without most of it.

Of many microbatches, nearly all of a schedule is such a middle: each turn of it takes every rank a
few microbatches further. It holds no more at once than it does in its first turns, so a schedule of
some hundred microbatches tells what one of a million needs, and how long that takes follows from
it, too (``timing.simulator.leaps``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.columns import Columns, Longs, Span
from penstock.core.schedule.needs import needs_of
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule

MANY = 1_000
"""Microbatches from which on a schedule may be abridged; fewer are quickly gone through."""

_FEWEST, _MOST, _MOST_PER_RANK = 64, 2_048, 32
"""Microbatches of a short schedule."""
_TIMES_SHORTER = 4
_FEWEST_TURNS = 16
"""More than see the beginning or the end."""


class Repetition(NamedTuple):
    """A part of a schedule that ranks repeat, turn after turn. No op waits for one of a later turn.

    Attributes:
        begins: of each rank, the number of the first op of its first turn.
        lengths: of each rank, how many ops a turn has.
        turns: how many there are.
        microbatches: how many further each turn is than the one before.
        reach: how many turns back the ops are, at most, that those of a turn wait for.
    """

    begins: Longs
    lengths: Longs
    turns: int
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


def repetitions_of(columns: Columns) -> tuple[Repetition, ...]:
    """The parts of a schedule that ranks repeat, in their order, worked out once: one part where
    forwards and backwards take turns, two where all forwards come first; none where nothing
    repeats, or not in a way that is known here."""
    kept = vars(columns)  # as ``needs_of`` keeps what it finds
    if "repetitions" not in kept:
        kept["repetitions"] = _repetitions_of(columns)
    repetitions: tuple[Repetition, ...] = kept["repetitions"]
    return repetitions


def abridged(
    build: Callable[[int], Schedule], num_microbatches: int, fewest: int
) -> Schedule | None:
    """The schedule of so few microbatches that the one of ``num_microbatches`` is this one with
    more turns of the same in its middle; ``None`` where that is not so, or spares little.

    Args:
        build: makes the schedule of any number of microbatches.
        num_microbatches: of the whole one.
        fewest: so many are enough for ``build``, twice as many as there are ranks.
    """
    few, most = max(_FEWEST, fewest), max(_MOST, _MOST_PER_RANK * fewest)
    while few <= most and num_microbatches >= max(MANY, _TIMES_SHORTER * few):
        short = build(few)
        turn = _only_turn(short)
        if turn is not None:
            rest = (num_microbatches - few) % turn.microbatches
            short = build(few + rest) if rest else short
            if _goes_on(short, build, turn.microbatches):
                return short
        few *= 2
    return None


def _only_turn(schedule: Schedule) -> Repetition | None:
    """What a schedule repeats, if it holds no more in a later turn than in an earlier one, and has
    enough turns to show how long they take."""
    repetitions = repetitions_of(schedule.columns)
    if len(repetitions) != 1:
        return None
    (repetition,) = repetitions
    # Ranks that hold each other up show a rhythm of as many microbatches as there are ranks.
    rhythm = -(-schedule.num_ranks // repetition.microbatches)
    return repetition if repetition.turns >= 2 * (rhythm + repetition.reach) else None


def _goes_on(short: Schedule, build: Callable[[int], Schedule], microbatches: int) -> bool:
    """Whether the schedule of so many microbatches more has one turn more."""
    turn = _only_turn(short)
    if turn is None or turn.microbatches != microbatches:
        return False
    return with_turns(short, turn, 1) == build(short.num_microbatches + microbatches)


def with_turns(schedule: Schedule, repetition: Repetition, more: int) -> Schedule:
    """A schedule that repeats its only repetition so many times more."""
    columns, microbatches = schedule.columns, repetition.microbatches
    numbers, later = [], []
    turns = zip(repetition.lengths.tolist(), repetition.ends.tolist(), strict=True)
    for span, (length, end) in zip(columns.spans(), turns, strict=True):
        again = np.tile(np.arange(end - length, end), more)
        numbers += [np.arange(span.start, end), again, np.arange(end, span.stop)]
        turn = np.repeat(np.arange(1, more + 1), length)
        parts = np.zeros(end - span.start, np.int64), turn, np.full(span.stop - end, more)
        later += [part * microbatches for part in parts]
    first = columns.first + np.concatenate(([0], np.cumsum(more * repetition.lengths)))
    stage, kind, microbatch, part = columns.fields(np.concatenate(numbers))
    moved = (microbatch + np.concatenate(later)).astype(np.int32)
    return schedule.with_columns(Columns(first, stage, kind, moved, part))


def _repetitions_of(columns: Columns) -> tuple[Repetition, ...]:
    ways = [[columns.spans()], *_forwards_and_others(columns)]
    for microbatches in range(1, columns.num_microbatches // _FEWEST_TURNS + 1):
        for parts in ways:
            repetitions = [_repetition(columns, part, microbatches) for part in parts]
            if None not in repetitions:
                return tuple(filter(None, repetitions))
    return ()


def _forwards_and_others(columns: Columns) -> Iterator[list[list[Span]]]:
    """The ops of ranks in two parts, where all forwards come first."""
    forwards, others = [], []
    for span in columns.spans():
        are_forwards = columns.are_of({Kind.FORWARD}, span)
        count = int(np.count_nonzero(are_forwards))
        if not are_forwards[:count].all():
            return
        forwards.append(slice(span.start, span.start + count))
        others.append(slice(span.start + count, span.stop))
    yield [forwards, others]


def _repetition(columns: Columns, spans: list[Span], microbatches: int) -> Repetition | None:
    """What ranks repeat among some of their ops, so many microbatches later each time."""
    runs = []
    for span in spans:
        run = _longest_run(columns, span, microbatches)
        if run[-1] < _FEWEST_TURNS:
            return None
        runs.append(run)
    return _in_step(columns, np.array(runs, np.int64).T, microbatches)


def _longest_run(columns: Columns, span: Span, microbatches: int) -> tuple[int, int, int]:
    """Where a rank does longest the same again: the number of the first op, how many ops a turn
    has, and how many turns there are."""
    stage, kind, microbatch, part = columns.fields(span)
    middle = columns.num_microbatches // 2
    length = int(np.count_nonzero((microbatch >= middle) & (microbatch < middle + microbatches)))
    if not length or 2 * length > len(kind):
        return 0, 0, 0
    same = microbatch[length:] == microbatch[:-length] + microbatches
    for field in (stage, kind, part):
        same &= field[length:] == field[:-length]
    breaks = np.concatenate(([-1], np.flatnonzero(~same), [len(same)]))
    runs = np.diff(breaks) - 1
    longest = int(runs.argmax())
    begin = span.start + int(breaks[longest]) + 1
    return begin, length, int(runs[longest]) // length + 1


def _in_step(columns: Columns, runs: Longs, microbatches: int) -> Repetition | None:
    """The turns of all ranks, counted so that no op waits for one of a later turn; ``None`` where
    one waits for what is outside of them.

    Args:
        runs: of each rank, where its turns begin, how long they are, and how many.
    """
    begins, lengths, turns = runs
    needs, rank = needs_of(columns), columns.rank
    middle = int(turns.min()) // 2
    starts = begins + middle * lengths
    ops = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    pairs = [(op, need) for op in ops.tolist() for need in needs.of(op) if need < needs.nothing]
    readers, makers = np.array(pairs, np.int64).reshape(-1, 2).T
    source, target = rank[makers], rank[readers]
    turn = (makers - begins[source]) // lengths[source]
    if ((turn < 0) | (turn >= turns[source])).any():
        return None
    back, skipped = middle - turn, np.zeros(len(begins), np.int64)
    for _ in range(len(begins) + 1):
        before = skipped.copy()
        np.maximum.at(skipped, source, skipped[target] - back)
        if (before == skipped).all():
            break
    else:
        return None
    count = int((turns - skipped).min())
    reach = max(1, int((back + skipped[source] - skipped[target]).max(initial=0)))
    if count < max(_FEWEST_TURNS, 2 * reach + 2):
        return None
    return Repetition(begins + skipped * lengths, lengths, count, microbatches, reach)
