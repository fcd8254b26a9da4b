"""What the search for the best order is about: ops, the gaps between them, and their windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.core.schedule.durations import Durations
from penstock.core.schedule.op import Kind, Op, dependencies
from penstock.core.schedule.placement import Placement

Floats = npt.NDArray[np.float64]
NEVER = -np.inf

Order = list[list[int]]
"""The numbers of the ops of each rank, in their order."""

Gaps = tuple[tuple[int, float], ...]
"""Ops, and how long after the start of one of two the other can start."""

_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class ExactProblem:
    """What is to be ordered; op number n is ``ops[n]``.

    Attributes:
        ops: all of them, by stage, kind and microbatch.
        rank: the rank of each op.
        duration: how long each op takes.
        gap: ``gap[a, b]`` is how long after the start of a, b can start at the earliest; −∞ where b
            does not need a.
        room: how many forwards each rank may hold at once.
        by_stage: whether each rank's end counts from its own first start, not from time 0.
    """

    ops: tuple[Op, ...]
    rank: tuple[int, ...]
    duration: Floats
    gap: Floats
    room: tuple[int, ...]
    by_stage: bool = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        num_microbatches: int,
        costs: Durations,
        room: tuple[int, ...],
        by_stage: bool = False,
    ) -> ExactProblem:
        """The ops of a split backward with their dependencies."""
        ops = tuple(
            Op(stage, kind, microbatch)
            for stage in range(len(placement))
            for kind in _KINDS
            for microbatch in range(num_microbatches)
        )
        number = {op: index for index, op in enumerate(ops)}
        duration = np.array([costs.duration(op) for op in ops], dtype=float)
        gap = np.full((len(ops), len(ops)), NEVER)
        for b, op in enumerate(ops):
            for needed in dependencies(op, len(placement) - 1, number):
                a = number[needed]
                hops = placement[needed.stage] != placement[op.stage]
                gap[a, b] = duration[a] + (costs.delay(needed, op) if hops else 0.0)
            if op.microbatch:
                gap[b - 1, b] = duration[b - 1]
            rank = placement[op.stage]
            freed = op.microbatch - room[rank]
            if op.kind is Kind.FORWARD and placement.count(rank) == 1 and freed >= 0:
                # The only stage of its rank: memory is a plain dependency.
                a = number[Op(op.stage, Kind.BACKWARD_WEIGHT, freed)]
                gap[a, b] = duration[a]
        return cls(ops, tuple(placement[op.stage] for op in ops), duration, gap, room, by_stage)

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ops of each rank; the first is its first forward, which all others need."""
        return tuple(
            tuple(n for n, rank in enumerate(self.rank) if rank == mine)
            for mine in range(len(self.room))
        )

    @cached_property
    def stages_per_rank(self) -> tuple[int, ...]:
        """How many stages each rank has."""
        return tuple(len({self.ops[n].stage for n in numbers}) for numbers in self.members)

    @cached_property
    def durations(self) -> list[float]:
        """``duration`` as plain numbers, for loops."""
        return [float(taken) for taken in self.duration]

    @cached_property
    def needs(self) -> tuple[Gaps, ...]:
        """For each op, the ops it needs, and how long after their starts it can start."""
        return _gaps(self.gap.T)


def objective_of(problem: ExactProblem, order: Order) -> float:
    """The objective if every op runs as early as the order lets it; infinite if it deadlocks."""
    before = {b: a for numbers in order for a, b in pairwise(numbers)}
    start: dict[int, float] = {}
    position = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, numbers in enumerate(order):
            while position[rank] < len(numbers):
                b = numbers[position[rank]]
                needs = problem.needs[b]
                if any(a not in start for a, _ in needs):
                    break
                free = start[before[b]] + problem.durations[before[b]] if b in before else 0.0
                start[b] = max([free, *(start[a] + gap for a, gap in needs)])
                position[rank] += 1
                moved = True
    if len(start) < len(problem.ops):
        return float("inf")
    begins = [start[numbers[0]] if problem.by_stage else 0.0 for numbers in order]
    ends = [start[numbers[-1]] + problem.durations[numbers[-1]] for numbers in order]
    return float(max(end - begin for begin, end in zip(begins, ends, strict=True)))


def _gaps(rows: Floats) -> tuple[Gaps, ...]:
    return tuple(
        tuple((int(n), float(row[n])) for n in np.flatnonzero(row > NEVER)) for row in rows
    )


class StartWindows:
    """When each op can run, and what that says about the objective.

    Attributes:
        far: the longest path from the start of a to the start of b; −∞ where there is none.
        head: the earliest start of each op.
        tail: by how much the objective exceeds each op's end, at least; negative where ranks count
            from their own first start.
        possible: whether no op comes before itself.
    """

    def __init__(self, problem: ExactProblem, gap: Floats) -> None:
        far = gap.copy()
        np.fill_diagonal(far, 0.0)
        for via in range(len(far)):
            np.maximum(far, far[:, via : via + 1] + far[via : via + 1, :], out=far)
        both = (far > NEVER) & (far.T > NEVER)
        self.possible = int(both.sum()) == len(far)
        self.far: Floats = far
        self.head: Floats = far.max(axis=0)
        begin = np.zeros(len(problem.ops))
        if problem.by_stage:
            # A rank's first forward needs nothing but the first forwards of the ranks before it,
            # so that it starts as early in every order.
            begin = np.array([self.head[problem.members[rank][0]] for rank in problem.rank])
        self.tail: Floats = (far + problem.duration - begin).max(axis=1) - problem.duration

    def lower_bound(self, problem: ExactProblem) -> float:
        """Jackson's one-machine bound: the first of any ops of one rank starts no earlier than
        their least head, and behind the last comes no less than their least tail."""
        bound = float((self.head + problem.duration + self.tail).max())
        for numbers in map(list, problem.members):
            head, duration, tail = (x[numbers] for x in (self.head, problem.duration, self.tail))
            for least in np.unique(head):
                by_tail = np.argsort(-np.where(head >= least, tail, NEVER))
                by_tail = by_tail[: int((head >= least).sum())]
                work = np.cumsum(duration[by_tail])
                bound = max(bound, float((least + work + tail[by_tail]).max()))
        return bound

    def is_open(self, a: int, b: int) -> bool:
        """Whether either of two ops may come first."""
        return bool(self.far[a, b] == NEVER and self.far[b, a] == NEVER)
