"""A list scheduler: time moves on, and whichever rank is free takes the best op that is there.

The zero-bubble heuristic (Qi et al., arXiv 2401.10241, section 3.1) made general: ``Rules`` say what
is best, several stages may share a rank, and a forward is admitted only if the microbatch can still
finish on its rank. That makes every order it returns free of deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from penstock.schedule.search.evaluate import UNKNOWN
from penstock.schedule.search.problem import (
    _SLACK,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NUM_KINDS,
    Orders,
    Problem,
)


class Rules(NamedTuple):
    """What a free rank prefers.

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


def greedy(problem: Problem, rules: Sequence[Rules]) -> Orders:
    """The order that these rules, one set per rank, lead to."""
    run = _Run(problem, rules)
    queue = [(0.0, rank) for rank in range(problem.num_ranks)]
    while queue:
        time, rank = heapq.heappop(queue)
        if time >= run.free[rank]:
            for entry in run.step(time, rank):
                heapq.heappush(queue, entry)
    return run.orders


class _Run:
    """What has happened so far."""

    def __init__(self, problem: Problem, rules: Sequence[Rules]) -> None:
        self.problem, self.rules = problem, rules
        stages = problem.num_stages
        self.orders: Orders = [[] for _ in range(problem.num_ranks)]
        self.end = [UNKNOWN] * (NUM_KINDS * stages * problem.num_microbatches)
        self.free = [0.0] * problem.num_ranks
        self.held = [0.0] * problem.num_ranks
        self.ahead = [0] * problem.num_ranks
        self.next = [[0] * stages for _ in range(3)]
        self.limits = [limit + _SLACK for limit in problem.limits]
        self.pending = [0]*problem.num_ranks
        self.room = [0.0] * stages
        for own in problem.stages_of:
            needed = 0.0
            for stage in reversed(own):
                # What it takes to bring one microbatch through this and all later stages here: a
                # forward that leaves less room could never be followed by the others.
                needed += problem.sizes.activation[stage]
                self.room[stage] = needed

    def step(self, time: float, rank: int) -> list[tuple[float, int]]:
        """Let ``rank``, free at ``time``, take an op or wait: (when, whom) to ask next."""
        rules = self.rules[rank]
        inputs, next_input = self._ready(BACKWARD_INPUT, time, rank)
        forwards, next_forward = self._ready(FORWARD, time, rank)
        eager = self.ahead[rank] < rules.forward_first
        if inputs and not (forwards and eager):
            return self._take(BACKWARD_INPUT, inputs[-rules.deep_backward], time, rank)
        if forwards and self.pending[rank] <= rules.lag:
            stage = forwards[-rules.deep_forward]
            if eager or next_input - time >= rules.patience * self.problem.taken[FORWARD][stage]:
                return self._take(FORWARD, stage, time, rank)
            next_forward = inf
        gap = min(next_input, next_forward) - time
        if self.pending[rank]:
            stage = self._oldest_weight(rank)
            lags = self.pending[rank] > rules.lag and forwards
            if lags or gap >= rules.gap * self.problem.taken[BACKWARD_WEIGHT][stage]:
                return self._take(BACKWARD_WEIGHT, stage, time, rank)
        return [(time + gap, rank)] if gap < inf else []

    def _ready(self, kind: int, time: float, rank: int) -> tuple[list[int], float]:
        """The stages whose next op of this kind can run now, and when the next of them will."""
        ready, soonest = [], inf
        for stage in self.problem.stages_of[rank]:
            arrival = self._arrival(kind, stage)
            if kind == FORWARD and self.held[rank] + self.room[stage] > self.limits[rank]:
                continue
            if arrival <= time:
                ready.append(stage)
            elif arrival < soonest:
                soonest = arrival
        return ready, soonest

    def _arrival(self, kind: int, stage: int) -> float:
        """When all that a stage's next op of this kind needs is there, as far as is known."""
        problem, microbatch = self.problem, self.next[kind][stage]
        if microbatch == problem.num_microbatches:
            return inf
        number = problem.number(kind, stage, microbatch)
        if kind == BACKWARD_INPUT and self.next[FORWARD][stage] <= microbatch:
            return inf
        _, needed, delay, _ = problem.arcs[number % len(problem.arcs)]
        if not needed:
            return self.end[number - kind] if kind == BACKWARD_INPUT else 0.0
        arrival = self.end[number + needed]
        return inf if arrival < 0 else arrival + delay

    def _oldest_weight(self, rank: int) -> int:
        """The stage whose weight gradient has waited longest."""
        done, possible = self.next[BACKWARD_WEIGHT], self.next[BACKWARD_INPUT]
        own = self.problem.stages_of[rank]
        return min((done[stage], stage) for stage in own if done[stage] < possible[stage])[1]

    def _take(self, kind: int, stage: int, time: float, rank: int) -> list[tuple[float, int]]:
        problem, microbatch = self.problem, self.next[kind][stage]
        number = problem.number(kind, stage, microbatch)
        self.next[kind][stage] += 1
        self.orders[rank].append(number)
        end = self.end[number] = self.free[rank] = time + problem.taken[kind][stage]
        wakes = [(end, rank)]
        whole, kept = problem.sizes.activation[stage], problem.sizes.kept_for_weight[stage]
        if kind == FORWARD:
            self.held[rank] += whole
            self.ahead[rank] += 1
            if stage + 1 < problem.num_stages:
                wakes.append((end + problem.forward_delay[stage + 1], problem.placement[stage + 1]))
        elif kind == BACKWARD_INPUT:
            self.held[rank] -= whole - kept
            self.ahead[rank] -= 1
            self.pending[rank] += 1
            if stage:
                wakes.append((end + problem.backward_delay[stage - 1], problem.placement[stage - 1]))
        else:
            self.pending[rank] -= 1
            self.held[rank] -= kept
        return wakes
