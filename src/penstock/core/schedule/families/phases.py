"""Hand-made orders, written as phases: a pattern of ops, and how often it repeats.

How the papers draw ZB-V and DualPipeV: the ops of a rank with two stages, phase by phase.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.schedule.columns.columns import CODES, Fields, codes_of
from penstock.core.schedule.op import BACKWARD, Kind


@dataclass(frozen=True, eq=False)
class Phases:
    """The order of a rank, phase by phase.

    A step of a pattern is a kind and which of the rank's ``stages`` it is for; it takes the next
    microbatch. ``W`` alone is the oldest weight gradient that has not been made.

    Attributes:
        phases: patterns, and how often each repeats.
        stages: of the rank.

    >>> from penstock.core.schedule.columns.columns import Columns
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
        owed = inputs[: len(weights)]
        stage[weights], microbatch[weights] = stage[owed], microbatch[owed]
        return stage, kind, microbatch, np.zeros(len(steps), np.int32)
