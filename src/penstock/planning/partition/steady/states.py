"""Where a branching model can be cut: the states that a pipeline passes through.

A state is a set of layers that holds everything its layers read; a stage, with some number of
replicas, is a ``Piece`` between two states. The prefixes of the execution order are states. A
branching model has more of them, one for each antichain of its graph, and the best cut may be
behind any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.chain import Array, Floats
from penstock.planning.partition.layers import handed_on

Fits = Callable[[Sequence[int], int, int], bool]
"""(layers by index, replicas, microbatches in flight) → may a stage be like that?"""


@dataclass(frozen=True)
class Piece:
    """A stage between two states, by their indices."""

    start: int
    stop: int
    replicas: int


def all_fit(fits: Fits, stages: Sequence[tuple[Sequence[int], int]]) -> bool:
    """Whether a whole pipeline may be like that.

    Args:
        fits: whether one stage may.
        stages: (layers by index, replicas) of each, from the model's input to its output.
    """
    behind = 0
    for layers, replicas in reversed(stages):
        if not fits(layers, replicas, 1 + ceil(behind / replicas)):
            return False
        behind += replicas
    return True


MOST_STATES = 2500
"""Beyond so many, all pairs of states take more memory and time than a plan is worth."""


@dataclass(frozen=True)
class States:
    """States of a graph, smaller ones first: the first is empty, the last has all layers.

    Attributes:
        graph: whose layers they are sets of.
        sets: the layers of each state, as a bit per layer.
        is_all: whether these are all states of the graph, not just prefixes.
    """

    graph: LayerGraph
    sets: tuple[int, ...]
    is_all: bool

    @cached_property
    def members(self) -> Array:
        """Booleans ``[state, layer]``: whether the state has the layer."""
        num_layers = len(self.graph.layers)
        width = (num_layers + 7) // 8
        rows = b"".join(layers.to_bytes(width, "little") for layers in self.sets)
        octets = np.frombuffer(rows, dtype=np.uint8).reshape(len(self.sets), width)
        return np.unpackbits(octets, axis=1, bitorder="little")[:, :num_layers].astype(bool)

    @cached_property
    def compute_seconds(self) -> Floats:
        """Forward and backward of each state's layers."""
        return self._sums([layer.compute_seconds for layer in self.graph.layers])

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes of the gradients of each state's layers."""
        return self._sums([float(layer.summed_bytes) for layer in self.graph.layers])

    def _sums(self, numbers: Sequence[float]) -> Floats:
        sums: Floats = self.members @ np.array(numbers)
        return sums

    @cached_property
    def cut_bytes(self) -> Floats:
        """Bytes over a cut behind each state in one direction, every output once."""
        total = np.zeros(len(self.sets))
        for source, readers, num_bytes in handed_on(self.graph):
            leaves = self.members[:, source] & ~self.members[:, readers].all(axis=1)
            total += leaves * float(num_bytes)
        return total

    @cached_property
    def nested(self) -> Array:
        """Booleans ``[a, b]``: whether state a is part of the larger state b."""
        count = len(self.sets)
        if not self.is_all:
            return np.triu(np.ones((count, count), dtype=bool), 1)
        inside = self.members.astype(np.float32)
        shared = inside @ inside.T
        sizes = inside.sum(axis=1)
        return np.asarray((shared == sizes[:, None]) & (sizes[:, None] < sizes[None, :]))

    def between(self, smaller: int, larger: int) -> Sequence[int]:
        """The layers of a stage between two states, in execution order."""
        if not self.is_all:
            return range(self.sets[smaller].bit_length(), self.sets[larger].bit_length())
        left = self.sets[larger] & ~self.sets[smaller]
        return tuple(index for index in range(left.bit_length()) if left >> index & 1)


def prefixes(graph: LayerGraph) -> States:
    """The states that the execution order passes through."""
    sets = tuple((1 << count) - 1 for count in range(len(graph.layers) + 1))
    return States(graph, sets, is_all=False)


