"""Which of many offers is the fastest that fits; only those that may win are simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, product, zip_longest
from math import inf

from penstock.base.errors import InputError, PlanError
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import (
    candidates,
    has_few_cuts,
    refined,
    ways_to_cut,
    with_cuts,
    with_layers_moved,
)
from penstock.planning.planner.limits import lacks_room, least_busy_seconds, least_excess
from penstock.planning.planner.offers import Offer, guided, neighbours, offers
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.promises import FEW_STAGES, Promise, Reaches, by_promise, uniform
from penstock.planning.planner.recomputing import recomputing
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task

SAME = 0.01
"""Relative: no prediction tells plans this close apart, so the one that needs less memory wins."""

_MOST_MOVES = 20
_MOST_CLIMBED = 6
"""Kinds of plans that came close, and whose layers and replicas are moved, too."""
_MOST_RECOMPUTED = 16
"""Ways to recompute that are looked at where all cuts are."""
_CLOSE = 0.1
"""Relative: what coarse cuts, or an order found for other costs, may cost."""
_MOST_REFINED = 4
_MOST_SEARCHED = 4
"""Candidates whose order is searched; each search takes a second or two."""

_LITTLE = 200
"""Effort that is spent at once, as soon as a candidate is built; more on what promises most."""
_MANY_STAGES = 16
"""Whose layers a sketch does not move."""
_MOST_UNIFORM = 4
"""Of uniform layouts, which come first."""
_BUSIEST = 3
"""Of many stages, those that layers and replicas are moved from and to."""
_FIRST_SHARE = 16
"""Part of the effort that is spent at once on the first candidate of a family."""
_MOST_IDLE = 12
"""Offers that a sketch builds in vain, one after another, before it has seen enough."""

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
        budget: effort to simulate; when it is spent, what is left is only counted.
        climbing_budget: effort to move layers and replicas of the winner, and as much for those of
            others.
        is_sketch: whether a bound will do where a simulation would spend more than the budget, and
            nothing is looked at beside what promises most.
        skipped: the candidates that were not simulated because of the budget.
        patience: when it is over, what is there has to do.
        bound: seconds that no plan undercuts, once the race runs.
        failure: why the last order that was searched in vain was not found.
        num_too_large: how many offers were not built, for lack of memory.
        num_missed: how many offers were built of which nothing did.
        is_complete: whether the race came to its end.
        end: when it was stopped otherwise, in words, if its time was over.
    """

    budget: int = 250_000
    climbing_budget: int = 250_000
    is_sketch: bool = False
    skipped: list[Candidate] = field(default_factory=list)
    patience: PlanningPatience = field(default_factory=PlanningPatience)
    bound: float = 0.0
    least: float = inf
    contenders: list[Candidate] = field(default_factory=list)
    refusals: dict[int, InputError | PlanError] = field(default_factory=dict)
    num_stages: set[int] = field(default_factory=set)
    failure: InputError | None = None
    num_too_large: int = 0
    num_missed: int = 0
    is_complete: bool = True
    end: str = ""
    _reaches: Reaches = field(default_factory=Reaches)
    _families: set[str] = field(default_factory=set)
    _looked_at: dict[int, Offer] = field(default_factory=dict)

    def run(self, tasks: Sequence[Task], constraints: Constraints) -> None:
        """Let everything compete that constraints allow for one of some tasks. Bounds come before
        simulations: first of offers, then of their cuts."""
        self.bound = min(map(least_busy_seconds, tasks), default=0.0)
        for kind in (offers, guided):
            promises = by_promise(tasks, constraints, kind)
            if not constraints.any_replicas and kind is offers and promises:
                self.bound = min(offer.least_seconds(task) for _, task, offer in promises)
            self._run(uniform(promises), constraints, only=_MOST_UNIFORM)
            self._run(promises, constraints)
            if self._is_stopped or all(self._is_enough(least_busy_seconds(task)) for task in tasks):
                break
        if self.is_sketch and self.skipped:
            return
        if not constraints.cuts:
            self._refine()
        self._climb(constraints)
        if not all(contender.setting.is_final for contender in self.contenders):
            self._settle_orders()
            self._climb(constraints)

    def _run(
        self, promises: Sequence[Promise], constraints: Constraints, only: int | None = None
    ) -> None:
        """Let some offers compete, the most promising first; of those that fit, ``only`` so many,
        if that is said."""
        waiting: list[tuple[float, int, Candidate]] = []
        numbers = count()  # candidates themselves have no order
        idle, lowest = 0, self.least
        for promised, task, offer in promises:
            # Who cannot be slower than what the next offers promise runs first.
            while waiting and waiting[0][0] <= promised:
                self._enter(heappop(waiting)[-1])
            if self._is_enough(promised) or (self.is_sketch and idle > _MOST_IDLE):
                break
            if self._is_stopped:
                return
            if self._is_passed_over(promised, task, offer, constraints):
                continue
            least = min(self._least_of(waiting), self.least)
            built = self.built(task, offer, constraints)
            self._reaches.note(task, offer, promised, built, self.least)
            for candidate in built:
                is_best = candidate.least_seconds < min(self._least_of(waiting), lowest)
                if is_best or candidate.effort <= _LITTLE or self._is_first(candidate):
                    lowest = min(candidate.least_seconds, lowest)
                    self._enter(candidate)  # which may spare building others
                else:
                    heappush(waiting, (candidate.least_seconds, next(numbers), candidate))
                    candidate.forget()
            self._cut_everywhere(task, offer, constraints)
            better = min(self._least_of(waiting), self.least) < least
            idle = 0 if better else idle + 1
            only = only and only - bool(built)
            if only == 0:
                break
        while waiting:
            self._enter(heappop(waiting)[-1])

    def _is_passed_over(
        self, promised: float, task: Task, offer: Offer, constraints: Constraints
    ) -> bool:
        """Whether an offer need not be built."""
        if id(offer) in self._looked_at or (
            self.is_sketch and not offer.may_be_one_of(constraints)
        ):
            return True
        self._looked_at[id(offer)] = offer
        if lacks_room(task, offer.devices, offer.copies):
            self.num_too_large += 1
            return True
        return self._reaches.least_seconds(task, offer, promised) > self.least * (1 + SAME)

    def _is_first(self, candidate: Candidate) -> bool:
        """Whether a candidate is the first of its family that is not simulated at once anyway: what
        one takes says which others need not be built."""
        family, is_light = candidate.setting.family, candidate.effort < self.budget / _FIRST_SHARE
        is_first = is_light and family not in self._families and not self.is_sketch
        if is_first:
            self._families.add(family)
        return is_first

    def _least_of(self, waiting: Sequence[tuple[float, int, Candidate]]) -> float:
        return waiting[0][0] if waiting else inf

    @property
    def _is_stopped(self) -> bool:
        """Whether there is something, and no time for anything else."""
        has_answer = bool(self.contenders or (self.is_sketch and self.skipped))
        return has_answer and self.patience.is_over

    def _is_enough(self, promised: float) -> bool:
        """Whether nothing that promises so little need be looked at."""
        if promised > self.least * (1 + SAME):
            return True
        # The most promising one that would have to be simulated may be what is told of its kind.
        best = self.most_promising if self.is_sketch else None
        return best is not None and best.least_seconds <= promised * (1 + SAME)

    @property
    def most_promising(self) -> Candidate | None:
        """Of the candidates that were not simulated, that which takes least at least."""
        return min(self.skipped, key=lambda candidate: candidate.least_seconds, default=None)

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
        settled: list[Candidate] = []
        try:
            settled.append(candidate.with_final_order())
        except InputError as error:
            self.failure = error
        others = [contender for contender in self.contenders if contender is not candidate]
        self.contenders = [*others, *settled]
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
        """Move layers and replicas of the winner from stage to stage, and unlike devices, as long
        as that helps; and of what came close, if it is of another kind."""
        # As far as where nothing else had been asked for: whoever pins the winner finds nothing
        # better.
        self.budget = max(self.budget, self.climbing_budget)
        self._climb_from(self.winner, constraints)
        if not self.is_sketch:
            for candidate in _most_different(self._close())[:_MOST_CLIMBED]:
                few = candidate.setting.num_stages <= FEW_STAGES
                if few and candidate is not self.winner:
                    self._climb_from(candidate, constraints)

    def _climb_from(self, best: Candidate | None, constraints: Constraints) -> None:
        for _ in range(_MOST_MOVES):
            too_many = best is None or best.setting.num_stages > _MANY_STAGES
            if best is None or self._is_stopped or (self.is_sketch and too_many):
                return
            before = len(self.contenders)
            for candidate in self._moved(best, constraints):
                self._enter(candidate)
            tried = self.contenders[before:]
            nearest = min(tried, key=lambda candidate: candidate.seconds, default=best)
            if nearest.seconds >= best.seconds * (1 - SAME):
                return
            best = self.winner if nearest.seconds <= self.least else nearest

    def _moved(self, best: Candidate, constraints: Constraints) -> Iterator[Candidate]:
        """What differs from a candidate by one move; where it has many stages, by one that spares
        those that have most to do."""
        task, setting = best.task, best.setting
        work = [
            stage.busy_seconds / replicas
            for stage, replicas in zip(best.stages, setting.all_replicas, strict=True)
        ]
        idlest_first = sorted(range(setting.num_stages), key=work.__getitem__)
        most = setting.num_stages if setting.num_stages <= FEW_STAGES else _BUSIEST
        idlest, busiest = idlest_first[:most], idlest_first[-most:]
        if not constraints.cuts:
            yield from refined(best)
            yield from with_layers_moved(best, busiest)
        moves = [pair for pair in product(idlest, busiest) if pair[0] != pair[1]]
        for offer in neighbours(task, setting, moves):
            is_asked = not constraints.replicas or offer.replicas == constraints.replicas
            if is_asked and offer.least_seconds(task) <= self.least * (1 + SAME):
                yield from self.built(task, offer, constraints)

    def built(self, task: Task, offer: Offer, constraints: Constraints) -> list[Candidate]:
        """The candidates of an offer, if it has as many stages as the constraints allow."""
        if self._is_barred(task, offer, constraints):
            return []
        key = (offer, constraints.cuts)
        outcome: Built | None = task.cache.offers.get(key)
        if outcome is None:
            outcome = self._built(task, offer, constraints.cuts)
            # What takes too long for this race may be good for another one.
            if self._most_seconds == inf or not isinstance(outcome, tuple) or outcome[1]:
                task.cache.offers[key] = outcome
        if not isinstance(outcome, tuple):
            self.refusals[len(offer.devices)] = outcome
            return []
        num_stages, candidates_ = outcome
        self.num_stages.add(num_stages)
        self.num_missed += not candidates_
        return candidates_ if constraints.allows(num_stages) else []

    def _is_barred(self, task: Task, offer: Offer, constraints: Constraints) -> bool:
        """Whether the engine that the plan is for cannot run an offer."""
        obstacle = constraints.obstacle(
            offer.family, offer.replicas, task.num_microbatches, len(offer.devices)
        )
        if obstacle is not None:
            self.refusals[len(offer.devices)] = obstacle
        return obstacle is not None

    def _cut_everywhere(self, task: Task, offer: Offer, constraints: Constraints) -> None:
        """Let all ways to cut the model compete that may be faster than the best, where there are
        few."""
        if self.is_sketch or constraints.cuts or self._is_barred(task, offer, constraints):
            return
        if not has_few_cuts(task, num_stages=1):  # into more stages there are more ways
            return
        try:
            setting = offer.setting(task)
        except (InputError, PlanError):
            return  # ``built`` has noted why
        if not constraints.allows(setting.num_stages) or not has_few_cuts(task, setting.num_stages):
            return
        for seconds, cuts in ways_to_cut(task, setting):
            if seconds > self.least * (1 + SAME):
                break
            for candidate in recomputing(task, setting, cuts, most=_MOST_RECOMPUTED):
                self._enter(candidate)

    def _built(self, task: Task, offer: Offer, cuts: tuple[int, ...]) -> Built:
        try:
            setting = offer.setting(task)
        except (InputError, PlanError) as error:
            return error
        if cuts:
            given = len(cuts) == setting.num_stages + 1
            cut = [with_cuts(task, setting, cuts)] if given else []
            return setting.num_stages, [candidate for candidate in cut if candidate.fits]
        return setting.num_stages, candidates(task, setting, most_seconds=self._most_seconds)

    @property
    def _most_seconds(self) -> float:
        """That candidates may take at least; whoever has to be simulated in vain beside a sketch's
        most promising one is not told."""
        best = self.most_promising if self.is_sketch else None
        return min(self.least, inf if best is None else best.least_seconds) * (1 + SAME)

    def _enter(self, candidate: Candidate) -> None:
        """Simulate a candidate, unless its bound says that it is slower than the best."""
        if self._is_stopped:
            self.skipped.append(candidate)
        elif candidate.least_seconds <= self.least * (1 + SAME):
            if self.budget < candidate.effort and (self.contenders or self.is_sketch):
                self.skipped.append(candidate)
                return
            self.budget -= candidate.effort
            seconds = candidate.seconds  # before it is known: this may be interrupted
            self.contenders.append(candidate)
            if seconds < self.least:
                self.least = seconds
                if not self.is_sketch:
                    self.patience.note(seconds, self.bound)

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


