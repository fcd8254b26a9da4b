"""Orders by the clock: every op of a rank has a slot of time, and no two have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.schedule.families.alternate import Line
from penstock.core.schedule.op import Op

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Fields


class Timed(NamedTuple):
    """A line of ops, and when each has its slot.

    Attributes:
        line: the ops.
        starts: a time for each of them.
        offset: how much later their slots are.
    """

    line: Line
    starts: Sequence[int]
    offset: int


@dataclass(frozen=True, eq=False)
class Slots:
    """The order of a rank, by the slots of its ops."""

    lines: tuple[Timed, ...]

    def __len__(self) -> int:
        return sum(len(timed.line) for timed in self.lines)

    def ops(self) -> list[Op]:
        """The ops of the rank, in their order."""
        slots = (
            (start + timed.offset, op)
            for timed in self.lines
            for start, op in zip(timed.starts, timed.line.ops(), strict=True)
        )
        return [op for _, op in sorted(slots)]

    def fields(self) -> Fields:
        """The same as columns."""
        from penstock.core.schedule.families.in_columns import fields_of_slots

        return fields_of_slots(self)
