"""Which of many offers is the fastest that fits; only those that may win are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import itemgetter

from penstock.base.errors import InputError, PlanError
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import candidates, refined, with_cuts, with_layers_moved
from penstock.planning.planner.limits import least_excess
from penstock.planning.planner.offers import Offer, neighbours, offers
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task

SAME = 0.01
"""Relative: no prediction tells plans this close apart, so the one that needs less memory wins."""

_MOST_MOVES = 20
_CLOSE = 0.1
"""Relative: what coarse cuts, or an order found for other costs, may cost."""
_MOST_REFINED = 4
_MOST_SEARCHED = 4
"""Candidates whose order is searched; each search takes a second or two."""

Built = tuple[int, list[Candidate]] | InputError | PlanError
"""(stages, candidates) of an offer, or why there are none."""


@dataclass
class Race:
    """Candidates and the best of them.

    Attributes:
        least: seconds of the fastest so far.
        contenders: all that were simulated.
        refusals: why offers could not be built, by their number of ranks.
        num_stages: of the settings that could be built.
        budget: ops to simulate; when they are spent, what is left is only counted.
        num_skipped: candidates that were not simulated because of that.
        failure: why the last order that was searched in vain was not found.
    """

    budget: int = 250_000
    num_skipped: int = 0
    least: float = inf
    contenders: list[Candidate] = field(default_factory=list)
    refusals: dict[int, InputError | PlanError] = field(default_factory=dict)
    num_stages: set[int] = field(default_factory=set)
    failure: InputError | None = None

    def run(self, tasks: Sequence[Task], constraints: Constraints) -> None:
        """Let everything compete that constraints allow for one of some tasks. Bounds come before
        simulations: first of offers, then of their cuts."""
        waiting: list[tuple[float, int, Candidate]] = []
        numbers = count()  # candidates themselves have no order
        for promised, task, offer in _by_promise(tasks, constraints):
            # Who cannot be slower than what the next offers promise runs first.
            while waiting and waiting[0][0] <= promised:
                self._enter(heappop(waiting)[-1])
            if promised > self.least * (1 + SAME):
                break
            for candidate in self.built(task, offer, constraints):
                heappush(waiting, (candidate.least_seconds, next(numbers), candidate))
        while waiting:
            self._enter(heappop(waiting)[-1])
        if not constraints.cuts:
            self._refine()
        self._climb(constraints)
        if not all(contender.setting.is_final for contender in self.contenders):
            self._settle_orders()
            self._climb(constraints)

    def enter(self, candidates: Iterable[Candidate]) -> None:
        """Let more compete, as they are."""
        for candidate in candidates:
            self._enter(candidate)

    def _settle_orders(self) -> None:
        """Search orders under the costs of the stages for what came close, and for what wins until
        its order is one of these."""
        for candidate in self._close()[:_MOST_SEARCHED]:
            self._settle(candidate)
        while self.winner is not None and not self.winner.setting.is_final:
            self._settle(self.winner)

    def _settle(self, candidate: Candidate) -> None:
        self.contenders = [contender for contender in self.contenders if contender is not candidate]
        try:
            self.contenders.append(candidate.with_final_order())
        except InputError as error:
            self.failure = error
        self.least = min((contender.seconds for contender in self.contenders), default=inf)

    def _close(self) -> list[Candidate]:
        """The contenders that a better look may still make the winner, the best first."""
        close = (
            contender
            for contender in self.contenders
            if contender.seconds <= self.least * (1 + _CLOSE)
        )
        return sorted(close, key=lambda candidate: candidate.seconds)

    def _refine(self) -> None:
        """Cut what came close once more, between all layers near its cuts."""
        for coarse in self._close()[:_MOST_REFINED]:
            for candidate in refined(coarse):
                self._enter(candidate)

    def _climb(self, constraints: Constraints) -> None:
        """Move layers and replicas of the winner from stage to stage as long as that helps."""
        for _ in range(_MOST_MOVES):
            best, least = self.winner, self.least
            if best is None:
                return
            moved = [] if constraints.cuts else [*refined(best), *with_layers_moved(best)]
            if not constraints.replicas:
                for offer in neighbours(best.setting):
                    moved += self.built(best.task, offer, constraints)
            for candidate in moved:
                self._enter(candidate)
            if self.least >= least * (1 - SAME):
                return

    def built(self, task: Task, offer: Offer, constraints: Constraints) -> list[Candidate]:
        """The candidates of an offer, if it has as many stages as the constraints allow."""
        obstacle = constraints.obstacle(
            offer.family, offer.replicas, task.num_microbatches, len(offer.devices)
        )
        if obstacle is not None:
            self.refusals[len(offer.devices)] = obstacle
            return []
        key = (offer, constraints.cuts)
        if key not in task.cache.offers:
            task.cache.offers[key] = self._built(task, offer, constraints.cuts)
        outcome: Built = task.cache.offers[key]
        if not isinstance(outcome, tuple):
            self.refusals[len(offer.devices)] = outcome
            return []
        num_stages, candidates_ = outcome
        self.num_stages.add(num_stages)
        return candidates_ if constraints.allows(num_stages) else []

    def _built(self, task: Task, offer: Offer, cuts: tuple[int, ...]) -> Built:
        try:
            setting = offer.setting(task)
        except (InputError, PlanError) as error:
            return error
        if cuts:
            given = len(cuts) == setting.num_stages + 1
            cut = [with_cuts(task, setting, cuts)] if given else []
            return setting.num_stages, [candidate for candidate in cut if candidate.fits]
        return setting.num_stages, candidates(task, setting)

    def _enter(self, candidate: Candidate) -> None:
        """Simulate a candidate, unless its bound says that it is slower than the best."""
        if candidate.least_seconds <= self.least * (1 + SAME):
            if self.budget < candidate.num_ops and self.contenders:
                self.num_skipped += 1
                return
            self.budget -= candidate.num_ops
            self.contenders.append(candidate)
            self.least = min(self.least, candidate.seconds)

    @property
    def winner(self) -> Candidate | None:
        """The fastest; of those that are as fast, the one that needs least memory, then the fewest
        ranks, then the least to know about."""
        ties = [
            contender
            for contender in self.contenders
            if contender.seconds <= self.least * (1 + SAME)
        ]
        return min(ties, key=_modesty, default=None)


def _modesty(candidate: Candidate) -> tuple[float, ...]:
    setting = candidate.setting
    return (
        sum(candidate.rank_bytes),
        setting.num_ranks,
        setting.num_stages,
        setting.schedule.splits_backward,
        candidate.peak,
        candidate.seconds,
    )


def _by_promise(tasks: Sequence[Task], constraints: Constraints) -> list[tuple[float, Task, Offer]]:
    """All offers, each with the least that it can take, the most promising first."""
    promises = [
        (offer.least_seconds(task), task, offer)
        for task in tasks
        for offer in offers(task, constraints)
    ]
    return sorted(promises, key=itemgetter(0))


def fastest(
    tasks: Sequence[Task], constraints: Constraints, budget: int = 250_000
) -> Candidate | None:
    """The winner of a race; ``None`` if nothing fits.

    Args:
        budget: ops to simulate.
    """
    race = Race(budget=budget)
    race.run([task for task in tasks if least_excess(task) <= 0], constraints)
    return race.winner


def closest(tasks: Sequence[Task], constraints: Constraints) -> Candidate | None:
    """The candidate that misses its limits by the fewest bytes; ``None`` if nothing can be built.

    Each candidate tightens the slack for the next, so that what remains is the least excess. Where
    the search does not cut between all layers, it then looks at those near the cuts, and may find
    what fits.
    """
    least, nearest = inf, None
    for _, task, offer in _by_promise(tasks, constraints):
        with suppress(InputError, PlanError):
            setting = offer.setting(task)
            again = constraints.allows(setting.num_stages)
            while again:
                again = False
                given = [with_cuts(task, setting, constraints.cuts)] if constraints.cuts else []
                for candidate in given or candidates(task, setting, slack=least - 1):
                    over = candidate.excess.num_bytes
                    if over < least:
                        least, nearest, again = over, candidate, True
    return nearest if nearest is None or constraints.cuts else _closer(nearest)


def _closer(nearest: Candidate) -> Candidate:
    """With cuts between other layers near by, as long as these miss the limits by less."""
    for _ in range(_MOST_MOVES):
        slack = nearest.excess.num_bytes - 1
        finer = refined(nearest, slack)
        if nearest.fits or not finer:
            break
        nearest = min(finer, key=lambda candidate: candidate.excess.num_bytes)
    return nearest
