"""V-Half and V-Min: schedules on a V from one building block; repeat, squeeze, reorder, place W.

A block says when, in slots of one op, a microbatch's four ops that are chained start on each rank:
F and then I, through both of the rank's stages. Repeated every 6 slots (F, I and W of two stages)
it fills every rank, and how long its activations live bounds their number. From there on slots
matter only as an order: each op runs as soon as its inputs are there, and a rank that would wait
runs a later op of its row instead, if that does not raise the peak of activations.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, sections 2 and 3 and
appendix; the reordering here is a plain greedy one. Long orders repeat in their middle, so they are
reordered for few microbatches and stretched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from penstock.core.schedule.families.stretched import LONG, Middle, MiddleFinder, stretched
from penstock.core.schedule.op import Kind, Op
from penstock.core.schedule.schedule import Schedule

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_OPS_PER_MICROBATCH = 6
_HELD = {_F: 1, _I: 0, _W: -1}

Starts = tuple[int, int, int, int]
"""The slots of one rank's F of the way there, F and I of the way back, and I of the way there."""


def _from_block(starts: Iterable[Starts], num_microbatches: int, name: str) -> Schedule:
    """The schedule that repeats a block of ops for each microbatch."""
    rows = tuple(starts)

    def middle_of(few: int) -> Middle | None:
        planned = _planned(rows, few, name)
        finder = MiddleFinder(planned, _planned(rows, few + 1, name))
        _reorder(planned, finder.look)
        return finder.middle

    def whole(count: int) -> Schedule:
        return _reorder(_planned(rows, count, name))

    if _OPS_PER_MICROBATCH * len(rows) * num_microbatches >= LONG:
        long = stretched(name, num_microbatches, middle_of, lambda count: whole(count).ranks)
        if long is not None:
            return long
    return whole(num_microbatches)


def _planned(rows: Sequence[Starts], num_microbatches: int, name: str) -> Schedule:
    return Schedule.of(
        (
            _place_weights(_repeat(rank, 2 * len(rows) - 1 - rank, row, num_microbatches))
            for rank, row in enumerate(rows)
        ),
        name,
    )


def _repeat(there: int, back: int, row: Starts, num_microbatches: int) -> dict[int, Op]:
    chain = ((there, _F), (back, _F), (back, _I), (there, _I))
    return {
        start + _OPS_PER_MICROBATCH * k: Op(stage, kind, k)
        for k in range(num_microbatches)
        for start, (stage, kind) in zip(row, chain, strict=True)
    }


def _place_weights(planned: dict[int, Op]) -> list[Op]:
    """Put each W into the first slot that is free after its I; oldest first."""
    ops, waiting = [], deque[Op]()
    for slot in range(max(planned) + 1):
        op = planned.get(slot)
        if op is not None:
            ops.append(op)
            if op.kind is _I:
                waiting.append(op._replace(kind=_W))
        elif waiting:
            ops.append(waiting.popleft())
    return [*ops, *waiting]


def _reorder(
    planned: Schedule, look: Callable[[Sequence[list[Op]]], None] | None = None
) -> Schedule:
    """Let every rank, tick by tick, run the first op of its row that it can.

    Args:
        planned: the rows.
        look: is shown before each tick what ranks have run so far.
    """
    limit = max(map(_peak, planned.ranks))
    ahead = [list(ops) for ops in planned.ranks]
    held = [0] * planned.num_ranks
    ranks: list[list[Op]] = [[] for _ in ahead]
    done: set[Op] = set()
    while any(ahead):
        if look is not None:
            look(ranks)
        # All choose before any has run: what ends in this tick can be used from the next one on.
        chosen = [
            _choose(planned, row, done, limit - holds)
            for row, holds in zip(ahead, held, strict=True)
        ]
        for rank, index in enumerate(chosen):
            if index is not None:
                op = ahead[rank].pop(index)
                ranks[rank].append(op)
                held[rank] += _HELD[op.kind]
                done.add(op)
    return Schedule.of(ranks, planned.name)


def _choose(planned: Schedule, row: Sequence[Op], done: Set[Op], room: int) -> int | None:
    """Where in ``row`` the op stands that is to run now, if any can."""
    can_run = _runnable(planned, row, done, room)
    first = next(can_run, None)
    if first is None or row[first].kind is not _W or not _cools_down(row, planned):
        return first
    # Nothing comes in any more: other ranks wait for I, nobody for W.
    return next((index for index in can_run if row[index].kind is not _W), first)


def _cools_down(row: Sequence[Op], planned: Schedule) -> bool:
    return not any(op.kind is _F and op.stage < planned.num_ranks for op in row)


