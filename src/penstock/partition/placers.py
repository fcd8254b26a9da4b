"""Placers that do not learn: all placements, random ones, and hill climbing.

They are what a learned placer has to beat with the same number of scores, so that all of them share
one ledger. On a chain none can be better than ``balance``, which is exact for the slowest stage.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from penstock.errors import InputError, PlanError
from penstock.graph import LayerGraph
from penstock.partition.chain import balance
from penstock.partition.placement_space import Score, Space, Stages, make_space

_PATIENCE = 50
"""Draws per score of the budget, after which a placer gives up finding anything new."""


@dataclass(frozen=True)
class Placement:
    """The best that a placer found.

    Attributes:
        stages: names of layers, stage by stage, in the order in which devices hand data on.
        seconds: its score.
        history: the best score so far, after each one.
        num_draws: placements drawn, valid or not, new or not.
        num_invalid: of them, those that were no pipeline.
    """

    stages: Stages
    seconds: float
    history: tuple[float, ...]
    num_draws: int
    num_invalid: int

    @property
    def num_scores(self) -> int:
        """How often the score was asked for."""
        return len(self.history)


@dataclass
class Ledger:
    """Scores within a budget, and remembers them: a placement is paid for once.

    Attributes:
        score: what is made small.
        budget: how often it may be asked.
    """

    score: Score
    budget: int
    known: dict[Stages, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    best: Stages = ()
    num_draws: int = 0
    num_invalid: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be asked, or it has long been of no use."""
        spent = len(self.history) >= self.budget
        return spent or self.num_draws >= _PATIENCE * self.budget

    @property
    def num_stale(self) -> int:
        """Draws of placements that were known."""
        return self.num_draws - self.num_invalid - len(self.history)

    def ask(self, stages: Stages) -> float | None:
        """The score of a placement; ``None`` if it is new and the budget is spent."""
        self.num_draws += 1
        if stages not in self.known:
            if len(self.history) >= self.budget:
                return None
            seconds = self.known[stages] = self.score(stages)
            least = self.history[-1] if self.history else inf
            if seconds < least or not self.best:
                self.best = stages
            self.history.append(min(least, seconds))
        return self.known[stages]

    def refuse(self) -> None:
        """Count a draw that is no pipeline."""
        self.num_draws += 1
        self.num_invalid += 1

    @property
    def placement(self) -> Placement:
        """The best so far.

        Raises:
            PlanError: nothing valid was drawn.
        """
        if not self.best:
            raise PlanError(
                f"none of {self.num_draws} placements drawn was a pipeline; raise num_samples"
            )
        return Placement(
            self.best,
            self.known[self.best],
            tuple(self.history),
            self.num_draws,
            self.num_invalid,
        )


def check_samples(num_samples: int) -> None:
    """Raise ``InputError`` unless it is a budget."""
    if num_samples < 1:
        raise InputError(f"num_samples is {num_samples}, but must be ≥ 1")


def brute_force_placement(
    graph: LayerGraph,
    num_devices: int,
    score: Score,
    *,
    max_groups: int = 40,
    tiny: float = 0.005,
    limit: int = 200_000,
) -> Placement:
    """Score every placement of the groups.

    Args:
        graph: the profile.
        num_devices: at most so many stages.
        score: seconds of a step; less is better.
        max_groups: layers are put together until there are no more.
        tiny: and until no group has less than this share of the compute.
        limit: the most placements to score.

    Returns:
        The best there is; of equals, the first in an order that does not change.

    Raises:
        InputError: a count below 1.
        PlanError: fewer layers than devices, or more than ``limit`` placements.
    """
    space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
    ledger = Ledger(score, limit)
    for labels in space.labellings():
        if ledger.ask(space.stages_of(labels, range(max(labels) + 1))) is None:
            raise PlanError(
                f"{len(space.groups)} groups on {num_devices} devices have more than {limit:,} "
                "placements; ask for fewer groups or raise limit"
            )
    return ledger.placement


