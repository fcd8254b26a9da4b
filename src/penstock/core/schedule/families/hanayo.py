"""Hanayo: waves. The stages snake through the ranks several times, without a second weight copy.

Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency", SC 2023, arXiv 2308.15762, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.base.errors import InputError
from penstock.core.schedule.durations import WholeBackward
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.families.stretched import LONG, Middle, stretched
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.placement import Placement, snake
from penstock.core.schedule.schedule import Schedule
from penstock.core.schedule.search import OrderingProblem, Phase, Rules, greedy, whole_ranks


def hanayo(num_ranks: int, num_microbatches: int, num_waves: int = 1) -> Schedule:
    """W waves, 2W stages per rank: a bubble that shrinks with W, and at most p microbatches.

    One wave goes to the last rank and back, so its turns need no hop. A rank runs the backward that
    has come furthest, if one is ready, else the forward that has. The published bubble for m = p is
    (2p−2)/(3pW+p−1); this rule comes within 0.2 points of it or below it for p ≤ 8.

    Wins: With few microbatches, m near p: at p = m = 8, one wave brings 1F1B's bubble from 47 % to
    37 %, two bring it to 24 %, with no more than 1F1B's memory.

    Loses: When hops are slow: W waves send 2W times as many tensors. With many microbatches,
    interleaved-1f1b and the zero-bubble families idle less.

    Args:
        num_ranks, num_microbatches: as in every family; m ≥ p.
        num_waves: W.

    Raises:
        InputError: fewer microbatches than ranks, or W is no whole number ≥ 1.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(hanayo(2, 2), Costs())))
    hanayo, predicted: makespan 16, bubble 25.0%, stage bubble 25.0%
    rank 0 │0F0─0F1─····3F0─3B0─────3F1─3B1─────····0B0─────········0B1─────│ peak 1.5
    rank 1 │····1F0─2F0─1F1─2F1─····2B0─────1B0─────2B1─────1B1─────········│ peak 2
    """
    at_least("hanayo", "num_waves", num_waves, 1)
    if num_microbatches < num_ranks:
        raise InputError(
            f"hanayo: num_microbatches is {num_microbatches}, but {num_ranks} ranks need ≥ "
            f"{num_ranks}, so that a wave fills the pipeline; cut the minibatch finer, or take 1f1b"
        )
    placement = snake(num_ranks, 2 * num_waves)
    if 2 * len(placement) * num_microbatches >= LONG:
        long = stretched(
            "hanayo",
            num_microbatches,
            lambda few: _middle(placement, few),
            lambda count: _undivided(_searched(placement, count).ranks),
        )
        if long is not None:
            return long
    return Schedule.of(_undivided(_searched(placement, num_microbatches).ranks), "hanayo")


def _searched(
    placement: Placement, num_microbatches: int, look: Callable[[Phase], None] | None = None
) -> Schedule:
    """The order with divided backwards: the gradient of the input takes all of their time."""
    num_ranks = 1 + max(placement)
    problem = OrderingProblem(
        placement=placement,
        num_microbatches=num_microbatches,
        durations=WholeBackward(),
        sizes=whole_ranks(placement, kept_for_weight=0.0),
        limits=(float(num_ranks),) * num_ranks,
    )
    rules = [Rules(deep_backward=False)] * num_ranks
    return problem.schedule(greedy(problem, rules, look), "hanayo")


def _undivided(ranks: Iterable[Sequence[Op]]) -> list[list[Op]]:
    return [
        [
            op._replace(kind=Kind.BACKWARD) if op.kind is Kind.BACKWARD_INPUT else op
            for op in ops
            if op.kind is not Kind.BACKWARD_WEIGHT
        ]
        for ops in ranks
    ]


def _middle(placement: Placement, few: int) -> Middle | None:
    """What ranks do from one moment to the first at which all stands as it stood then."""
    seen: dict[object, Phase] = {}
    again: list[tuple[Phase, Phase]] = []

    def look(phase: Phase) -> None:
        before = seen.setdefault(phase.state, phase)
        # Of the end they see nothing but that no microbatch is left to begin.
        if not again and before.begun < phase.begun < few:
            again.append((before, phase))

    ranks = _searched(placement, few, look).ranks
    if not again:
        return None
    begin, end = (
        tuple(
            sum(op.kind is not Kind.BACKWARD_WEIGHT for op in ops[:length])
            for ops, length in zip(ranks, phase.lengths, strict=True)
        )
        for phase in again[0]
    )
    before, after = again[0]
    return Middle(begin, end, after.begun - before.begun)