def all_states(
    graph: LayerGraph, most: int = MOST_STATES, *, limited: bool = False
) -> States | None:
    """Every state that can matter, or ``None`` if there are more than ``most``.

    Layers that cost nothing, as views, are kept beside a neighbour where no plan gets better by
    putting them elsewhere.

    Args:
        graph: whose states they are.
        most: how many there may be.
        limited: whether stages have limits of memory, so that what layers keep is a cost as well.
    """
    pieces, everywhere = _Pieces(graph, limited).result()
    known = {0}
    edge = [0]
    while edge:
        bigger = set()
        for state in edge:
            for need, own in pieces:
                if need & state == need and own & state != own:
                    bigger.add(state | own | everywhere)
        edge = list(bigger - known)
        known |= bigger
        if len(known) > most:
            return None
    return States(
        graph, tuple(sorted(known, key=lambda layers: (layers.bit_count(), layers))), is_all=True
    )


def _takes_memory(layer: Layer) -> bool:
    return any((
        layer.activation_bytes, layer.held_input_bytes, layer.weight_kept_bytes,
        layer.workspace_bytes, layer.buffer_bytes, layer.optimizer_bytes,
    ))  # fmt: skip


class _Pieces:
    """Layers that may as well stay together, so that there are fewer states."""

    def __init__(self, graph: LayerGraph, limited: bool) -> None:
        count = len(graph.layers)
        self.sizes = [layer.output_bytes for layer in graph.layers]
        self.sources: list[set[int]] = [set() for _ in range(count)]
        self.readers: list[set[int]] = [set() for _ in range(count)]
        self.home = list(range(count))
        skips = {
            name
            for layer in graph.layers
            for name in (layer.name, *layer.skip_bytes)
            if layer.skip_bytes
        }
        self.is_free = [
            not (layer.compute_seconds or layer.parameter_bytes or layer.name in skips)
            and not (limited and _takes_memory(layer))
            for layer in graph.layers
        ]
        for source, readers, _ in handed_on(graph):
            for reader in readers:
                self.sources[reader].add(source)
                self.readers[source].add(reader)

    def result(self) -> tuple[list[tuple[int, int]], int]:
        """(what it needs, what it consists of) of each piece, and what is in all states but the
        empty one; layers as bits."""
        free = [index for index, is_free in enumerate(self.is_free) if is_free]
        for index in reversed(free):
            self._end(index)
        for index in free:
            self._shrink(index)
        for index in reversed(free):
            self._begin(index)
        everywhere = {index for index in free[:-1] if self._is_nothing(index)}
        own: dict[int, int] = {}
        needs: dict[int, int] = {}
        for index in range(len(self.home)):
            home = self._home(index)
            own[home] = own.get(home, 0) | 1 << index
            for source in self.sources[index] - everywhere:
                needs[home] = needs.get(home, 0) | 1 << source
        pieces = [
            (needs.get(home, 0) & ~bits, bits)
            for home, bits in own.items()
            if home not in everywhere
        ]
        return pieces, sum(own[index] for index in everywhere)

    def _home(self, index: int) -> int:
        while self.home[index] != index:
            index = self.home[index]
        return index

    def _end(self, index: int) -> None:
        """A layer that nobody reads goes with the only one that it reads."""
        if not self.readers[index] and len(self.sources[index]) == 1:
            (source,) = self.sources[index]
            self.home[index] = source
            self.readers[source].discard(index)

    def _shrink(self, index: int) -> None:
        """The only reader of an output goes with it, if it hands on no more than it gets."""
        if len(self.sources[index]) != 1 or self.home[index] != index:
            return
        (source,) = self.sources[index]
        if self.readers[source] == {index} and self.sizes[index] <= self.sizes[source]:
            self.home[index] = source

    def _begin(self, index: int) -> None:
        """A layer that reads nothing of any size goes with its only reader."""
        total = sum(self.sizes[source] for source in self.sources[index])
        if self.home[index] == index and not total and len(self.readers[index]) == 1:
            (reader,) = self.readers[index]
            if self._home(reader) != index:
                self.home[index] = reader

    def _is_nothing(self, index: int) -> bool:
        """Whether it neither reads nor hands on anything of any size."""
        stays = self.home[index] == index and index not in self.home[index + 1 :]
        return stays and not self.sources[index] and not self.sizes[index]
