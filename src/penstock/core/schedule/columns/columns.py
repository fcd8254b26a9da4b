"""``Columns``: a schedule as arrays, one for each field of its ops.

An op in a tuple takes a hundred bytes and a microsecond each time it is looked up; as a row of
columns it takes thirteen bytes, and numpy handles millions of rows in one call. Whoever has a large
schedule goes this way, and gets the same answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from penstock.core.schedule.op import COMPUTE, Kind, Op

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Bools = npt.NDArray[np.bool_]

Span = slice
"""Which numbers: under its own name, since columns have a field called slice."""

_ALL = slice(None)
_PIECE = 1024

Fields = tuple[Ints, Codes, Ints, Ints]
"""Stages, kinds, microbatches and slices of ops."""

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}


def codes_of(kinds: Collection[Kind]) -> Bools:
    """For each code, whether it stands for one of these kinds."""
    return np.array([kind in kinds for kind in KINDS])


@dataclass(frozen=True, eq=False)
class Columns:
    """The ops of all ranks, laid end to end: op number n is the n-th of them.

    Attributes:
        first: the number of each rank's first op, and behind them the count of all ops.
        stage, microbatch, slice: as in ``Op``.
        kind: by its place in ``KINDS``.
    """

    first: Longs
    stage: Ints
    kind: Codes
    microbatch: Ints
    slice: Ints

    @classmethod
    def of_ranks(cls, ranks: Sequence[Sequence[Op]]) -> Columns | None:
        """The columns of ops; ``None`` if their fields are not all what their types say, or too
        large for 32 bits."""
        first = np.concatenate(([0], np.cumsum([len(ops) for ops in ranks], dtype=np.int64)))
        # Arrays of the standard library refuse what is no whole number; numpy would round it.
        stage, microbatch, part = array("i"), array("i"), array("i")
        kind = bytearray()
        for ops in ranks:
            # In pieces, so that an op is still in the processor's cache for its next field.
            for begin in range(0, len(ops), _PIECE):
                piece = ops[begin : begin + _PIECE]
                # Text that equals a kind is none: it would not be found by ``is``.
                if not set(map(type, map(itemgetter(1), piece))) <= {Kind}:
                    return None
                kind += bytes(map(CODES.__getitem__, map(itemgetter(1), piece)))
                try:
                    for index, numbers in ((0, stage), (2, microbatch), (3, part)):
                        numbers.fromlist(list(map(itemgetter(index), piece)))
                except (TypeError, OverflowError):
                    return None
        fields = [np.array(numbers, np.int32) for numbers in (stage, microbatch, part)]
        if min(int(numbers.min(initial=0)) for numbers in fields) < 0:
            return None
        return cls(first, fields[0], np.frombuffer(kind, np.int8), *fields[1:])

    @property
    def count(self) -> int:
        """How many ops there are."""
        return int(self.first[-1])

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, also those without ops."""
        return len(self.first) - 1

    @cached_property
    def rank(self) -> Ints:
        """The rank of each op."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.first))

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that there are."""
        return self.kinds_in(_ALL)

    def kinds_in(self, numbers: Span) -> frozenset[Kind]:
        """The kinds of some ops."""
        counts = np.bincount(self.kind[numbers], minlength=len(KINDS))
        return frozenset(kind for kind, count in zip(KINDS, counts, strict=True) if count)

    @cached_property
    def num_stages(self) -> int:
        """As ``Schedule.num_stages``."""
        return 1 + int(self.stage.max(initial=-1))

    @cached_property
    def num_microbatches(self) -> int:
        """As ``Schedule.num_microbatches``."""
        computes = self.are_of(COMPUTE)
        ends = self.first[1:][np.diff(self.first) > 0] - 1
        if computes[ends].all():
            return 1 + int(self.microbatch.max(initial=-1))
        return 1 + int(self.microbatch[computes].max(initial=-1))

    @cached_property
    def num_slices(self) -> int:
        """As ``Schedule.num_slices``."""
        return 1 + int(self.slice.max(initial=0))

    def spans(self) -> list[Span]:
        """The numbers of each rank's ops."""
        return [slice(begin, end) for begin, end in pairwise(self.first.tolist())]

    def are_of(self, kinds: Collection[Kind]) -> Bools:
        """Which ops are of one of these kinds."""
        return codes_of(kinds)[self.kind]

    def of_kinds(self, numbers: Span, kinds: Collection[Kind]) -> list[bool]:
        """Whether each of some ops is of one of these kinds."""
        which: list[bool] = codes_of(kinds)[self.kind[numbers]].tolist()
        return which

    def stages_with(self, kinds: Collection[Kind], numbers: Span = _ALL) -> tuple[int, ...]:
        """The stages that have ops of some kinds, ascending; among all ops, or some."""
        chosen = codes_of(kinds)[self.kind[numbers]]
        return tuple(np.unique(self.stage[numbers][chosen]).tolist())

    def slices_in(self, numbers: Span) -> int:
        """How many slices a microbatch's sequence is cut into among some ops."""
        return 1 + int(self.slice[numbers].max(initial=0))

    def ops(self, numbers: Span | Longs) -> tuple[Op, ...]:
        """The ops with these numbers."""
        fields = (
            self.stage[numbers].tolist(),
            map(KINDS.__getitem__, self.kind[numbers].tolist()),
            self.microbatch[numbers].tolist(),
            self.slice[numbers].tolist(),
        )
        # What ``Op._make`` does, without a call of Python for each of millions.
        return tuple(map(partial(tuple.__new__, Op), zip(*fields, strict=True)))

    def largest_sum(self, numbers: Span, steps: Mapping[Kind, int]) -> int:
        """The largest sum, from 0 on, of what ops add one after another, by their kinds."""
        added = np.array([steps.get(kind, 0) for kind in KINDS], np.int64)
        return max(0, int(added[self.kind[numbers]].cumsum().max(initial=0)))

    def most_held(self, numbers: Span, left: Mapping[tuple[int, Kind], float]) -> float:
        """The most that is held at once, where an op leaves so much of its microbatch, by its stage
        and kind."""
        table = np.full((self.num_stages, len(KINDS)), np.nan)
        for (stage, kind), amount in left.items():
            table[stage, CODES[kind]] = amount
        after = table[self.stage[numbers], self.kind[numbers]]
        changes = np.flatnonzero(~np.isnan(after))
        after = after[changes]
        whose = [column[numbers][changes] for column in (self.slice, self.microbatch, self.stage)]
        # What a microbatch had before is what its op before has left.
        order = np.lexsort(whose)
        same = np.logical_and.reduce([np.diff(key[order]) == 0 for key in whose])
        before = np.zeros(len(order))
        before[order[1:][same]] = after[order[:-1][same]]
        # One after the other, as many small numbers are added op by op: to the bit.
        return max(0.0, float((after - before).cumsum().max(initial=0.0)))

    def most_named(self, numbers: Span, kind: Kind) -> int:
        """The most ops of a kind that one microbatch has among these."""
        named = self.microbatch[numbers][self.kind[numbers] == CODES[kind]]
        return int(np.bincount(named).max(initial=0))
