"""Chimera: two pipelines through the same ranks in opposite directions, each filling the other's
gaps.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", SC 2021, arXiv 2107.06925, sections 3.1 and 3.5 (direct concatenation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.base.errors import InputError
from penstock.core.schedule.columns.columns import Fields, joined
from penstock.core.schedule.families.alternate import Line, numbers
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's bubble or less for two copies of the weights: (p−2)/(2m+p−2) for F = B and
    p | m; ranks hold p/2+1 to p stages' activations.

    Microbatches go in groups of p. The first half of a group goes down, stage s on rank s; the
    second half goes up, stage s on rank p−1−s. So rank s holds stages s and p−1−s, and so does rank
    p−1−s: their gradients must be summed. If F ≠ B, the makespan is
    m(F+B) + (p−2)(max(F, B) + (m/p − 1)|F−B|).

    Wins: When microbatches are few, F is about as long as B and weights are small: at F = B the
    bubble is 27 % instead of 1F1B's 47 % at p = m = 8, with a backward in one piece and one stage
    visited per rank.

    Loses: When B is longer than F: at F = I = W, p = 8 and m = 32 the bubble is 24 %, and 1F1B's is
    18 %. It holds all weights twice and must sum the gradients of both copies.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(chimera(4, 4), Costs(2, 1, 1))))
    chimera, predicted: makespan 20, bubble 20.0%, stage bubble 20.0%
    rank 0 │F0F1··F2B2F3B3B0··B1│ peak 3
    rank 1 │··F0F2F1F3B2B0B3B1··│ peak 4
    rank 2 │··F2F0F3F1B0B2B1B3··│ peak 4
    rank 3 │F2F3··F0B0F1B1B2··B3│ peak 3

    Raises:
        InputError: the number of ranks is odd.
    """
    p = num_ranks
    if p % 2:
        raise InputError(
            f"chimera needs an even number of ranks, but num_ranks is {p}; only then do its two "
            f"directions fit together: take {p + 1}" + (f" or {p - 1}" if p > 1 else "")
        )
    # In slots of one op, 1F1B runs each microbatch of one direction at a stage's own parity. With
    # an even number of ranks the other direction has the other parity, so slots never collide; and
    # a group leaves free exactly the slots that the next group, 2p slots later, takes.
    ways: tuple[list[int], list[int]] = ([], [])
    starts: tuple[list[int], list[int]] = ([], [])
    for k in range(num_microbatches):
        group, place = divmod(k, p)
        half = (min(p, num_microbatches - group * p) + 1) // 2
        up = place >= half
        ways[up].append(k)
        starts[up].append(2 * (group * p + place % half))
    ranks = (
        Slots(
            tuple(
                Timed(Line(kind, ways[up], stage), starts[up], offset)
                for up, stage in enumerate((rank, p - 1 - rank))
                for kind, offset in ((Kind.FORWARD, stage), (Kind.BACKWARD, 2 * p - 1 - stage))
            )
        )
        for rank in range(p)
    )
    return laid_out(ranks, "chimera")


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

    def fields(self) -> Fields:
        """The ops of the rank, in their order, as columns."""
        slots = [numbers(timed.starts) + timed.offset for timed in self.lines]
        order = np.concatenate(slots).argsort()
        stage, kind, microbatch, part = joined(timed.line.fields() for timed in self.lines)
        return stage[order], kind[order], microbatch[order], part[order]
