"""Spilled: a rank goes through its many stages one at a time, forth and back.

Nagrecha and Kumar, "Hydra: A System for Large Multi-Model Deep Learning", arXiv 2110.08633,
section 4, whose order is that of ``group=1``; that all microbatches go through a stage before the
next one is from Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, arXiv 2211.05953.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.schedule.columns.columns import Columns, Fields, joined
from penstock.core.schedule.families.alternate import Line, alternate
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def spilled(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2, group: int = 0
) -> Schedule:
    """Weights come into memory 2v−1 times per minibatch on a rank with v stages, whatever m is: all
    microbatches go through a stage before the next one, and through the last one there and back.

    The order is breadth-first, but the rank's last stage works as in 1F1B: on one rank each
    microbatch turns round in it, and its activations are never there twice. Stage lap·p + s is on
    rank s. The first stage stays from the end of one minibatch until the next begins.

    Wins: When weights, gradients and optimizer state are larger than memory: with every stage's
    weights on a disk, the order reads 2P+S−P₀−Pₗ bytes and writes P+S, for weights P (first and
    last stage P₀ and Pₗ) and state S, for any number of microbatches.

    Loses: When the model fits: all m microbatches are in flight on every stage but the last, where
    1F1B has p; with one rank and one stage there is nothing to gain.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(spilled(1, 2, stages_per_rank=3), Costs())))
    spilled, predicted: makespan 18, bubble 0.0%, stage bubble 0.0%
    rank 0 │0F0─0F1─1F0─1F1─2F0─2B0─────2F1─2B1─────1B0─────1B1─────0B0─────0B1─────│ peak 1.667

    Args:
        stages_per_rank: v, how many stages each rank has.
        group: so many microbatches go through all stages before the next ones; 0 is all of them. 1
            is Hydra's order, which moves the weights m times as often.

    Raises:
        InputError: ``stages_per_rank`` is no whole number ≥ 1, or ``group`` is none ≥ 0.
    """
    at_least("spilled", "stages_per_rank", stages_per_rank, 1)
    at_least("spilled", "group", group, 0)
    sizes = num_ranks, stages_per_rank, num_microbatches, group or num_microbatches
    ranks = [joined(_parts(rank, *sizes)) for rank in range(num_ranks)]
    return Schedule.of_columns(Columns.of_fields(ranks), "spilled")


def _parts(
    rank: int, num_ranks: int, num_laps: int, num_microbatches: int, group: int
) -> Iterator[Fields]:
    stages = [rank + num_ranks * lap for lap in range(num_laps)]
    for first in range(0, num_microbatches, group):
        own = range(first, min(first + group, num_microbatches))
        for stage in stages[:-1]:
            yield Line(Kind.FORWARD, own, stage).fields()
        turning = (Line(kind, own, stages[-1]) for kind in (Kind.FORWARD, Kind.BACKWARD))
        yield alternate(min(num_ranks - rank - 1, len(own)), *turning).fields()
        for stage in reversed(stages[:-1]):
            yield Line(Kind.BACKWARD, own, stage).fields()
