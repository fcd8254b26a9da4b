"""Rounds in which every kind of pass has its turn, and each layer's times from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.training.profiler.alone.conditions import Clock
from penstock.training.profiler.alone.passes import (
    LayerSeconds,
    Passes,
    RunLayer,
    SplitPass,
    WholePass,
    in_one,
)

WARM_UP = 1
"""Rounds that are forgotten; in each, layers run at least six times."""

LONG_SECONDS = 0.2
"""Of a microbatch that takes longer through all layers, less is run."""

_LEAST_ROUNDS = 2
_ROUND_SECONDS = 1.0

_CALIBRATION_LAYERS = 8
_CALIBRATION_ROUNDS = 12
_MANY = 5
_LEAST_SHARE = 0.1
"""The least share of a measured time that is the layer's own: overheads are not exact either."""


class LayerTimes(NamedTuple):
    """Seconds of one layer for one microbatch, without what measuring takes.

    Attributes:
        forward: with autograd recording.
        backward: whole; 0 if no gradient comes to it.
        backward_input: of that, what a split backward does at first.
        split_forward: what the forward that prepares for a split backward takes longer.
        split: what the two halves of a split backward take longer.
        recompute: a second forward.
        spread: half the distance between the quartiles of forward plus backward, over the median.
    """

    forward: float
    backward: float
    backward_input: float
    split_forward: float
    split: float
    recompute: float
    spread: float


@dataclass
class PassTimes:
    """Seconds of passes; each list has one entry per round.

    Attributes:
        whole: forwards and whole backwards of each layer.
        split: forwards and halves of backwards of each layer.
        again: second forwards of each layer; empty where they are taken to be the first ones.
        uncut: forwards and whole backwards of all layers as one; empty where the sums of the layers
            stand for them.
        num_leaves: for each layer, the tensors of its input of which it gives gradients.
        interrupted: whether somebody has ended the rounds.
    """

    whole: list[WholePass] = field(default_factory=list)
    split: list[SplitPass] = field(default_factory=list)
    again: list[LayerSeconds] = field(default_factory=list)
    uncut: list[WholePass] = field(default_factory=list)
    num_leaves: list[int] = field(default_factory=list)
    interrupted: bool = False

    @property
    def num_rounds(self) -> int:
        """How many are complete."""
        return min(len(self.whole), len(self.split))

    @property
    def are_long(self) -> bool:
        """Whether a microbatch takes long, not only once."""
        passes: list[Sequence[LayerSeconds]] = [*self.whole, *self.split]
        return min(sum(map(sum, times)) for times in passes) > LONG_SECONDS


def measure_rounds(
    runs: Sequence[RunLayer],
    inputs: Any,
    clock: Clock,
    repeats: int,
    undeferred: frozenset[int] = frozenset(),
    tell: Callable[[], None] | None = None,
) -> PassTimes:
    """Let every kind of pass take turns, so that a noisy machine is noisy for all of them.

    Each ends with a backward, so that the next one's forward finds the caches as in training.

    Where a microbatch takes longer than ``LONG_SECONDS``, what caches hold and what cuts cost is
    nothing beside it. Then nothing is forgotten (``footprint`` has run the layers before), a second
    forward is taken to be as long as the first, and layers are not timed as one. Rounds end, too,
    when they take longer than a second for each that there should be, and when somebody interrupts
    them.

    Args:
        inputs: one microbatch.
        repeats: rounds that count.
        undeferred: ids of the parameters whose gradients are never deferred.
        tell: called after each round.
    """
    passes = Passes(runs, inputs, clock, undeferred)
    uncut = Passes([in_one(runs)], inputs, clock, undeferred)
    begun = time.perf_counter()
    rounds = PassTimes([passes.whole()], [passes.split()])
    are_long = rounds.are_long
    if not are_long:
        uncut.whole()
        passes.again()
        begun, rounds = time.perf_counter(), PassTimes()
    try:
        while True:
            if tell is not None:
                tell()
            if _are_enough(rounds.num_rounds, repeats, time.perf_counter() - begun):
                break
            rounds.whole.append(passes.whole())
            if not are_long:
                rounds.uncut.append(uncut.whole())
            rounds.split.append(passes.split())
            if not are_long:
                rounds.again.append(passes.again())
    except KeyboardInterrupt:
        if not rounds.num_rounds:
            raise
        rounds.interrupted = True
    rounds.num_leaves = passes.num_leaves
    return rounds


def _are_enough(num_rounds: int, repeats: int, spent_seconds: float) -> bool:
    """Whether there are as many rounds as there should be, or as there is time for."""
    if num_rounds >= repeats or num_rounds < _LEAST_ROUNDS:
        return num_rounds >= repeats
    return spent_seconds * (num_rounds + 1) / num_rounds > repeats * _ROUND_SECONDS


