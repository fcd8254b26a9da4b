"""Which part of a stage's state a tensor rank has, and where it lies in the whole.

Checkpoints know whole tensors only, so that any layout can go on from them. A member writes its own
parts, each with its place; what all members repeat, the first one writes. A part of a tensor that
is divided block by block (queries, keys and values) lies in several places: of those after the
first, each goes to a piece of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from penstock.engine.tensor.group import ShardSpec
from penstock.training.checkpoint.header import Extent, extent_of

OPTIMIZER, DRIFT, UNDER_WAY = "optimizer/", "drift/", "under-way/"
"""How the names of tensors begin that are not the model's own."""


class PartState(NamedTuple):
    """What goes into one piece of a stage that has several.

    Attributes:
        part: the piece's number.
        num_parts: how many pieces the stage has.
        tensors: by their names, with their places.
        tells: whether what is no tensor goes there, too.
    """

    part: int
    num_parts: int
    tensors: dict[str, tuple[Extent, Tensor]]
    tells: bool = True


class Division(NamedTuple):
    """One member's part of a stage.

    Attributes:
        cuts: how tensors of the model are divided, by their keys.
        shapes: of these, whole.
        num_blocks: the most pieces in which a tensor of the stage is divided.
        coordinate: the member's.
        size: how many members there are.
    """

    cuts: Mapping[str, ShardSpec]
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

    def pieces(
        self,
        tensors: Mapping[str, Tensor],
        extents: Mapping[str, Extent],
        copy: int = 0,
        num_copies: int = 1,
    ) -> Iterator[PartState]:
        """What the member writes, piece by piece; its first one has all but further blocks.

        Args:
            tensors: by their names.
            extents: where they lie in the member's part, if they are not all of it.
            copy: which of the stage's copies writes, where each has rows of its own.
            num_copies: how many write.
        """
        own_pieces = self.size * self.num_blocks
        for block in range(self.num_blocks):
            own: dict[str, tuple[Extent, Tensor]] = {}
            for name, tensor in tensors.items():
                key, within = _key(name), extents.get(name) or extent_of(tensor)
                if key in self.cuts and within.shape == self._own_shape(key):
                    placed = self._placed(key, tensor, within, block)
                    if placed is not None:
                        own[name] = placed
                elif block == self.coordinate == 0:
                    own[name] = within, tensor
            number = self.coordinate * self.num_blocks + block
            yield PartState(copy * own_pieces + number, num_copies * own_pieces, own, not number)

    def _placed(
        self, key: str, tensor: Tensor, within: Extent, block: int
    ) -> tuple[Extent, Tensor] | None:
        """What of a tensor lies in a block, and where in the whole; ``None`` if nothing does.

        Args:
            within: where the tensor lies in the member's part.
        """
        cut, shape = self.cuts[key], self.shapes[key]
        if block >= cut.blocks:
            return None
        places = cut.bounds(shape[cut.dim], self.size, self.coordinate)
        before = sum(place.length for place in places[:block])
        own_start = [*within.start] or [0] * len(shape)
        first = max(own_start[cut.dim], before)
        last = min(own_start[cut.dim] + within.own_shape[cut.dim], before + places[block].length)
        if first >= last and tensor.numel():
            return None
        piece = tensor.narrow(cut.dim, first - own_start[cut.dim], max(last - first, 0))
        start = [*own_start]
        start[cut.dim] = places[block].start + first - before
        size = tuple(piece.shape)
        extent = Extent(dtype=within.dtype, shape=shape, start=tuple(start), size=size)
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
