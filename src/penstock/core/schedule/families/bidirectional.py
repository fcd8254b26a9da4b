"""Both directions at once: Chimera with two copies of the weights, Hanayo with one, in waves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.base.errors import InputError
from penstock.core.schedule.columns import Fields, joined
from penstock.core.schedule.durations import Placement, WholeBackward, snake
from penstock.core.schedule.families.layout import Line, laid_out, numbers
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.families.stretched import LONG, Middle, stretched
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule
from penstock.core.schedule.search import OrderingProblem, Phase, Rules, greedy, whole_ranks


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chimera: two pipelines through the same ranks in opposite directions, each filling the
    other's gaps.

    Half of 1F1B's bubble or less for two copies of the weights: (p−2)/(2m+p−2) for F = B and
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

    Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with
    Bidirectional Pipelines", SC 2021, arXiv 2107.06925, sections 3.1 and 3.5 (direct
    concatenation).

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
                _Timed(Line(kind, ways[up], stage), starts[up], offset)
                for up, stage in enumerate((rank, p - 1 - rank))
                for kind, offset in ((Kind.FORWARD, stage), (Kind.BACKWARD, 2 * p - 1 - stage))
            )
        )
        for rank in range(p)
    )
    return laid_out(ranks, "chimera")


class _Timed(NamedTuple):
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

    lines: tuple[_Timed, ...]

    def fields(self) -> Fields:
        """The ops of the rank, in their order, as columns."""
        slots = [numbers(timed.starts) + timed.offset for timed in self.lines]
        order = np.concatenate(slots).argsort()
        stage, kind, microbatch, part = joined(timed.line.fields() for timed in self.lines)
        return stage[order], kind[order], microbatch[order], part[order]


def hanayo(num_ranks: int, num_microbatches: int, num_waves: int = 1) -> Schedule:
    """Hanayo: waves. The stages snake through the ranks several times, without a second weight
    copy.

    W waves, 2W stages per rank: a bubble that shrinks with W, and at most p microbatches.

    One wave goes to the last rank and back, so its turns need no hop. A rank runs the backward that
    has come furthest, if one is ready, else the forward that has. The published bubble for m = p is
    (2p−2)/(3pW+p−1); this rule comes within 0.2 points of it or below it for p ≤ 8.

    Wins: With few microbatches, m near p: at p = m = 8, one wave brings 1F1B's bubble from 47 % to
    37 %, two bring it to 24 %, with no more than 1F1B's memory.

    Loses: When hops are slow: W waves send 2W times as many tensors. With many microbatches,
    interleaved-1f1b and the zero-bubble families idle less.

    Source: Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model
    Training Efficiency", SC 2023, arXiv 2308.15762, section 3.

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
    """The ops from one moment to the first at which all stands as it stood then."""
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
