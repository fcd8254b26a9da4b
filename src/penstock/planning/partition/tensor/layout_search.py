"""The fastest way to share a model's layers: a dynamic programme over the layouts of its values.

The state behind a layer is the layout of every value that is still to be read. In a chain that is
one value; a residual block has two at once. As long as few values are alive together, all choices
are looked at, however the layers branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.readers import sources_of
from penstock.planning.partition.tensor.layouts import (
    NOTHING,
    GradientLayout,
    Ring,
    Sharing,
    TensorLayout,
    Traffic,
)

_MOST_STATES = 512
"""Chains have 3, transformers and ResNets a few dozen; more are only needed where many values that
are read again much later are alive at once."""


class _Value(NamedTuple):
    """What a layer hands on: its output, or a skip."""

    num_bytes: int
    last: int  # who reads it last; whoever makes it, if nobody does
    trains: bool  # whether its gradient is asked for


class _Live(NamedTuple):
    """A value that is still to be read, and what its readers so far have paid for."""

    value: int
    layout: TensorLayout
    copies: frozenset[TensorLayout] = frozenset()
    gradients: frozenset[GradientLayout] = frozenset()


State = tuple[_Live, ...]


class Step(NamedTuple):
    """What one layer needs of the others.

    Attributes:
        forward, backward: communication, per microbatch.
        copied_bytes: of what the forward's collectives bring.
        state: the layout of all values that are still to be read.
    """

    forward: Traffic
    backward: Traffic
    copied_bytes: float
    state: State


class _Trail(NamedTuple):
    """The choices so far, the last one first."""

    sharing: Sharing
    before: _Trail | None


class Solution(NamedTuple):
    """A choice for every layer.

    Attributes:
        sharings: in execution order.
        seconds: what a minibatch takes.
        exact: whether nothing that is allowed is faster.
    """

    sharings: tuple[Sharing, ...]
    seconds: float
    exact: bool


class LayoutProblem:
    """The choice of layouts for one model on one group of devices."""

    def __init__(self, graph: LayerGraph, ring: Ring, num_microbatches: int) -> None:
        self.graph = graph
        self.ring = ring
        self.num_microbatches = num_microbatches
        self._values: list[_Value] = []
        self._made_by: list[list[int]] = [[] for _ in graph.layers]
        self._read_by: list[set[int]] = [set() for _ in graph.layers]
        self._collect_values()

    def _collect_values(self) -> None:
        layers = self.graph.layers
        place = {layer.name: index for index, layer in enumerate(layers)}
        sources = [set(read) for read in sources_of(self.graph)]
        readers: list[list[int]] = [[] for _ in layers]
        for index, read in enumerate(sources):
            for source in read:
                readers[source].append(index)
        for index, layer in enumerate(layers):
            for name in layer.skip_bytes:
                sources[place[name]].add(index)
        trains: list[bool] = []
        for index, layer in enumerate(layers):
            trained = layer.parameter_bytes > 0 or any(trains[source] for source in sources[index])
            trains.append(trained)
            self._add_value(index, readers[index], layer.output_bytes, trained)
            for name, num_bytes in layer.skip_bytes.items():
                self._add_value(index, [place[name]], num_bytes, trained)

    def _add_value(self, maker: int, readers: Sequence[int], num_bytes: int, trains: bool) -> None:
        value = len(self._values)
        self._values.append(_Value(num_bytes, max(readers, default=maker), trains))
        self._made_by[maker].append(value)
        for reader in readers:
            self._read_by[reader].add(value)

    def solve(self, allowed: Callable[[Layer], Sequence[Sharing]]) -> Solution:
        """The fastest choice among those that ``allowed`` names for each layer."""
        best: dict[State, tuple[float, _Trail | None]] = {(): (0.0, None)}
        exact = True
        for index, layer in enumerate(self.graph.layers):
            reached: dict[State, tuple[float, _Trail | None]] = {}
            for sharing in allowed(layer):
                work = self._work_seconds(layer, sharing)
                for state, (seconds, trail) in best.items():
                    step = self._step(state, index, sharing)
                    talk = step.forward.seconds + step.backward.seconds
                    total = seconds + work + self.num_microbatches * talk
                    if step.state not in reached or total < reached[step.state][0]:
                        reached[step.state] = (total, _Trail(sharing, trail))
            if len(reached) > _MOST_STATES:
                exact = False
                reached = dict(sorted(reached.items(), key=lambda item: item[1][0])[:_MOST_STATES])
            best = reached
        seconds, last = min(best.values(), key=lambda entry: entry[0])
        return Solution(_unwound(last), seconds, exact)

    def walk(self, sharings: Sequence[Sharing]) -> Iterator[tuple[Layer, Sharing, Step]]:
        """The layers in execution order, each with its choice and what that takes."""
        state: State = ()
        for index, (layer, sharing) in enumerate(zip(self.graph.layers, sharings, strict=True)):
            step = self._step(state, index, sharing)
            yield layer, sharing, step
            state = step.state

    def reduction(self, layer: Layer, sharing: Sharing) -> Traffic:
        """The sum of a layer's gradients, where devices have seen different rows."""
        if sharing.divides != "rows":
            return NOTHING
        return self.ring.all_reduce(layer.parameter_bytes)

    def moved_bytes(self, sharings: Sequence[Sharing]) -> int:
        """Bytes that all devices together send in a minibatch."""
        total = 0.0
        for layer, sharing, step in self.walk(sharings):
            talk = step.forward.num_bytes + step.backward.num_bytes
            total += self.num_microbatches * talk + self.reduction(layer, sharing).num_bytes
        return round(self.ring.num_ranks * total)

    def _work_seconds(self, layer: Layer, sharing: Sharing) -> float:
        """Seconds of a layer's compute, updates and sum of gradients in a minibatch."""
        compute = self.num_microbatches * layer.compute_seconds * self.ring.share(sharing.divides)
        update = layer.update_seconds * self.ring.parameter_share(sharing)
        return compute + update + self.reduction(layer, sharing).seconds

    def _step(self, state: State, index: int, sharing: Sharing) -> Step:
        """Let a layer read its inputs and hand on its outputs."""
        forward, backward, copied = NOTHING, NOTHING, 0.0
        after: list[_Live] = []
        for live in state:
            value, read = self._values[live.value], live
            if live.value in self._read_by[index]:
                there, back, read = self._read(live, sharing)
                forward, backward = forward + there, backward + back
                if there.num_bytes:
                    copied += self.ring.share(sharing.reads) * value.num_bytes
            if value.last > index:
                after.append(read)
        if sharing.split == "row":
            num_bytes = self.graph.layers[index].output_bytes
            forward += self.ring.convert("partial", sharing.gives, num_bytes)
            backward += self.ring.convert(sharing.gives, "whole", num_bytes)
        if sharing.sums:
            inside = self.ring.all_reduce(self.graph.layers[index].output_bytes)
            forward, backward = (
                Traffic(
                    talk.seconds + sharing.sums * inside.seconds,
                    talk.num_bytes + sharing.sums * inside.num_bytes,
                )
                for talk in (forward, backward)
            )
        for number in self._made_by[index]:
            if self._values[number].last > index:
                after.append(_Live(number, sharing.gives))
            else:
                there, back = self._to_the_loss(self._values[number], sharing)
                forward, backward = forward + there, backward + back
        return Step(forward, backward, copied, tuple(after))

    def _read(self, live: _Live, sharing: Sharing) -> tuple[Traffic, Traffic, _Live]:
        """(traffic there, traffic back, the value then) for one more reader. A copy that an earlier
        one had made is there already, and gradients held alike are added up before they travel."""
        value = self._values[live.value]
        there = min(
            (
                self.ring.convert(copy, sharing.reads, value.num_bytes)
                for copy in (live.layout, *sorted(live.copies))
            ),
            key=lambda traffic: (traffic.seconds, traffic.num_bytes),
        )
        back = NOTHING
        if value.trains and sharing.returns not in live.gradients:
            back = self.ring.convert(sharing.returns, live.layout, value.num_bytes)
        # What was free is not noted: fewer states are to be told apart.
        if there.num_bytes:
            live = live._replace(copies=live.copies | {sharing.reads})
        if back.num_bytes:
            live = live._replace(gradients=live.gradients | {sharing.returns})
        return there, back, live

    def _to_the_loss(self, value: _Value, sharing: Sharing) -> tuple[Traffic, Traffic]:
        """(traffic there, traffic back) of the model's output: a loss needs all features of a row,
        and all devices or those that have the row can compute it."""
        places: tuple[TensorLayout, ...] = ("rows", "whole")
        if sharing.gives in places:
            return NOTHING, NOTHING
        ways = (
            (
                self.ring.convert(sharing.gives, place, value.num_bytes),
                self.ring.convert(place, sharing.gives, value.num_bytes if value.trains else 0),
            )
            for place in places
        )
        return min(ways, key=lambda pair: pair[0].seconds + pair[1].seconds)


def _unwound(trail: _Trail | None) -> tuple[Sharing, ...]:
    chosen: list[Sharing] = []
    while trail is not None:
        chosen.append(trail.sharing)
        trail = trail.before
    return tuple(reversed(chosen))
