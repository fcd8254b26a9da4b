"""A good order, found by list scheduling: whichever op comes next by some rule runs as early as it
can. Rules are drawn, and the best of them changed a little as long as time is cheap.

It need not be the best. It bounds the optimum from above, and the closer it is, the less is left
for the solver.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.schedule.op import Kind
from penstock.schedule.optimal.problem import Problem

Order = list[list[int]]
"""Of each rank, the numbers of its ops."""

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_DRAWN, _CHANGED = 60, 1200
_HELD = {_F: 1, _I: 0, _W: -1}
_URGENCY = ({_I: 0, _F: 1, _W: 2}, {_F: 0, _I: 1, _W: 2}, {_I: 0, _W: 1, _F: 2})


@dataclass(frozen=True)
class _Rule:
    """How a list schedule is made.

    Attributes:
        caps: per rank, how many forwards it may hold before it begins another microbatch, which
            must find room for all of its stages there.
        wishes: by op, what goes first; the least.
        eager: whether what can start first goes before what is wished for.
    """

    caps: tuple[int, ...]
    wishes: tuple[float, ...]
    eager: bool

    def changed(self, draw: random.Random, most: tuple[int, ...]) -> _Rule:
        """A rule next to this one."""
        if draw.random() < 0.3:
            rank = draw.randrange(len(self.caps))
            caps = list(self.caps)
            caps[rank] = draw.randint(1, most[rank])
            return replace(self, caps=tuple(caps))
        wishes = list(self.wishes)
        for _ in range(draw.randint(1, 4)):
            wishes[draw.randrange(len(wishes))] += draw.gauss(0, 1)
        return replace(self, wishes=tuple(wishes))


def good_order(problem: Problem, enough: float) -> tuple[float, Order]:
    """The objective of a good order, and the order; no better one is looked for than ``enough``."""
    draw = random.Random(0)  # the same order wherever this runs
    plain = tuple(_URGENCY[0][op.kind] + op.microbatch / 100 for op in problem.ops)
    # One microbatch after the other, which always fits.
    best = _Rule((1,) * len(problem.room), plain, eager=True)
    order = _List(problem, best).run()
    least = objective_of(problem, order)
    for turn in range(_DRAWN + _CHANGED):
        if least <= enough:
            break
        rule = best.changed(draw, problem.room) if turn >= _DRAWN else _drawn(problem, draw, turn)
        found = _List(problem, rule).run()
        objective = objective_of(problem, found)
        # Equally good ones too: they lead away from where no single change helps.
        if objective <= least:
            best, order, least = rule, found, objective
    return least, order


def _drawn(problem: Problem, draw: random.Random, turn: int) -> _Rule:
    urgency = _URGENCY[turn % len(_URGENCY)]
    wishes = tuple(
        (urgency[op.kind] if draw.random() < 0.9 else 1) + op.microbatch / 100 for op in problem.ops
    )
    caps = problem.room if turn < 6 else tuple(draw.randint(1, room) for room in problem.room)
    return _Rule(caps, wishes, eager=turn % 2 == 0)


def objective_of(problem: Problem, order: Order) -> float:
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


class _List:
    """One pass of list scheduling by a rule; it stops short where that leads into a deadlock."""

    def __init__(self, problem: Problem, rule: _Rule) -> None:
        self.problem, self.rule = problem, rule
        self.missing = [len(needs) for needs in problem.needs]
        self.arrival = [0.0] * len(problem.ops)
        self.free = [0.0] * len(problem.room)
        self.held = [0] * len(problem.room)

    def run(self) -> Order:
        """The order."""
        problem = self.problem
        order: Order = [[] for _ in problem.room]
        ready = [n for n, missing in enumerate(self.missing) if not missing]
        while can := [n for n in ready if self._fits(n)]:
            number = min(can, key=self._wish)
            ready.remove(number)
            order[problem.rank[number]].append(number)
            ready += self._start(number)
        return order

    def _fits(self, number: int) -> bool:
        problem = self.problem
        op, rank = problem.ops[number], problem.rank[number]
        if op.kind is not Kind.FORWARD:
            return True
        if op.stage != problem.ops[problem.members[rank][0]].stage:
            return self.held[rank] < problem.room[rank]
        all_stages = self.held[rank] + problem.stages_per_rank[rank]
        return all_stages <= max(self.rule.caps[rank], problem.stages_per_rank[rank])

    def _wish(self, number: int) -> tuple[float, float]:
        can_start = max(self.free[self.problem.rank[number]], self.arrival[number])
        return (can_start if self.rule.eager else 0.0), self.rule.wishes[number]

    def _start(self, number: int) -> Iterator[int]:
        """Run an op; the ops that lacked only this one."""
        rank = self.problem.rank[number]
        start = max(self.free[rank], self.arrival[number])
        self.free[rank] = start + self.problem.durations[number]
        self.held[rank] += _HELD[self.problem.ops[number].kind]
        for b, gap in self.problem.needed_by[number]:
            self.arrival[b] = max(self.arrival[b], start + gap)
            self.missing[b] -= 1
            if not self.missing[b]:
                yield b
