"""Which rank each stage is on: the shapes that families share.

A placement is a tuple with the rank of every stage. Straight pipelines need none: stage s is on
rank s.
"""

from __future__ import annotations

Placement = tuple[int, ...]


def loop(num_ranks: int, stages_per_rank: int) -> Placement:
    """Round and round: 0 1 2, 0 1 2, … as in interleaved schedules.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * stages_per_rank


def snake(num_ranks: int, stages_per_rank: int) -> Placement:
    """There and back: 0 1 2, 2 1 0, … Two stages per rank make the V of ZB-V and V-Half; the
    stages at each turn share a rank, so that nothing is sent between them.

    >>> snake(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = tuple(range(num_ranks))
    back = there[::-1]
    return tuple(rank for lap in range(stages_per_rank) for rank in (back if lap % 2 else there))
