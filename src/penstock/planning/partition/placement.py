"""Placers of branching graphs: REINFORCE over groups of layers, and hill climbing beside it.

The idea of device placement by reinforcement learning (Mirhoseini et al., "Device Placement
Optimization with Reinforcement Learning", ICML 2017, arXiv 1706.04972, and ColocRL after it): tiny
operations are put together first, a policy draws a device for every group, and the reward is
−√(step time), which keeps bad placements from drowning the differences between good ones.
Placements that are no pipeline are punished instead of scored (``placement_space``).

The policy is a table, not a network: one softmax over devices per group. It is learned for one
graph and thrown away. Hill climbing moves one group at a time, does not learn, and did as well. On
a chain ``balance`` is optimal and takes milliseconds; see docs/learned-placement.md for when a
placer helps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from penstock.planning.partition.chain import Floats, Ints, balance
from penstock.planning.partition.placement_space import (
    Ledger,
    Placed,
    Placer,
    Score,
    Space,
    Stages,
    make_space,
    stage_costs,
)

__all__ = [
    "Placed",
    "Placer",
    "Score",
    "Stages",
    "greedy_placement",
    "learned_placement",
    "make_space",
    "stage_costs",
]


def labels_of(cuts: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The stage of each group where an order of the groups is cut at these places."""
    labels = [0] * len(order)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        for group in order[start:stop]:
            labels[group] = stage
    return tuple(labels)


def random_order(space: Space, draws: random.Random) -> list[int]:
    """The groups in a random topological order."""
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


def _climb_again(space: Space, ledger: Ledger, seed: int) -> None:
    draws = random.Random(seed)
    order: Sequence[int] = range(len(space.groups))
    while not ledger.is_spent:
        even = balance([space.seconds[group] for group in order], space.num_devices)
        _climb(space, ledger, draws, labels_of(even, order))
        order = random_order(space, draws)


greedy_placement = Placer(_climb_again)
"""Hill climbing: move one group to another stage as long as the step gets shorter.

It begins with the most even cuts of the execution order, and with a random order, evenly cut,
whenever no move helps. The seed is of the order of moves and the new beginnings.
"""


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


_BATCH = 10
_RATE = 0.1
_ENTROPY = 0.002
_KEEP = 0.9
_SHARPNESS = 6.0
_FLATTER = 0.9


def _learn(space: Space, ledger: Ledger, seed: int) -> None:
    policy = _DevicePolicy.of(space, seed)
    list(_rewards(space, ledger, policy.favourite))  # even cuts of the execution order: a pipeline
    while not ledger.is_spent:
        drawn, before = policy.draw(), ledger.num_stale
        rewards = list(_rewards(space, ledger, drawn))
        policy.learn(drawn[: len(rewards)], rewards)
        if ledger.num_stale - before > _BATCH / 2:
            policy.loosen()


learned_placement = Placer(_learn)
"""The best placement that a policy saw while it learned.

The policy begins with a preference for devices in the order of execution, since of devices drawn
evenly almost none would be a pipeline. Batches of ten are drawn; the baseline is a moving average
of their rewards. An entropy bonus keeps the policy drawing, and a batch of mostly known placements
flattens it, so that the budget is spent on more than one idea.
"""


def _rewards(space: Space, ledger: Ledger, drawn: Ints) -> Iterator[float]:
    """−√(seconds / the first seconds seen) of each; ends early where the budget does."""
    worst = 1.0
    for devices in drawn.tolist():
        order = space.order_of(devices)
        if order is None:
            ledger.refuse()
            yield -sqrt(worst) * (1 + space.backward_share(devices))
            continue
        seconds = ledger.ask(space.stages_of(devices, order))
        if seconds is None:
            return
        unit = next(iter(ledger.known.values())) or 1.0
        worst = max(worst, seconds / unit)
        yield -sqrt(seconds / unit)


@dataclass
class _DevicePolicy:
    """A softmax over devices for each group, and what learning it needs."""

    logits: Floats
    generator: Any
    first_moment: Floats
    second_moment: Floats
    baseline: float | None = None
    num_updates: int = 0

    @classmethod
    def of(cls, space: Space, seed: int) -> _DevicePolicy:
        seconds = np.asarray(space.seconds)
        middle = (np.cumsum(seconds) - seconds / 2) / (seconds.sum() or 1.0)
        device = np.arange(space.num_devices) + 0.5
        away = np.abs(middle[:, None] * space.num_devices - device)
        zeros = np.zeros_like(away)
        return cls(-_SHARPNESS * away, np.random.default_rng(seed), zeros, zeros.copy())

    @property
    def chances(self) -> Floats:
        """The chance of each device, for each group."""
        raised = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        chances: Floats = raised / raised.sum(axis=1, keepdims=True)
        return chances

    def draw(self) -> Ints:
        """A batch of placements: a device for each group."""
        borders = np.cumsum(self.chances, axis=1)[None, :, :-1]
        dice = self.generator.random((_BATCH, len(self.logits), 1))
        drawn: Ints = (dice > borders).sum(axis=2)
        return drawn

    @property
    def favourite(self) -> Ints:
        """The likeliest placement, as a batch of one."""
        likeliest: Ints = self.logits.argmax(axis=1)[None]
        return likeliest

    def learn(self, drawn: Ints, rewards: Sequence[float]) -> None:
        """One step of Adam (arXiv 1412.6980) along an estimated gradient of the reward."""
        if not rewards:
            return
        mean = sum(rewards) / len(rewards)
        self.baseline = mean if self.baseline is None else self.baseline
        gains = np.asarray(rewards) - self.baseline
        self.baseline = _KEEP * self.baseline + (1 - _KEEP) * mean
        chances = self.chances
        chosen = np.eye(chances.shape[1])[drawn]
        gradient = (gains[:, None, None] * (chosen - chances)).mean(axis=0)
        information = np.log(chances + 1e-12)
        surprise = (chances * information).sum(axis=1, keepdims=True)
        gradient -= _ENTROPY * chances * (information - surprise)
        self._climb(gradient)

    def loosen(self) -> None:
        """Make up its mind a little less."""
        self.logits = _FLATTER * self.logits

    def _climb(self, gradient: Floats) -> None:
        self.num_updates += 1
        self.first_moment = 0.9 * self.first_moment + 0.1 * gradient
        self.second_moment = 0.99 * self.second_moment + 0.01 * gradient**2
        first = self.first_moment / (1 - 0.9**self.num_updates)
        second = self.second_moment / (1 - 0.99**self.num_updates)
        self.logits = self.logits + _RATE * first / (np.sqrt(second) + 1e-8)
