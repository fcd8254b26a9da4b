"""The search itself: 1. seeds, 2. a grid of rules, 3. a climb in their space, 4. single moves.

A rule says what a rank prefers (``Rules``); changing the rules of a rank changes its whole order in
a consistent way, which climbs far better than moving single ops. Single moves come last: they find
what no rule expresses, which counts where there are few ops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from penstock.core.schedule.search.greedy import Rules, greedy
from penstock.core.schedule.search.problem import (
    BACKWARD_INPUT,
    FORWARD,
    NUM_KINDS,
    OrderingProblem,
    Orders,
)

_MOST_CLIMBS, _MOST_MOVES = 500, 2000
_GRID_OPS, _CLIMB_OPS, _MOVE_OPS = 600_000, 900_000, 300_000
"""Ops that all orders of a phase have together: what bounds the time of large problems."""
_CLOSE = 1 + 1e-12

_PATIENCE = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
_GAPS = (0.01, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
_GRID = tuple(product((0, 1, 2), (1.0, 0.5, 0.1, 0.01), (0.0, 0.2, 0.45, 0.7, 1.0)))
_DEEP = ((True, True), (True, False), (False, True), (False, False))


def search(problem: OrderingProblem, seeds: Iterable[Orders], effort: float = 1.0) -> Orders:
    """The best order found. Never worse than any of the seeds that fits; always the same for the
    same arguments.

    Args:
        seeds: orders to begin with, over the same ops.
        effort: 2 looks at twice as many orders, 0 only at the seeds and the grid.
    """
    return _Climb(problem, effort).run(seeds)


class _Climb:
    def __init__(self, problem: OrderingProblem, effort: float) -> None:
        self.problem = problem
        self.random = random.Random(0)
        count = sum(len(stages) for stages in problem.stages_of) * problem.num_microbatches * 3
        self.grid_step = max(1, round(count * len(_GRID) / _GRID_OPS))
        self.climbs = round(effort * min(_MOST_CLIMBS, _CLIMB_OPS // count))
        self.moves = round(effort * min(_MOST_MOVES, _MOVE_OPS // count))
        self.good_enough = problem.least * _CLOSE
        self.best: Orders = []
        self.outcome = _DEADLOCK
        self.rules: list[Rules] = []
        self.rules_outcome = self.outcome
        often = (self._patience, self._gap, self._eager)
        several = any(len(stages) > 1 for stages in problem.stages_of)
        self.changes = (*often * 3, self._lag, *(self._stages,) * several)

    def run(self, seeds: Iterable[Orders]) -> Orders:
        # 1. The seeds: nothing worse is ever given back.
        for seed in seeds:
            if all(self.problem.fits(rank, order) for rank, order in enumerate(seed)):
                self._offer(seed)
        # 2.–4. Better ones, until nothing can be better.
        for step in self._steps():
            if self.outcome.objective <= self.good_enough:
                break
            step()
        return self.best

    def _steps(self) -> Iterator[Callable[[], None]]:
        # 2. A grid: the same rules on every rank.
        for rules in self._grid():
            yield partial(self._try, rules)
        # 3. The climb: from the best rules so far, change those of some ranks.
        for _ in range(self.climbs):
            yield partial(self._try, self._changed(self.rules))
        # 4. Single ops, which no rule moves.
        for _ in range(self.moves):
            yield self._move

    def _offer(self, orders: Orders) -> _OrderScore:
        """Keep these orders if none better are known."""
        score = _evaluate(self.problem, orders)
        if score < self.outcome:
            self.outcome, self.best = score, orders
        return score

    def _try(self, rules: list[Rules]) -> None:
        outcome = self._offer(greedy(self.problem, rules))
        if outcome <= self.rules_outcome:
            self.rules, self.rules_outcome = rules, outcome

    def _grid(self) -> Iterator[list[Rules]]:
        num_ranks = self.problem.num_ranks
        several = any(len(stages) > 1 for stages in self.problem.stages_of)
        warm_ups = self._warm_ups()
        # A large problem looks at every so many of these rules only.
        for warm_up, gap, patience in _GRID[:: self.grid_step]:
            eager = warm_ups[warm_up]
            for deep in _DEEP if several else _DEEP[:1]:
                yield [Rules(eager[rank], patience, gap, inf, *deep) for rank in range(num_ranks)]

    def _warm_ups(self) -> tuple[list[float], ...]:
        """Forwards that each rank puts before all else: none, as many as 1F1B, and as many as it
        can run until its first input gradient comes back."""
        problem, left = self.problem, range(self.problem.num_ranks, 0, -1)
        until_back, way = [], 0.0
        for stage in reversed(range(problem.num_stages)):
            forward = problem.taken[FORWARD][stage]
            until_back.append(1 + way // forward if forward else inf)
            both = FORWARD, BACKWARD_INPUT
            way += sum(problem.taken[kind][stage] for kind in both)
            if stage:
                way += problem.delays[FORWARD][stage] + problem.delays[BACKWARD_INPUT][stage - 1]
        first = [until_back[problem.num_stages - 1 - own[0]] for own in problem.stages_of]
        return [0.0] * len(left), [float(ranks) for ranks in left], first

    def _changed(self, rules: Sequence[Rules]) -> list[Rules]:
        """One preference, on one rank or on some neighbouring ones, a few times over."""
        changed = list(rules)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            start = self.random.randrange(len(rules))
            alone = self.random.random() < 0.6
            stop = start + 1 if alone else self.random.randint(start + 1, len(rules))
            change = self.random.choice(self.changes)
            changed[start:stop] = change(changed[start:stop], len(rules) - start)
        return changed

    def _patience(self, rules: list[Rules], _: int) -> list[Rules]:
        patience = self.random.choice(_PATIENCE)
        return [rule._replace(patience=patience) for rule in rules]

    def _gap(self, rules: list[Rules], _: int) -> list[Rules]:
        gap = self.random.choice(_GAPS)
        return [rule._replace(gap=gap) for rule in rules]

    def _eager(self, rules: list[Rules], behind: int) -> list[Rules]:
        """``behind`` ranks, the first of these included, are left to the end of the pipeline."""
        changed = []
        for index, rule in enumerate(rules):
            left = behind - index
            eager = (0, left, 2 * left - 1, rule.forward_first + 1, rule.forward_first - 1)
            changed.append(rule._replace(forward_first=self.random.choice(eager)))
        return changed

    def _lag(self, rules: list[Rules], _: int) -> list[Rules]:
        lag = self.random.choice((inf, inf, 0, 1, 2, 4))
        return [rule._replace(lag=lag) for rule in rules]

    def _stages(self, rules: list[Rules], _: int) -> list[Rules]:
        forward, backward = (self.random.random() < 0.5 for _ in range(2))
        return [rule._replace(deep_forward=forward, deep_backward=backward) for rule in rules]

    def _move(self) -> None:
        """Move one op some places to the front or back of its rank; keep what is no worse."""
        problem = self.problem
        rank = self.random.randrange(problem.num_ranks)
        order = list(self.best[rank])
        place, ahead = self.random.randrange(len(order)), self.random.choice((-1, 1))
        for _ in range(self.random.choice((1, 1, 2, 3, 5))):
            to = place + ahead
            if not 0 <= to < len(order) or not self._may_swap(order[place], order[to]):
                break
            order[place], order[to] = order[to], order[place]
            place = to
        else:
            if problem.fits(rank, order):
                moved = [order if r == rank else present for r, present in enumerate(self.best)]
                score = _evaluate(problem, moved)
                if score <= self.outcome:
                    self.outcome, self.best = score, moved

    def _may_swap(self, first: int, second: int) -> bool:
        # Microbatches are alike: that each kind runs them in order loses nothing.
        stage, other_stage = (n // NUM_KINDS % self.problem.num_stages for n in (first, second))
        same_microbatch = first // NUM_KINDS == second // NUM_KINDS
        same_kind = stage == other_stage and first % NUM_KINDS == second % NUM_KINDS
        return not same_microbatch and not same_kind


_UNKNOWN = -1.0


class _OrderScore(NamedTuple):
    """The score of an order. Compares as a tuple."""

    objective: float
    """The makespan, or the longest time any rank needs from its first op to its last."""
    total: float
    """The sum over ranks of what the objective is the largest of: among equals, slack is better."""


_DEADLOCK = _OrderScore(inf, inf)


def _evaluate(problem: OrderingProblem, orders: Orders) -> _OrderScore:
    """The score of ``orders``.

    Within a rank, each microbatch must run F, then I, then W; that is not checked.
    """
    arcs, period = problem.arcs, NUM_KINDS * problem.num_stages
    end = [_UNKNOWN] * (period * problem.num_microbatches)
    first = [_UNKNOWN] * problem.num_ranks
    free = [0.0] * problem.num_ranks
    position = [0] * problem.num_ranks
    waiting: dict[int, int] = {}
    runnable = list(range(problem.num_ranks))
    while runnable:
        rank = runnable.pop()
        order, place, time = orders[rank], position[rank], free[rank]
        count = len(order)
        while place < count:
            number = order[place]
            result, needed, delay, taken = arcs[number % period]
            if needed:
                arrival = end[number + needed]
                if arrival < 0:
                    waiting[number + needed] = rank
                    break
                arrival += delay
                time = max(arrival, time)
            if not place:
                first[rank] = time
            time += taken
            number += result
            end[number] = time
            place += 1
            if number in waiting:
                runnable.append(waiting.pop(number))
        position[rank], free[rank] = place, time
    if any(done < len(order) for done, order in zip(position, orders, strict=True)):
        return _DEADLOCK
    if problem.objective == "makespan":
        lengths = free
    else:
        lengths = [last - start for last, start in zip(free, first, strict=True)]
    return _OrderScore(max(lengths), sum(lengths))
