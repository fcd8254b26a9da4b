"""What offers promise: the order in which a race looks at them, and how near they come to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.guesses import guessed_seconds
from penstock.planning.planner.limits import lacks_room
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.request import Constraints
from penstock.planning.planner.task import Task

FEW_STAGES = 8
"""Of a plan whose neighbours are all looked at."""

_DEEP = 32
"""Layers, of which many make a stage of a rank that has several."""
_LARGE, _MOST_BUILT = 5_000, 200
"""Layers times devices beyond which there are thousands of offers, and how many are built then."""
_DOUBT = 0.02
"""Relative: by how much a guess may be too high."""
_MOST_SEEN = 3
"""Offers of a family that tell by how much guesses are too low for it."""

Promise = tuple[float, Task, Offer]
"""The least that an offer for a task can take, in seconds; where there are thousands of offers,
what it is guessed to take."""


def by_promise(
    tasks: Sequence[Task],
    constraints: Constraints,
    *kinds: Callable[[Task, Constraints], list[Offer]],
) -> list[Promise]:
    """All offers of some kinds, the most promising first; of equals, those of few stages, which are
    quickly built."""
    every = [(task, offer) for task in tasks for kind in kinds for offer in kind(task, constraints)]
    if len(every) <= _MOST_BUILT or not all(map(_is_large, tasks)):
        return sorted(
            ((offer.least_seconds(task), task, offer) for task, offer in every), key=_place
        )
    guessed = sorted(((guessed_seconds(*pair), *pair) for pair in every), key=_place)
    uniform = (guess for guess in guessed[_MOST_BUILT:] if _is_uniform(guess[-1]))
    likely = (
        (max(offer.least_seconds(task), _least_guessed(offer, seconds)), task, offer)
        for seconds, task, offer in (*guessed[:_MOST_BUILT], *uniform)
    )
    return sorted(likely, key=_place)


def _least_guessed(offer: Offer, seconds: float) -> float:
    """What an offer may take at least that is guessed to take so long; of unlike stages, which a
    guess takes for even ones, nothing is known."""
    return seconds / (1 + _DOUBT) if len({*offer.copies}) <= 1 else 0.0


def _is_large(task: Task) -> bool:
    return task.num_layers * len(task.cluster.devices) > _LARGE


def uniform(promises: Sequence[Promise]) -> list[Promise]:
    """Those of equal pipelines side by side, which are quickly judged: those of a few stages, or
    where these lack memory, of as few as can be."""
    alike = [
        (seconds, task, offer)
        for seconds, task, offer in promises
        if _is_uniform(offer) and not lacks_room(task, offer.devices, offer.copies)
    ]
    few = [promise for promise in alike if len(promise[2].replicas) <= FEW_STAGES]
    return few or sorted(alike, key=lambda promise: len(promise[2].replicas))


def _is_uniform(offer: Offer) -> bool:
    """Whether an offer is the usual pipeline, side by side with others like it."""
    return offer.is_in_turn and len({*offer.replicas}) == 1


def _place(promise: Promise) -> tuple[float, int]:
    seconds, _, offer = promise
    # Sums of the same seconds in another order differ in their last digits.
    return float(f"{seconds:.9g}"), len(offer.replicas) or 2 * offer.num_ranks


class Reaches:
    """How near the offers that were built came to what they had promised."""

    def __init__(self) -> None:
        self._reached: dict[object, tuple[float, float]] = {}
        self._slower: dict[object, list[float]] = {}

    def least_seconds(self, task: Task, offer: Offer, promised: float) -> float:
        """What an offer takes if it comes no nearer to its promise than the same schedule of a deep
        model did with more ranks, of which each had a part as small; and no nearer to a guess than
        others of its family did."""
        if len({*offer.replicas}) > 1:
            return 0.0  # these come nearer than any others: each stage has its own share of ranks
        reached, promise = self._reached.get(_alike(task, offer), (0.0, 1.0))
        slower = self._slower.get((id(task), offer.family), [])
        seconds = reached * promised / promise
        if len(slower) >= _MOST_SEEN:
            seconds = max(seconds, min(slower) * guessed_seconds(task, offer))
        return seconds

    def note(
        self, task: Task, offer: Offer, promised: float, built: Sequence[Candidate], least: float
    ) -> None:
        """Note what came of an offer.

        Args:
            least: seconds of the fastest of all so far.
        """
        if task.num_layers > _DEEP and not offer.is_in_turn:
            seconds = min((candidate.least_seconds for candidate in built), default=least)
            self._reached[_alike(task, offer)] = seconds, promised
        if built and _is_large(task) and len({*offer.replicas}) <= 1:
            guess = guessed_seconds(task, offer)
            if 0 < guess < inf:
                factor = min(own.least_seconds for own in built) / guess
                self._slower.setdefault((id(task), offer.family), []).append(factor)


def _alike(task: Task, offer: Offer) -> tuple[object, ...]:
    """What offers have in common that may differ in their number of ranks only."""
    return id(task), offer.family, offer.options, offer.replicas[:1]
