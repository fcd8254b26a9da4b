"""``Tie``: a parameter that several layers hold, and what is counted of it twice where several of
these are in one stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.graph import Layer, LayerGraph
from penstock.planning.partition.chain import Ints

OF_PARAMETERS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_seconds")
"""Numbers of a layer, as ``LayerSums.sums`` names them, that its parameters have: a stage has what
all its layers share once."""


class Tie(NamedTuple):
    """A parameter that several layers hold.

    Attributes:
        name: in the model.
        num_bytes: its size.
        holders: the layers that hold it, in their order.
        counted: what each of them counts of it at least, in the order of ``OF_PARAMETERS``.
    """

    name: str
    num_bytes: int
    holders: tuple[int, ...]
    counted: tuple[float, ...]

    @property
    def first(self) -> int:
        """The first layer that holds it."""
        return self.holders[0]

    @property
    def last(self) -> int:
        """The last layer that holds it."""
        return self.holders[-1]

    def num_holders(self, start: int, stop: int) -> int:
        """How many of layers ``[start, stop)`` hold the parameter."""
        return bisect_left(self.holders, stop) - bisect_left(self.holders, start)

    def is_parted(self, start: int, stop: int) -> bool:
        """Whether a stage with layers ``[start, stop)`` shares the parameter with another one."""
        return 0 < self.num_holders(start, stop) < len(self.holders)

    def num_holders_between(self, places: Sequence[int]) -> Ints:
        """``num_holders`` of all stages between two places: a row for each start."""
        before = np.searchsorted(self.holders, places)
        return np.asarray(before - before[:, None])


def ties_of(graph: LayerGraph) -> tuple[Tie, ...]:
    """The parameters that several layers hold."""
    holders: dict[str, list[int]] = {}
    for index, layer in enumerate(graph.layers):
        for name in layer.shared_parameters:
            holders.setdefault(name, []).append(index)
    return tuple(
        _tie(name, own, [graph.layers[index] for index in own]) for name, own in holders.items()
    )


def _tie(name: str, holders: Sequence[int], layers: Sequence[Layer]) -> Tie:
    counted = zip(*(_counted(name, layer) for layer in layers), strict=True)
    num_bytes = min(layer.shared_parameters[name] for layer in layers)
    return Tie(name, num_bytes, tuple(holders), tuple(map(min, counted)))


def _counted(name: str, layer: Layer) -> tuple[float, ...]:
    """What a layer counts of a parameter: of all that its parameters have, the share of the bytes.
    Bytes are whole, so that they have the same sums in every order."""
    own = min(layer.shared_parameters[name], layer.parameter_bytes)
    whole = max(layer.parameter_bytes, 1)
    states = layer.summed_bytes * own // whole, layer.optimizer_bytes * own // whole
    return own, *states, layer.update_seconds * own / whole