def _most_different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """One of each setting, the best first: first one of each kind, then a second one of each, on
    other devices, and so on."""
    kinds: dict[object, dict[object, Candidate]] = {}
    for candidate in candidates:
        kinds.setdefault(_kind_of(candidate), {}).setdefault(candidate.setting, candidate)
    turns = zip_longest(*(own.values() for own in kinds.values()))
    return [candidate for turn in turns for candidate in turn if candidate is not None]


def _kind_of(candidate: Candidate) -> tuple[object, ...]:
    """All that is the same of a candidate whatever its layers and devices."""
    setting = candidate.setting
    return (
        setting.family,
        setting.options,
        setting.versions,
        setting.all_replicas,
        candidate.way.reducer,
    )


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


def fastest(
    tasks: Sequence[Task], constraints: Constraints, budget: int = 250_000
) -> Candidate | None:
    """The winner of a race; ``None`` if nothing fits.

    Args:
        budget: effort to simulate.
    """
    race = Race(budget=budget, climbing_budget=budget)
    race.run([task for task in tasks if least_excess(task) <= 0], constraints)
    return race.winner


def sketched(
    tasks: Sequence[Task], constraints: Constraints, budget: int, patience: PlanningPatience
) -> Race:
    """A race that says of what would take long to simulate only what that takes at least.

    Args:
        budget: effort to simulate.
        patience: how long it may take, once there is something.
    """
    race = Race(budget=budget, climbing_budget=0, is_sketch=True, patience=patience)
    race.run([task for task in tasks if least_excess(task) <= 0], constraints)
    return race
