"""A list scheduler: time moves on, and whichever rank is free takes the best op that is there.

The zero-bubble heuristic (Qi et al., arXiv 2401.10241, section 3.1) made general: ``Rules`` say
what is best, several stages may share a rank, and a forward is admitted only if the microbatch can
still finish on its rank. That makes every order it returns free of deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from penstock.core.schedule.search.problem import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SLACK,
    OrderingProblem,
    Orders,
)


class Rules(NamedTuple):
    """The preferences of a free rank.

    Attributes:
        forward_first: while fewer than this many forwards are ahead of backwards, a forward goes
            before an input gradient that is ready, too.
        patience: no forward begins when an input gradient comes within this share of its length.
        gap: a weight gradient fills a gap that is at least this share of its length.
        lag: a weight gradient goes before a forward once more than this many of them wait.
        deep_forward: of several stages, the forward of the last one; otherwise of the first.
        deep_backward: of several stages, the backward of the last one; otherwise of the first.
    """

    forward_first: float = 0.0
    patience: float = 0.0
    gap: float = 1.0
    lag: float = inf
    deep_forward: bool = True
    deep_backward: bool = True


class Phase(NamedTuple):
    """Where the scheduler stands.

    Attributes:
        state: all that decides what ranks do next, but for how many microbatches are done and how
            many are left.
        begun: how many microbatches the first stage has begun.
        lengths: how many ops each rank has.
    """

    state: tuple[object, ...]
    begun: int
    lengths: tuple[int, ...]


def greedy(
    problem: OrderingProblem, rules: Sequence[Rules], look: Callable[[Phase], None] | None = None
) -> Orders:
    """The order that these rules, one set per rank, lead to.

    Args:
        problem: what to order.
        rules: what each rank prefers.
        look: is shown where the scheduler stands whenever time has moved on.
    """
    run = _Run(problem, rules)
    queue = [(0.0, rank) for rank in range(problem.num_ranks)]
    before = 0.0
    while queue:
        if look is not None and queue[0][0] > before:
            before = queue[0][0]
            look(run.phase(before, queue))
        time, rank = heapq.heappop(queue)
        if time >= run.free[rank]:
            for entry in run.step(time, rank):
                heapq.heappush(queue, entry)
    return run.orders


class _Run:
    """A run of the list scheduler, as far as it has come."""

    def __init__(self, problem: OrderingProblem, rules: Sequence[Rules]) -> None:
        self.problem, self.rules, self.sizes = problem, rules, problem.sizes
        stages, count = problem.num_stages, problem.num_microbatches
        self.orders: Orders = [[] for _ in range(problem.num_ranks)]
        self.free = [0.0] * problem.num_ranks
        self.held = [0.0] * problem.num_ranks
        self.ahead = [0] * problem.num_ranks
        self.weights_waiting = [0] * problem.num_ranks
        # Per kind and stage: how many have run, and when all that each needs is there, as far as
        # is known.
        self.done = [[0] * stages for _ in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)]
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in range(2)]
        for kind, stage in product((FORWARD, BACKWARD_INPUT), range(stages)):
            if problem.awaited[kind][stage] is None:
                self.arrivals[kind][stage] = [0.0] * count
        self.limits = [limit + SLACK for limit in problem.limits]
        # What it takes to bring one microbatch through this and all later stages of the rank: a
        # forward that leaves less room could never be followed by the others.
        self.room = [
            sum(
                problem.sizes.activation[later]
                for later in problem.stages_of[rank]
                if later >= stage
            )
            for stage, rank in enumerate(problem.placement)
        ]

    def phase(self, time: float, queue: Sequence[tuple[float, int]]) -> Phase:
        """Where the scheduler stands, with what it is to ask next."""
        begun = self.done[FORWARD][0]
        ahead = [count - begun for row in self.done for count in row]
        # What is over is over, however long ago. All inputs of the first stage were there at once.
        arriving = [
            [max(0.0, arrival - time) for arrival in arrivals[self.done[kind][stage] :]]
            for kind, row in enumerate(self.arrivals)
            for stage, arrivals in enumerate(row)
            if self.problem.awaited[kind][stage] is not None
        ]
        busy = [max(0.0, end - time) for end in self.free]
        asked = sorted({(moment - time, rank) for moment, rank in queue})
        state = *ahead, *busy, *map(tuple, arriving), *asked
        return Phase(state, begun, tuple(map(len, self.orders)))

    def step(self, time: float, rank: int) -> list[tuple[float, int]]:
        """Let ``rank``, free at ``time``, take an op or wait: (when, whom) to ask next."""
        rules = self.rules[rank]
        inputs, next_input = self._ready(BACKWARD_INPUT, time, rank, -inf)
        forwards, next_forward = self._ready(FORWARD, time, rank, self.held[rank])
        eager = self.ahead[rank] < rules.forward_first
        if inputs and not (forwards and eager):
            return self._take(BACKWARD_INPUT, inputs[-rules.deep_backward], time, rank)
        if forwards and self.weights_waiting[rank] <= rules.lag:
            stage = forwards[-rules.deep_forward]
            if eager or next_input - time >= rules.patience * self.problem.taken[FORWARD][stage]:
                return self._take(FORWARD, stage, time, rank)
            next_forward = inf
        gap = min(next_input, next_forward) - time
        if self.weights_waiting[rank]:
            stage = self._oldest_weight(rank)
            lags = self.weights_waiting[rank] > rules.lag and forwards
            if lags or gap >= rules.gap * self.problem.taken[BACKWARD_WEIGHT][stage]:
                return self._take(BACKWARD_WEIGHT, stage, time, rank)
        return [(time + gap, rank)] if gap < inf else []

    def _ready(self, kind: int, time: float, rank: int, held: float) -> tuple[list[int], float]:
        """The stages whose next op of this kind can run now, and when the next of them will."""
        ready, soonest = [], inf
        done, arrivals = self.done[kind], self.arrivals[kind]
        for stage in self.problem.stages_of[rank]:
            if done[stage] < len(arrivals[stage]) and held + self.room[stage] <= self.limits[rank]:
                arrival = arrivals[stage][done[stage]]
                if arrival <= time:
                    ready.append(stage)
                elif arrival < soonest:
                    soonest = arrival
        return ready, soonest

    def _oldest_weight(self, rank: int) -> int:
        """The stage whose weight gradient has waited longest."""
        done, possible = self.done[BACKWARD_WEIGHT], self.done[BACKWARD_INPUT]
        stages = self.problem.stages_of[rank]
        return min((done[stage], stage) for stage in stages if done[stage] < possible[stage])[1]

    def _take(self, kind: int, stage: int, time: float, rank: int) -> list[tuple[float, int]]:
        problem, microbatch = self.problem, self.done[kind][stage]
        self.done[kind][stage] += 1
        self.orders[rank].append(problem.number(kind, stage, microbatch))
        end = self.free[rank] = time + problem.taken[kind][stage]
        self._account(kind, stage, rank)
        awake = [(end, rank)]
        for later, target, delay in problem.followers[kind][stage]:
            if later != BACKWARD_WEIGHT:
                arrival = end + delay
                self.arrivals[later][target].append(arrival)
                if target != stage:
                    awake.append((arrival, problem.placement[target]))
        return awake

    def _account(self, kind: int, stage: int, rank: int) -> None:
        """Change what the rank of an op holds and has waiting."""
        whole, kept = self.sizes.activation[stage], self.sizes.kept_for_weight[stage]
        if kind == FORWARD:
            self.held[rank] += whole
            self.ahead[rank] += 1
        elif kind == BACKWARD_INPUT:
            self.held[rank] -= whole - kept
            self.ahead[rank] -= 1
            self.weights_waiting[rank] += 1
        else:
            self.held[rank] -= kept
            self.weights_waiting[rank] -= 1
