"""``Columns``: a schedule as arrays, one for each field of its ops; ``RankOps``: those of a rank.

An op in a tuple takes a hundred bytes and a microsecond each time it is looked up; as a row of
columns it takes thirteen bytes, and numpy handles millions of rows in one call.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import overload

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.base.values import expect, shown
from penstock.core.schedule.op import COMPUTE, Kind, Op

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Bools = npt.NDArray[np.bool_]

Span = slice
"""Which numbers: under its own name, since columns have a field called slice."""

_ALL = slice(None)

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
    def of_ranks(cls, ranks: Sequence[Sequence[Op]]) -> Columns:
        """The columns of ops.

        Raises:
            InputError: one is no op, or a field of it is not what its type says, or beyond 2³¹.
        """
        return cls.of_fields([_fields(rank, ops) for rank, ops in enumerate(ranks)])

    @classmethod
    def of_fields(cls, ranks: Sequence[Fields]) -> Columns:
        """The columns of ranks, each with columns of its own."""
        first = np.cumsum([0, *(len(stage) for stage, *_ in ranks)], dtype=np.int64)
        if not ranks:
            return cls(first, *_fields(0, ()))
        stage, kind, microbatch, part = joined(ranks)
        # Where nothing is sliced, one 0 stands for all.
        part = part if part.any() else np.broadcast_to(np.zeros(1, np.int32), len(part))
        return cls(first, stage, kind, microbatch, part)

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
        counts = np.bincount(self.kind[numbers], minlength=len(KINDS)).tolist()
        return frozenset(kind for kind, count in zip(KINDS, counts, strict=True) if count)

    @cached_property
    def num_stages(self) -> int:
        """As ``Schedule.num_stages``."""
        return 1 + int(self.stage.max(initial=-1))

    @cached_property
    def num_microbatches(self) -> int:
        """As ``Schedule.num_microbatches``."""
        # Updates of replicas may be named after a microbatch that would have been theirs.
        return 1 + int(self.microbatch[self.are_of(COMPUTE)].max(initial=-1))

    @cached_property
    def num_slices(self) -> int:
        """As ``Schedule.num_slices``."""
        return self.slices_in(_ALL)

    @cached_property
    def copies(self) -> Counter[int]:
        """As ``Schedule.copies``."""
        stages = (self.stages_with(COMPUTE, span) for span in self.spans())
        return Counter(chain.from_iterable(stages))

    def spans(self) -> list[Span]:
        """The numbers of each rank's ops."""
        return [slice(begin, end) for begin, end in pairwise(self.first.tolist())]

    def are_of(self, kinds: Collection[Kind], numbers: Span = _ALL) -> Bools:
        """Which ops, of all or some, are of one of these kinds."""
        return codes_of(kinds)[self.kind[numbers]]

    def stages_with(self, kinds: Collection[Kind], numbers: Span = _ALL) -> tuple[int, ...]:
        """The stages that have ops of some kinds, ascending; among all ops, or some."""
        counts = np.bincount(self.stage[numbers][self.are_of(kinds, numbers)])
        return tuple(np.flatnonzero(counts).tolist())

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

    def op(self, number: int) -> Op:
        """The op with this number."""
        return self.ops(slice(number, number + 1))[0]

    def with_more(
        self,
        kinds: Codes | int,
        places: Longs,
        stages: Ints | Longs,
        microbatches: Ints | Longs,
        parts: Ints | Longs,
        ranks: Ints | Longs,
    ) -> Columns:
        """The columns with further ops, each before the op of its place; of several with one place,
        the first stays first.

        Args:
            kinds: their codes, or the one that all have.
            places: numbers of ops; for the end of a rank, one behind its last.
            stages, microbatches, parts: of the further ops; parts are slices.
            ranks: to which they come.
        """
        count = np.bincount(ranks, minlength=self.num_ranks)
        sliced = self.num_slices > 1
        return Columns(
            self.first + np.concatenate(([0], count.cumsum())),
            np.insert(self.stage, places, stages),
            np.insert(self.kind, places, kinds),
            np.insert(self.microbatch, places, microbatches),
            np.insert(self.slice, places, parts)
            if sliced
            else np.broadcast_to(np.zeros(1, np.int32), self.count + len(places)),
        )

    def only(self, kept: Bools) -> Columns:
        """The columns of some of the ops."""
        before = np.concatenate(([0], kept.cumsum()))
        return Columns(before[self.first], *self.fields(kept))

    def fields(self, numbers: Span | Longs | Bools = _ALL) -> Fields:
        """The fields of all ops, or of some."""
        return (
            self.stage[numbers],
            self.kind[numbers],
            self.microbatch[numbers],
            self.slice[numbers],
        )


