"""Which part of a stage's state a tensor rank has, and where it lies in the whole.

Checkpoints know whole tensors only, so that any layout can go on from them. A member writes its own
parts, each with its place; what all members repeat, the first one writes. A part of a tensor that
is divided block by block (queries, keys and values) lies in several places: of those after the
first, each goes to a piece of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.header import Extent, extent_of
from penstock.tensor.cuts import Cut

OPTIMIZER, DRIFT, UNDER_WAY = "optimizer/", "drift/", "under-way/"
"""How the names of tensors begin that are not the model's own."""


class PartState(NamedTuple):
    """What goes into one piece of a stage that has several.

    Attributes:
        part: the piece's number.
        num_parts: how many pieces the stage has.
        tensors: by their names, with their places.
    """

    part: int
    num_parts: int
    tensors: dict[str, tuple[Extent, Tensor]]


class Division(NamedTuple):
    """One member's part of a stage.

    Attributes:
        cuts: how tensors of the model are divided, by their keys.
        shapes: of these, whole.
        num_blocks: the most pieces in which a tensor of the stage is divided.
        coordinate: the member's.
        size: how many members there are.
    """

    cuts: Mapping[str, Cut]
    shapes: Mapping[str, tuple[int, ...]]
    num_blocks: int
    coordinate: int
    size: int

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor of which a member has this."""
        key, own = _key(name), tuple(tensor.shape)
        return self.shapes[key] if key in self.cuts and own == self._own_shape(key) else own

    def own(self, name: str, whole: Tensor) -> Tensor:
        """What the member has of a whole tensor."""
        key = _key(name)
        if key not in self.cuts or tuple(whole.shape) != self.shapes[key]:
            return whole
        return self.cuts[key].part(whole, self.size, self.coordinate)

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[PartState]:
        """What the member writes, piece by piece; its first one has all but further blocks."""
        for block in range(self.num_blocks):
            own: dict[str, tuple[Extent, Tensor]] = {}
            for name, tensor in tensors.items():
                key = _key(name)
                if key in self.cuts and tuple(tensor.shape) == self._own_shape(key):
                    if block < self.cuts[key].blocks:
                        own[name] = self._placed(key, tensor, block)
                elif block == self.coordinate == 0:
                    own[name] = extent_of(tensor), tensor
            number = self.coordinate * self.num_blocks + block
            yield PartState(number, self.num_blocks * self.size, own)

    def _placed(self, key: str, tensor: Tensor, block: int) -> tuple[Extent, Tensor]:
        cut, shape = self.cuts[key], self.shapes[key]
        places = cut.bounds(shape[cut.dim], self.size, self.coordinate)
        lengths = [place.length for place in places]
        piece = torch.split(tensor, lengths, cut.dim)[block]
        start = [0] * len(shape)
        start[cut.dim] = places[block].start
        whole = extent_of(piece)
        extent = Extent(dtype=whole.dtype, shape=shape, start=tuple(start), size=whole.shape)
        return extent, piece

    def _own_shape(self, key: str) -> tuple[int, ...]:
        cut, shape = self.cuts[key], list(self.shapes[key])
        places = cut.bounds(shape[cut.dim], self.size, self.coordinate)
        shape[cut.dim] = sum(place.length for place in places)
        return tuple(shape)


def _key(name: str) -> str:
    """The key of the model's tensor that a tensor of a piece belongs to."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(DRIFT)
