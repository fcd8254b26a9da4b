"""Warm up, take turns, drain: the shape that 1F1B gave to most families after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest
from typing import TYPE_CHECKING

from penstock.core.schedule.op import Kind, Op

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Fields


@dataclass(frozen=True, eq=False)
class Line:
    """Ops of one kind on one rank, in their order.

    Attributes:
        kind: of all.
        microbatches: of each.
        stage: of all; the first one where there are laps.
        laps: of each, where a rank has a stage for every lap.
        per_lap: how many stages a lap is.
        slices: of each, where microbatches are sliced.
    """

    kind: Kind
    microbatches: Sequence[int]
    stage: int
    laps: Sequence[int] = ()
    per_lap: int = 0
    slices: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.microbatches)

    def ops(self) -> list[Op]:
        """The ops themselves."""
        stages: Iterable[int] = repeat(self.stage)
        if self.laps:
            stages = (self.stage + self.per_lap * lap for lap in self.laps)
        parts = (self.slices,) if self.slices else ()
        return list(map(Op, stages, repeat(self.kind), self.microbatches, *parts))


@dataclass(frozen=True, eq=False)
class Turns:
    """The order of a rank: the first ``warm_up`` forwards, then one op of each line in turn, until
    each runs out.

    Attributes:
        warm_up: how many forwards go first.
        lines: forwards; B, or I where the weight gradients are separate; W.
        delay: how many backwards the first weight gradient lets pass.
    """

    warm_up: int
    lines: tuple[Line, ...]
    delay: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.lines))

    def ops(self) -> list[Op]:
        """The ops of the rank, in their order."""
        forwards, backwards, *weights = (line.ops() for line in self.lines)
        late = ([*[None] * self.delay, *ops] for ops in weights)
        columns: list[Sequence[Op | None]] = [forwards[self.warm_up :], backwards, *late]
        turns = (op for turn in zip_longest(*columns) for op in turn if op is not None)
        return [*forwards[: self.warm_up], *turns]

    def fields(self) -> Fields:
        """The same as columns."""
        from penstock.core.schedule.families.in_columns import fields_of_turns

        return fields_of_turns(self)


def alternate(warm_up: int, *lines: Line, delay: int = 0) -> Turns:
    """``warm_up`` forwards, and then one op of each line in turn.

    Args:
        warm_up: how many forwards go first.
        lines: forwards, backwards and, where they are separate, weight gradients.
        delay: how many backwards the first weight gradient lets pass.
    """
    return Turns(warm_up, lines, delay)


def in_order(stage: int, kind: Kind, num_microbatches: int) -> Line:
    """One op of a kind for each microbatch."""
    return Line(kind, range(num_microbatches), stage)


def alternate_split(stage: int, num_microbatches: int, warm_up: int, delay: int) -> Turns:
    """``alternate`` with F, I and W of one stage."""
    lines = (
        in_order(stage, kind, num_microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    return alternate(warm_up, *lines, delay=delay)
