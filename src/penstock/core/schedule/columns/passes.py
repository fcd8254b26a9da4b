"""Passes on whole columns, for large plans: what ``lower`` does op by op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from penstock.core.schedule.channels import RECEIVED_BY, SENT_BY
from penstock.core.schedule.columns.columns import (
    CODES,
    KINDS,
    Codes,
    Columns,
    Ints,
    Longs,
    Span,
    codes_of,
)
from penstock.core.schedule.columns.messages import (
    Messages,
    bounded,
    hoist,
    in_new_order,
    messages_of,
)
from penstock.core.schedule.columns.walk import Walk
from penstock.core.schedule.op import BACKWARD, RELEASING, Kind


def _codes_by_kind(table: Mapping[Kind, Kind]) -> Codes:
    """The code of what a table has for a kind, by the code of that kind."""
    return np.array([CODES[table.get(kind, kind)] for kind in KINDS], np.int8)


_FREED_BY = dict.fromkeys(RELEASING, Kind.FREE) | {Kind.BACKWARD_INPUT: Kind.FREE_INPUT_PART}
_FREES, _SENDS, _RECEIVES = map(_codes_by_kind, (_FREED_BY, SENT_BY, RECEIVED_BY))


class _Further(NamedTuple):
    """An op of a whole microbatch that comes to the others.

    Attributes:
        place: the number of the op that it comes before; for the end of a rank, one behind its
            last.
        rank, stage, microbatch: its own.
    """

    place: int
    rank: int
    stage: int
    microbatch: int


def with_recompute(columns: Columns, stages: Collection[int]) -> Columns:
    """As ``lower.add_recompute``."""
    chosen = np.isin(columns.stage, list(stages))
    numbers = np.flatnonzero(columns.are_of(BACKWARD) & chosen)
    count = np.bincount(columns.rank[numbers], minlength=columns.num_ranks)
    fields = columns.stage[numbers], columns.microbatch[numbers], columns.slice[numbers]
    return _with_more(columns, CODES[Kind.RECOMPUTE], numbers, count, *fields)


def with_frees(columns: Columns) -> Columns:
    """As ``lower.add_free``."""
    numbers = np.flatnonzero(columns.are_of(_FREED_BY))
    kinds = _FREES[columns.kind[numbers]]
    count = np.bincount(columns.rank[numbers], minlength=columns.num_ranks)
    fields = columns.stage[numbers], columns.microbatch[numbers], columns.slice[numbers]
    return _with_more(columns, kinds, numbers + 1, count, *fields)


def with_messages(columns: Columns, capacity: int | None) -> Columns | None:
    """As ``lower.add_communication``; ``None`` if somebody has to look at it op by op.

    Args:
        columns: without messages.
        capacity: how many of them a channel holds before its sender waits; ``None`` is unlimited.
    """
    messages = messages_of(columns)
    if messages is None:
        return None
    kind = np.empty(messages.count, np.int8)
    kind[messages.number] = columns.kind
    kind[messages.sends] = _SENDS[columns.kind[messages.senders]]
    kind[messages.receives] = _RECEIVES[columns.kind[messages.readers]]
    sent = Columns(
        messages.first,
        _beside(messages, columns.stage),
        kind,
        _beside(messages, columns.microbatch),
        _beside(messages, columns.slice)
        if columns.num_slices > 1
        else np.broadcast_to(columns.slice[:1], messages.count),
    )
    if capacity is None:
        return sent
    needs = bounded(columns, messages, capacity)
    moved, places = hoist(Walk(messages.first, needs), messages, needs)
    if not moved.size:
        return sent
    order = in_new_order(messages, moved, places)
    return Columns(
        sent.first, sent.stage[order], kind[order], sent.microbatch[order], sent.slice[order]
    )


def _beside(messages: Messages, field: Ints) -> Ints:
    """A field of ops and messages: a message has that of the op that it stands beside."""
    whole = np.empty(messages.count, np.int32)
    whole[messages.number] = field
    whole[messages.sends] = field[messages.senders]
    whole[messages.receives] = field[messages.readers]
    return whole


def with_one_behind_last(columns: Columns, kind: Kind, wanted: Callable[[int], bool]) -> Columns:
    """As ``lower.add_reduce``: one op per wanted stage and rank, behind its last gradient."""
    return _with_further(columns, kind, _behind_last(columns, wanted))


def with_updates(columns: Columns, late: Collection[int]) -> Columns:
    """As ``lower.add_update``.

    Args:
        columns: with reductions, where there are any.
        late: the stages whose updates come last on their rank.
    """
    behind = [*_behind_last(columns, lambda stage: stage not in late)]
    ends = (
        _Further(span.stop, rank, stage, _newest(columns, span, stage))
        for rank, span in enumerate(columns.spans())
        for stage, _ in _last_of(columns, span, RELEASING)
        if stage in late
    )
    return _with_further(columns, Kind.UPDATE, [*behind, *ends])


def _behind_last(columns: Columns, wanted: Callable[[int], bool]) -> Iterator[_Further]:
    for rank, span in enumerate(columns.spans()):
        for stage, last in _last_of(columns, span, RELEASING | {Kind.FREE}):
            if wanted(stage):
                yield _Further(last + 1, rank, stage, _newest(columns, span, stage))


def _last_of(columns: Columns, span: Span, kinds: Collection[Kind]) -> list[tuple[int, int]]:
    """(stage, number of its last op of these kinds) on a rank, earlier ones first."""
    numbers = np.flatnonzero(codes_of(kinds)[columns.kind[span]]) + span.start
    # From the back, the first op of each stage is its last.
    stages, places = np.unique(columns.stage[numbers][::-1], return_index=True)
    last = numbers[len(numbers) - 1 - places]
    pairs = zip(stages.tolist(), last.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: pair[1])


def _newest(columns: Columns, span: Span, stage: int) -> int:
    """The last microbatch of a stage whose gradient a rank makes."""
    own = codes_of(RELEASING)[columns.kind[span]] & (columns.stage[span] == stage)
    return int(columns.microbatch[span][own].max())


def _with_further(columns: Columns, kind: Kind, ops: Iterable[_Further]) -> Columns:
    places, ranks, stages, microbatches = np.array([*ops], np.int64).reshape(-1, 4).T
    count = np.bincount(ranks, minlength=columns.num_ranks)
    parts = np.zeros(len(places), np.int64)
    return _with_more(columns, CODES[kind], places, count, stages, microbatches, parts)


def _with_more(
    columns: Columns,
    kinds: Codes | int,
    places: Longs,
    count: Longs,
    stages: Ints | Longs,
    microbatches: Ints | Longs,
    parts: Ints | Longs,
) -> Columns:
    """The columns with further ops, each before the op of its place; of several with one place, the
    first stays first.

    Args:
        kinds: their codes, or the one that all have.
        count: how many each rank gets.
    """
    part = columns.slice
    return Columns(
        columns.first + np.concatenate(([0], count.cumsum())),
        np.insert(columns.stage, places, stages),
        np.insert(columns.kind, places, kinds),
        np.insert(columns.microbatch, places, microbatches),
        np.insert(part, places, parts)
        if columns.num_slices > 1
        else np.broadcast_to(part[:1], columns.count + len(places)),
    )
