"""``RankOps``: the ops of one rank of a schedule that is stored as columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, overload

from penstock.core.schedule.op import COMPUTE, Kind, Op

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Columns


class RankOps(Sequence[Op]):
    """Equal to the tuple of the ops, which is made when somebody first looks at one of them: a
    million ops take half a second and a hundred megabytes.

    Args:
        columns: of the schedule.
        span: the numbers of these ops.
    """

    def __init__(self, columns: Columns, span: slice) -> None:
        self._columns = columns
        self._span = span

    @cached_property
    def as_tuple(self) -> tuple[Op, ...]:
        """The ops themselves."""
        return self._columns.ops(self._span)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the ops."""
        return self._columns.kinds_in(self._span)

    def stages_with(self, kinds: Collection[Kind]) -> tuple[int, ...]:
        """The stages that have ops of some kinds, ascending."""
        return self._columns.stages_with(kinds, self._span)

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        return self._columns.slices_in(self._span)

    def are_of(self, kinds: Collection[Kind]) -> list[bool]:
        """For each op, whether it is of one of these kinds."""
        return self._columns.of_kinds(self._span, kinds)

    def most(self, steps: Mapping[Kind, int]) -> int:
        """The largest sum, from 0 on, of what the ops add one after another, by their kinds."""
        return self._columns.largest_sum(self._span, steps)

    def most_held(self, left: Mapping[tuple[int, Kind], float]) -> float:
        """The most that is held at once of all microbatches.

        Args:
            left: by stage and kind, what is held of a microbatch behind an op; where nothing is
                said, as much as before.
        """
        return self._columns.most_held(self._span, left)

    def most_named(self, kind: Kind) -> int:
        """The most ops of a kind that one microbatch has."""
        return self._columns.most_named(self._span, kind)

    def __len__(self) -> int:
        return len(self._columns.kind[self._span])

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


def are_of(ops: Sequence[Op], kinds: Collection[Kind]) -> list[bool]:
    """For each op of a rank, whether it is of one of these kinds."""
    if isinstance(ops, RankOps):
        return ops.are_of(kinds)
    return [op[1] in kinds for op in ops]


def kinds_in(ops: Sequence[Op]) -> frozenset[Kind]:
    """The kinds of the ops of a rank."""
    return ops.kinds if isinstance(ops, RankOps) else frozenset(op[1] for op in ops)


def stages_with(kinds: Collection[Kind], ops: Sequence[Op]) -> tuple[int, ...]:
    """The stages of a rank's ops of some kinds, ascending."""
    if isinstance(ops, RankOps):
        return ops.stages_with(kinds)
    return tuple(sorted({op.stage for op in ops if op[1] in kinds}))


def stages_in(ops: Sequence[Op]) -> tuple[int, ...]:
    """The stages that a rank with these ops computes, ascending."""
    return stages_with(COMPUTE, ops)


def slices_in(ops: Sequence[Op]) -> int:
    """How many slices a microbatch's sequence is cut into among these ops; 1 where it is not."""
    if isinstance(ops, RankOps):
        return ops.num_slices
    return 1 + max(map(itemgetter(3), ops), default=0)
