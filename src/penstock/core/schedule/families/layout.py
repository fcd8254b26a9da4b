"""How the orders of ranks are written, and become a schedule.

``alternate`` is the shape that 1F1B gave to most families after it: warm up, take turns, drain.
``Phases`` are how the papers draw ZB-V and DualPipeV: a pattern of ops, and how often it repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.core.schedule.columns import CODES, Columns, Fields, Ints, codes_of, joined
from penstock.core.schedule.op import BACKWARD, Activations, Kind
from penstock.core.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Phases:
    """The order of a rank, phase by phase.

    A step of a pattern is a kind and which of the rank's ``stages`` it is for; it takes the next
    microbatch. ``W`` alone is the oldest weight gradient that has not been made.

    Attributes:
        phases: patterns, and how often each repeats.
        stages: of the rank.

    >>> from penstock.core.schedule.columns import Columns
    >>> order = Phases((("F0", 1), ("F0 I0", 2), ("W", 2)), stages=(7,))
    >>> print(*Columns.of_fields([order.fields()]).ops(slice(None)))
    7F0 7F1 7I0 7F2 7I1 7W0 7W1
    """

    phases: tuple[tuple[str, int], ...]
    stages: tuple[int, ...]

    def fields(self) -> Fields:
        """The ops of the rank, in their order, as columns."""
        names = sorted({step for pattern, _ in self.phases for step in pattern.split()})
        steps = np.concatenate(
            [
                np.tile(np.array([*map(names.index, pattern.split())], np.int8), max(repeats, 0))
                for pattern, repeats in self.phases
            ]
        )
        kind = np.array([CODES[Kind(name[0])] for name in names], np.int8)[steps]
        stages = [self.stages[int(name[1:] or 0)] for name in names]
        stage = np.array(stages, np.int32)[steps]
        microbatch = np.zeros(len(steps), np.int32)
        # I and B are two ways to do the same microbatch's backward: one count for both.
        for line in codes_of({Kind.FORWARD}), codes_of(BACKWARD):
            for own in self.stages:
                turns = np.flatnonzero(line[kind] & (stage == own))
                microbatch[turns] = np.arange(len(turns))
        inputs, weights = (
            np.flatnonzero(kind == CODES[half])
            for half in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        oldest = inputs[: len(weights)]
        stage[weights], microbatch[weights] = stage[oldest], microbatch[oldest]
        return stage, kind, microbatch, np.zeros(len(steps), np.int32)


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
    microbatches: Sequence[int] | Ints
    stage: int
    laps: Sequence[int] | Ints = ()
    per_lap: int = 0
    slices: Sequence[int] | Ints = ()

    def __len__(self) -> int:
        return len(self.microbatches)

    def fields(self) -> Fields:
        """The ops as columns."""
        count = len(self)
        stage = np.full(count, self.stage, np.int32)
        if len(self.laps):
            stage += self.per_lap * numbers(self.laps)
        part = numbers(self.slices) if len(self.slices) else np.zeros(count, np.int32)
        return stage, np.full(count, CODES[self.kind], np.int8), numbers(self.microbatches), part


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

    def fields(self) -> Fields:
        """The ops of the rank, in their order, as columns: each line's are put where they stand."""
        places = np.concatenate(self._places())
        stage, kind, microbatch, part = joined(line.fields() for line in self.lines)
        order = np.empty(len(places), np.int32)
        order[places] = np.arange(len(places), dtype=np.int32)
        return stage[order], kind[order], microbatch[order], part[order]

    def _places(self) -> list[Ints]:
        warm_up = min(self.warm_up, len(self.lines[0]))
        lengths = [len(line) for line in self.lines]
        lengths[0] -= warm_up
        skips = (0, 0, self.delay)[: len(lengths)]
        places = []
        for index, (own, skipped) in enumerate(zip(lengths, skips, strict=True)):
            turn = np.arange(skipped, skipped + own, dtype=np.int32)
            place = np.full(own, warm_up, np.int32)
            for other, (length, skip) in enumerate(zip(lengths, skips, strict=True)):
                # In each turn, the lines before have gone once more than this one.
                place += np.clip(turn - skip + (other < index), 0, length)
            places.append(place)
        places[0] = np.concatenate((np.arange(warm_up, dtype=np.int32), places[0]))
        return places


def numbers(values: Sequence[int] | Ints) -> Ints:
    """A range or list as a column, or a column itself."""
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=np.int32)
    return np.array(values, np.int32)


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


class Order(Protocol):
    """The ops of a rank, in their order, before they are made."""

    def fields(self) -> Fields:
        """The ops as columns."""


def laid_out(
    ranks: Iterable[Order],
    name: str,
    num_microbatches: int | None = None,
    activations: Activations = "own",
) -> Schedule:
    """The schedule of some orders.

    Args:
        ranks: one order each.
        name: of the family.
        num_microbatches: leave out what is for later ones.
        activations: which of them backwards go through.
    """
    columns = Columns.of_fields([order.fields() for order in ranks])
    if num_microbatches is not None:
        columns = columns.only(columns.microbatch < num_microbatches)
    return Schedule.of_columns(columns, name, activations)