def joined(parts: Iterable[Fields]) -> Fields:
    """The columns of some ops, and of those behind them."""
    stage, kind, microbatch, part = map(np.concatenate, zip(*parts, strict=True))
    return stage, kind, microbatch, part


def _fields(rank: int, ops: Sequence[Op]) -> Fields:
    if isinstance(ops, RankOps):
        return ops.columns.fields(ops.span)
    if set(map(type, ops)) - {Op}:
        wrong = next(op for op in ops if type(op) is not Op)
        raise InputError(
            f"rank {rank} has {shown(wrong)} where an op belongs; give a penstock.Op, or read text "
            "with Schedule.parse"
        )
    try:
        kind = np.array([*map(CODES.__getitem__, map(itemgetter(1), ops))], np.int8)
        # Arrays of the standard library refuse what is no whole number; numpy would round it.
        stage, microbatch, part = (
            np.array(array("i", map(itemgetter(index), ops)), np.int32) for index in (0, 2, 3)
        )
        lowest = min(int(field.min(initial=0)) for field in (stage, microbatch, part))
    except (KeyError, TypeError, OverflowError):
        lowest = -1
    if lowest < 0:
        raise InputError(f"rank {rank} has {shown(next(filter(_is_odd, ops)))}, {_WANTED}")
    return stage, kind, microbatch, part


_WANTED = "whose stage, microbatch and slice must be whole numbers from 0 to 2**31 - 1"


def _is_odd(op: Op) -> bool:
    try:
        numbers = array("i", (op[0], op[2], op[3]))
    except (TypeError, OverflowError):
        return True
    return op[1] not in CODES or min(numbers) < 0


class RankOps(Sequence[Op]):
    """The ops of one rank: equal to their tuple, which is made when somebody first looks at one of
    them: a million ops take half a second and a hundred megabytes.

    Args:
        columns: of the schedule.
        span: the numbers of these ops.
    """

    def __init__(self, columns: Columns, span: Span) -> None:
        self.columns = columns
        self.span = span

    @classmethod
    def of(cls, ops: Sequence[Op]) -> RankOps:
        """These ops; themselves, if they are those of a rank already.

        Raises:
            InputError: one is no op.
        """
        if isinstance(ops, RankOps):
            return ops
        expect(ops, tuple | list, "the ops of a rank", "give a list of them")
        return cls(Columns.of_ranks((ops,)), slice(0, len(ops)))

    @cached_property
    def as_tuple(self) -> tuple[Op, ...]:
        """The ops themselves."""
        return self.columns.ops(self.span)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the ops."""
        return self.columns.kinds_in(self.span)

    def stages_with(self, kinds: Collection[Kind]) -> tuple[int, ...]:
        """The stages that have ops of some kinds, ascending."""
        return self.columns.stages_with(kinds, self.span)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that a rank with these ops computes, ascending."""
        return self.stages_with(COMPUTE)

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        return self.columns.slices_in(self.span)

    def are_of(self, kinds: Collection[Kind]) -> Bools:
        """For each op, whether it is of one of these kinds."""
        return self.columns.are_of(kinds, self.span)

    def __len__(self) -> int:
        return len(self.columns.kind[self.span])

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, index: int | slice) -> Op | tuple[Op, ...]:
        return self.as_tuple[index]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.as_tuple)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankOps):
            return self.as_tuple == other.as_tuple
        return self.as_tuple == other

    def __hash__(self) -> int:
        return hash(self.as_tuple)

    def __repr__(self) -> str:
        return repr(self.as_tuple)
