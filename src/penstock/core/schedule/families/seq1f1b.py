"""Seq1F1B: 1F1B on slices of a microbatch's sequence, for long sequences and few microbatches.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model
Training", NAACL 2025, arXiv 2406.03488, section 3.
"""

from __future__ import annotations

from penstock.core.schedule.families.alternate import Line, alternate
from penstock.core.schedule.families.layout import laid_out
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.op import Kind
from penstock.core.schedule.schedule import Schedule


def seq1f1b(num_ranks: int, num_microbatches: int, num_slices: int = 2) -> Schedule:
    """1F1B with k slices per microbatch: idle (p−1)T/k for slices of equal cost, and (p−1+k)/k
    microbatches of memory, or m if that is less.

    A token attends to those before it, so the slices of a microbatch run forward in order and
    backward in reverse. The first backward waits for k−1 more forwards than in 1F1B, and every op
    takes 1/k of the time. Slices of equal length cost less at the front than at the back; the
    paper cuts them so that they cost the same.

    Wins: With long sequences, where even one microbatch at a time is large: at p = 8 and m = 8,
    four slices bring 1F1B's bubble from 47 % to 18 % and its peak from 8 to 2.75 microbatches.

    Loses: When slices get so small that kernels no longer fill the device, or hops, of which there
    are k times as many, are no longer hidden. Attention must keep the keys and values of earlier
    slices.

    Args:
        num_slices: k; 1 is 1F1B.

    Raises:
        InputError: k is no whole number ≥ 1.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(seq1f1b(2, 2), Costs())))
    seq1f1b, predicted: makespan 7.5, bubble 20.0%, stage bubble 20.0%
    rank 0 │F0.0F0.1F1.0········B0.1────F1.1B0.0────····B1.1────B1.0────│ peak 1.5
    rank 1 │····F0.0F0.1B0.1────F1.0B0.0────F1.1B1.1────B1.0────········│ peak 1
    """
    at_least("seq1f1b", "num_slices", num_slices, 1)
    microbatches = [k for k in range(num_microbatches) for _ in range(num_slices)]
    slices = [*range(num_slices)] * num_microbatches
    ranks = (
        alternate(
            num_ranks - 1 - rank + num_slices - 1,
            Line(Kind.FORWARD, microbatches, rank, slices=slices),
            Line(Kind.BACKWARD, microbatches, rank, slices=slices[::-1]),
        )
        for rank in range(num_ranks)
    )
    return laid_out(ranks, "seq1f1b")