def _runnable(planned: Schedule, row: Sequence[Op], done: Set[Op], room: int) -> Iterator[int]:
    """Indices of the ops that can run now without more than ``room`` further activations, now or
    when the ops that they overtake run after them.
    """
    seen: set[tuple[int, Kind]] = set()
    held = peak = 0
    for index, op in enumerate(row):
        line = (op.stage, op.kind)
        if line not in seen:
            # Microbatches stay in order, so only the next one of each stage and kind is asked.
            seen.add(line)
            fits = op.kind is not _F or peak < room
            if fits and all(needed in done for needed in planned.dependencies(op)):
                yield index
            if len(seen) == _OPS_PER_MICROBATCH:
                return
        held += _HELD[op.kind]
        peak = max(peak, held)


def _peak(ops: Iterable[Op]) -> int:
    held = peak = 0
    for op in ops:
        held += _HELD[op.kind]
        peak = max(peak, held)
    return peak


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: half the activations of 1F1B, and a smaller bubble too, on a V of two stages per
    rank.

    Half the memory of 1F1B, ⌊(p+2)/2⌋ microbatches, and about half its bubble: at F = I = W,
    m ≥ p ≥ 3, a rank idles for 3p−7 ops if p is even, 3p−4 if odd, beside the 6m it performs.

    An op is one of F, I, W at one of a rank's two stages. Two ranks
    idle for 1 op. The order comes from a block, see ``building_block.py``, and does not
    depend on costs.

    Wins: When memory is short and F, I and W are alike: 5 microbatches at p = 8 where 1F1B holds 8,
    and still a bubble of 8 % instead of 18 % at m = 32.

    Loses: When they are not alike, or hops are slow: at F = 2I = 2W the bubble is 1F1B's 18 %, and
    with hops of F/2 it is 35 %. ZB-V has less than half the bubble where its p microbatches fit.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv
    2405.15362, section 3.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(v_half(2, 3), Costs())))
    v-half, predicted: makespan 19, bubble 5.3%, stage bubble 0.0%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─3I1─0I0─0W0─3W1─3F2─3I2─0I1─0W1─0I2─3W2─0W2─····│ peak 2
    rank 1 │····1F0─2F0─1F1─2F1─2I0─2W0─1I0─1W0─1F2─2F2─2I1─1I1─2I2─1I2─2W1─1W1─2W2─1W2─│ peak 2
    """
    p = num_ranks
    # Keeps the ops of a rank in different slots of the block.
    delay = 0 if p % 2 else 3
    block = [
        (2 * i, 3 * p - i - 2, 3 * p + delay + 2 * i - 1, 6 * p + delay - i - 2) for i in range(p)
    ]
    return _from_block(block, num_microbatches, "v-half")


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: a third of the activations of 1F1B, for a bubble between V-Half's and 1F1B's.

    A third of the memory of 1F1B, ⌊(p+4)/3⌋ microbatches, and about two thirds of its bubble: at
    F = I = W, m > p ≥ 3, a rank idles for 4p−5 ops, 4p−7 if 3 | p, beside the 6m it performs.

    An op is one of F, I, W at one of a rank's two stages. Two ranks
    idle for 1 op. Where F, I and W differ, the bubble grows with m. The order comes from a
    block, see ``building_block.py``, and does not depend on costs.

    Wins: When nothing else fits: 4 microbatches at p = 8 where 1F1B holds 8, with a bubble of 12 %
    instead of 18 % at m = 32 and F = I = W.

    Loses: When F, I and W differ or hops take time: at W = F/2 and hops of 0.03 F the bubble is 30
    %, and 1F1B's is 20 %. V-Half holds one microbatch more there and has 13 %.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, arXiv
    2405.15362, section 3.

    >>> from penstock import Costs, draw, simulate
    >>> print(draw(simulate(v_min(2, 3), Costs())))
    v-min, predicted: makespan 19, bubble 5.3%, stage bubble 5.3%
    rank 0 │0F0─0F1─0F2─3F0─3I0─3W0─3F1─0I0─3I1─0W0─3W1─0I1─0W1─3F2─3I2─3W2─····0I2─0W2─│ peak 2
    rank 1 │····1F0─2F0─1F1─2F1─2I0─1I0─2W0─1W0─2I1─1I1─1F2─2F2─2W1─1W1─2I2─1I2─2W2─1W2─│ peak 2
    """
    p = num_ranks
    # Keeps the ops of a rank in different slots of the block.
    delay = 0 if p % 3 else 2
    block = [(i, 2 * p - i - 1, 2 * p + delay + i, 4 * p + delay - i - 1) for i in range(p)]
    return _from_block(block, num_microbatches, "v-min")