class Overhead(NamedTuple):
    """Seconds that measuring adds to a pass of a layer.

    Attributes:
        base: in any case.
        per_leaf: for every tensor at which the graph is cut.
    """

    base: float
    per_leaf: float = 0.0

    def of(self, num_leaves: int) -> float:
        """The seconds for a layer that gives gradients of ``num_leaves`` input tensors."""
        return self.base + num_leaves * self.per_leaf


class Overheads(NamedTuple):
    """The seconds that measuring adds to a layer's forward, backward, and halves of a backward."""

    forward: Overhead
    backward: Overhead
    backward_input: Overhead
    backward_weight: Overhead


def measure_overheads(clock: Clock, device: torch.device) -> Overheads:
    """Measure layers that do nothing, with one tensor and with several between them."""
    single, several = (_idle(clock, device, count) for count in (1, _MANY))
    cuts = [max(0.0, b - a) / (_MANY - 1) for a, b in zip(single, several, strict=True)]
    whole, inputs = (Overhead(max(0.0, single[kind] - cuts[kind]), cuts[kind]) for kind in (1, 2))
    return Overheads(Overhead(single[0]), whole, inputs, Overhead(single[3]))


def _idle(clock: Clock, device: torch.device, num_leaves: int) -> list[float]:
    value = [torch.zeros(16, 16, device=device) for _ in range(num_leaves)]
    # What wants no gradient is not cut, so what the first layer gives wants some.
    wanting: RunLayer = lambda value: [leaf.detach().requires_grad_() for leaf in value]  # noqa: E731
    runs = [wanting, *([lambda value: value] * (_CALIBRATION_LAYERS - 1))]
    rounds = measure_rounds(runs, value, clock, _CALIBRATION_ROUNDS)
    kinds = (
        (row.forward for row in rounds.whole),
        (row.backward for row in rounds.whole),
        (row.backward_input for row in rounds.split),
        (row.backward_weight for row in rounds.split),
    )
    # To the first layer no gradient comes.
    return [statistics.median(seconds for row in rows for seconds in row[1:]) for rows in kinds]


def times_of(
    rounds: PassTimes, overheads: Overheads, trains: Sequence[bool], tick_seconds: float
) -> list[LayerTimes]:
    """Each layer's share of the model's time.

    Measuring between cuts disturbs caches a little, and the median of a sum is not the sum of
    medians. So layers say how the time divides, and the passes without cuts how much it is.

    Args:
        overheads: what measuring adds; it is taken off.
        trains: whether each layer has parameters that need gradients.
        tick_seconds: the least time of a layer that does anything.
    """

    def net(rows: Iterable[LayerSeconds], overhead: Overhead) -> LayerSeconds:
        medians = map(statistics.median, zip(*rows, strict=True))
        return [
            max(median - overhead.of(count), _LEAST_SHARE * median, tick_seconds) if median else 0.0
            for median, count in zip(medians, rounds.num_leaves, strict=True)
        ]

    forward = net((times.forward for times in rounds.whole), overheads.forward)
    backward = net((times.backward for times in rounds.whole), overheads.backward)
    split = (
        net((times.forward for times in rounds.split), overheads.forward),
        net((times.backward_input for times in rounds.split), overheads.backward_input),
        net((times.backward_weight for times in rounds.split), overheads.backward_weight),
    )
    again = net(rounds.again, overheads.forward) if rounds.again else forward
    spreads = _spreads(rounds.whole)
    uncut_forward = [times.forward[0] - overheads.forward.base for times in rounds.uncut]
    uncut_backward = [times.backward[0] - overheads.backward.base for times in rounds.uncut]
    by_forward = _scale(forward, uncut_forward)
    by_backward = _scale(backward, uncut_backward)
    layer_times = []
    for index, learns in enumerate(trains):
        prepared, inputs, weights = (part[index] for part in split)
        weights = weights if learns else 0.0
        whole = backward[index] * by_backward
        layer_times.append(
            LayerTimes(
                forward=forward[index] * by_forward,
                backward=whole,
                backward_input=min(inputs * by_backward, whole) if learns else whole,
                split_forward=max(prepared - forward[index], 0.0) * by_forward,
                split=max((inputs + weights) * by_backward - whole, 0.0),
                recompute=again[index] * by_forward,
                spread=spreads[index],
            )
        )
    return layer_times


def _scale(shares: LayerSeconds, totals: LayerSeconds) -> float:
    share, total = sum(shares), statistics.median(totals) if totals else 0.0
    return total / share if share > 0 and total > 0 else 1.0


def _spreads(passes: Sequence[WholePass]) -> LayerSeconds:
    sums = [[f + b for f, b in zip(*times, strict=True)] for times in passes]
    return [_spread(column) for column in zip(*sums, strict=True)]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