def random_placement(
    graph: LayerGraph,
    num_devices: int,
    score: Score,
    *,
    num_samples: int = 400,
    seed: int = 0,
    max_groups: int = 40,
    tiny: float = 0.005,
) -> Placement:
    """The best of random placements: a random topological order of the groups, cut at random.

    Every one of them is a pipeline, which makes this a better rival than random devices would be.

    Args:
        graph: the profile.
        num_devices: at most so many stages; each number of stages is as likely as another.
        score: seconds of a step; less is better.
        num_samples: how many different placements to score.
        seed: of the draws.
        max_groups: layers are put together until there are no more.
        tiny: and until no group has less than this share of the compute.

    Raises:
        InputError: a count below 1.
        PlanError: fewer layers than devices.
    """
    check_samples(num_samples)
    space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
    ledger, draws = Ledger(score, num_samples), random.Random(seed)
    while not ledger.is_spent:
        labels = random_labels(space, draws)
        ledger.ask(space.stages_of(labels, range(max(labels) + 1)))
    return ledger.placement


def random_labels(space: Space, draws: random.Random) -> tuple[int, ...]:
    """The stage of each group in a random order with random cuts."""
    num_stages = draws.randint(1, space.num_devices)
    order = _random_order(space, draws)
    inner = sorted(draws.sample(range(1, len(order)), num_stages - 1))
    return _labels((0, *inner, len(order)), order)


def _labels(cuts: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    labels = [0] * len(order)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        for group in order[start:stop]:
            labels[group] = stage
    return tuple(labels)


def _random_order(space: Space, draws: random.Random) -> list[int]:
    waits = [len(producers) for producers in space.producers]
    ready = [group for group, count in enumerate(waits) if not count]
    order = []
    while ready:
        group = ready.pop(draws.randrange(len(ready)))
        order.append(group)
        for source, reader in space.edges:
            if source == group:
                waits[reader] -= 1
                if not waits[reader]:
                    ready.append(reader)
    return order


def greedy_placement(
    graph: LayerGraph,
    num_devices: int,
    score: Score,
    *,
    num_samples: int = 400,
    seed: int = 0,
    max_groups: int = 40,
    tiny: float = 0.005,
) -> Placement:
    """Hill climbing: move one group to another stage as long as the step gets shorter.

    It begins with the most even cuts of the execution order, and with a random order, evenly cut,
    whenever no move helps.

    Args:
        graph: the profile.
        num_devices: at most so many stages.
        score: seconds of a step; less is better.
        num_samples: how many different placements to score.
        seed: of the order of moves and the new beginnings.
        max_groups: layers are put together until there are no more.
        tiny: and until no group has less than this share of the compute.

    Raises:
        InputError: a count below 1.
        PlanError: fewer layers than devices.
    """
    check_samples(num_samples)
    space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
    ledger, draws = Ledger(score, num_samples), random.Random(seed)
    order: Sequence[int] = range(len(space.groups))
    while not ledger.is_spent:
        even = balance([space.seconds[group] for group in order], num_devices)
        _climb(space, ledger, draws, _labels(even, order))
        order = _random_order(space, draws)
    return ledger.placement


def _climb(space: Space, ledger: Ledger, draws: random.Random, labels: tuple[int, ...]) -> None:
    def score_of(candidate: Sequence[int]) -> float | None:
        return ledger.ask(space.stages_of(candidate, range(space.num_devices)))

    here = score_of(labels)
    while here is not None and not ledger.is_spent:
        for moved in _moves(space, labels, draws):
            seconds = score_of(moved)
            if seconds is None:
                return
            if seconds < here:
                labels, here = moved, seconds
                break
        else:
            return


def _moves(
    space: Space, labels: tuple[int, ...], draws: random.Random
) -> Iterator[tuple[int, ...]]:
    """Every labelling that differs in one group, in random order, no stage empty."""
    changes = [(group, to) for group in range(len(labels)) for to in range(space.num_devices)]
    draws.shuffle(changes)
    for group, to in changes:
        moved = (*labels[:group], to, *labels[group + 1 :])
        if to != labels[group] and _is_pipeline(space, moved) and labels[group] in moved:
            yield moved


def _is_pipeline(space: Space, labels: Sequence[int]) -> bool:
    return all(labels[source] <= labels[reader] for source, reader in space.edges)
