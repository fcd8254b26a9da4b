"""Warm up, take turns, drain: the shape that 1F1B gave to most families after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.schedule.columns.columns import CODES, Fields, Ints, joined
from penstock.core.schedule.op import Kind


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

    def fields(self) -> Fields:
        """The ops as columns."""
        count = len(self)
        stage = np.full(count, self.stage, np.int32)
        if self.laps:
            stage += self.per_lap * numbers(self.laps)
        part = numbers(self.slices) if self.slices else np.zeros(count, np.int32)
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
        """Where the ops of each line stand."""
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


def numbers(values: Sequence[int]) -> Ints:
    """A range or list as a column."""
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
