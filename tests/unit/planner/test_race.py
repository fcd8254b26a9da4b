"""Who wins a race: the fastest and, of those that are as fast, the most modest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.race import SAME, Race


@dataclass(frozen=True)
class Contender:
    """What a race asks of a candidate.

    Args:
        seconds: of a step.
        rank_bytes: of each rank.
        ranks, stages, splits: of its setting.
        peak: microbatches in flight.
        least_seconds: what it takes at least.
        effort: to simulate.
    """

    seconds: float = 1.0
    rank_bytes: tuple[int, ...] = (20, 20)
    ranks: int = 2
    stages: int = 2
    splits: bool = True
    peak: int = 2
    least_seconds: float = 0.5
    effort: int = 10

    @property
    def setting(self):
        return SimpleNamespace(
            num_ranks=self.ranks,
            num_stages=self.stages,
            schedule=SimpleNamespace(splits_backward=self.splits),
        )


PLAIN = Contender()
LESS = {
    "memory": {"rank_bytes": (19, 20)},
    "memory, over more ranks": {"rank_bytes": (13, 13, 13), "ranks": 3},
    "memory, where each rank has more": {"rank_bytes": (39,), "ranks": 1},
    "ranks": {"ranks": 1},
    "stages": {"stages": 1},
    "to know about": {"splits": False},
    "in flight": {"peak": 1},
    "time": {"seconds": 0.999},
}
"""What makes a candidate more modest than ``PLAIN``, what counts most first."""


def winner_of(*contenders):
    race = Race()
    race.enter(contenders)
    return race.winner


@pytest.mark.parametrize("less", LESS)
def test_of_those_that_are_as_fast_the_most_modest_wins(less):
    modest = replace(PLAIN, **LESS[less])
    assert winner_of(PLAIN, modest) == winner_of(modest, PLAIN) == modest


@pytest.mark.parametrize(
    ("first", "second"),
    [("memory", "ranks"), ("ranks", "stages"), ("stages", "to know about"),
     ("to know about", "in flight"), ("in flight", "time")],
)  # fmt: skip
def test_what_counts_more_decides(first, second):
    modest, other = (replace(PLAIN, **LESS[less]) for less in (first, second))
    assert winner_of(modest, other) == winner_of(other, modest) == modest


@pytest.mark.parametrize(
    ("seconds", "wins"),
    [(1 + 0.9 * SAME, True), (1 + 1.1 * SAME, False), (1.0, True), (0.5, True), (2.0, False)],
)
def test_a_prediction_tells_no_plans_apart_that_are_this_close(seconds, wins):
    modest = replace(PLAIN, seconds=seconds, rank_bytes=(1, 1))
    for order in ((PLAIN, modest), (modest, PLAIN)):
        assert winner_of(*order) == (modest if wins else PLAIN)


def test_there_may_be_no_winner():
    assert Race().winner is None


def test_who_cannot_win_is_not_simulated_and_a_budget_ends():
    slow = replace(PLAIN, least_seconds=1 + 1.1 * SAME)
    near = replace(PLAIN, least_seconds=1 + 0.9 * SAME)
    race = Race(budget=20)
    race.enter([PLAIN, slow, near])
    assert race.contenders == [PLAIN, near]
    assert (race.budget, race.skipped) == (0, [])
    race.enter([near])
    assert (race.budget, race.skipped) == (0, [near])
    alone = Race(budget=1)
    alone.enter([PLAIN])  # there is one at least, whatever it costs
    assert alone.winner == PLAIN


class Impatient(PlanningPatience):
    """PlanningPatience that ends when somebody says so."""

    def __init__(self):
        super().__init__()
        self.over = False

    @property
    def is_over(self):
        return self.over


def test_when_patience_is_over_what_is_there_has_to_do():
    patience = Impatient()
    race = Race(patience=patience)
    patience.over = True
    race.enter([PLAIN])  # something is better than nothing
    better = replace(PLAIN, seconds=0.6, least_seconds=0.5)
    race.enter([better])
    assert (race.contenders, race.skipped) == ([PLAIN], [better])


def test_a_sketch_tells_the_bound_of_what_would_take_long():
    long, longer = (replace(PLAIN, effort=100, least_seconds=bound) for bound in (0.7, 0.9))
    race = Race(budget=50, is_sketch=True)
    race.enter([longer, long])
    assert (race.winner, race.most_promising) == (None, long)
    race.enter([PLAIN])
    assert race.winner == PLAIN
