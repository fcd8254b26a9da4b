"""Hand-made orders, written as phases: a pattern of ops, and how often it repeats.

How the papers draw ZB-V and DualPipeV: the ops of a rank with two stages, phase by phase.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.schedule.op import BACKWARD, Kind, Op

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Fields


@dataclass(frozen=True, eq=False)
class Phases:
    """The order of a rank, phase by phase.

    Attributes:
        phases: patterns, and how often each repeats.
        stages: of the rank.
    """

    phases: tuple[tuple[str, int], ...]
    stages: tuple[int, ...]

    def __len__(self) -> int:
        return sum(len(pattern.split()) * max(repeats, 0) for pattern, repeats in self.phases)

    def ops(self) -> list[Op]:
        """The ops of the rank, in their order."""
        return unroll(self.phases, self.stages)

    def fields(self) -> Fields:
        """The same as columns."""
        from penstock.core.schedule.families.in_columns import fields_of_phases

        return fields_of_phases(self)


def unroll(phases: Iterable[tuple[str, int]], stages: tuple[int, ...]) -> list[Op]:
    """The ops of one rank, from patterns and how often each is repeated.

    A step of a pattern is a kind and which of the rank's ``stages`` it is for; it takes the next
    microbatch. ``W`` alone is the oldest weight gradient that is still owed.

    >>> print(*unroll([("F0", 1), ("F0 I0", 2), ("W", 2)], stages=(7,)))
    7F0 7F1 7I0 7F2 7I1 7W0 7W1
    """
    ops: list[Op] = []
    seen: Counter[tuple[int, bool]] = Counter()
    owed: deque[Op] = deque()
    for pattern, repeats in phases:
        for step in pattern.split() * repeats:
            if step == Kind.BACKWARD_WEIGHT:
                ops.append(owed.popleft())
                continue
            kind, stage = Kind(step[0]), stages[int(step[1:])]
            # I and B are two ways to do the same microbatch's backward: one count for both.
            microbatch = seen[stage, kind in BACKWARD]
            seen[stage, kind in BACKWARD] += 1
            ops.append(Op(stage, kind, microbatch))
            if kind is Kind.BACKWARD_INPUT:
                owed.append(Op(stage, Kind.BACKWARD_WEIGHT, microbatch))
    return ops
