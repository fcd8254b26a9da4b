"""How a dimension of a value is divided, also where the value is seen in another shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, fx


class ShardedDim(NamedTuple):
    """A dimension of ``outer × length × inner`` numbers, of which members have some of the
    ``length``. Queries, keys and values of one linear layer are an ``outer`` of three; a feature of
    a head that was repeated is an ``inner``.

    Attributes:
        dim: the dimension, from 0.
        length: what is divided.
        inner: numbers that stay together.
        parts: how many of the ``length`` each member has.
    """

    dim: int
    length: int
    inner: int
    parts: tuple[int, ...]

    def outer(self, size: int) -> int:
        """How many times the divided numbers lie one behind another in a whole dimension."""
        return size // (self.length * self.inner)

    def local(self, size: int, member: int) -> int:
        """The numbers that a member has of a whole dimension of ``size``."""
        return size // self.length * self.parts[member]

    def at(self, dim: int) -> ShardedDim:
        """The same in another place."""
        return self._replace(dim=dim)

    def alike(self, other: ShardedDim) -> bool:
        """Whether members have the same numbers of a dimension of the same size."""
        mine, theirs = (
            (sharded.length * sharded.inner, *(part * sharded.inner for part in sharded.parts))
            for sharded in (self, other)
        )
        return mine == theirs


def reshaped(divided: ShardedDim, before: Sequence[int], after: Sequence[int]) -> ShardedDim | None:
    """The sharded dimension of a value that is seen in another shape.

    Args:
        before, after: its whole shapes.

    Returns:
        ``None`` if no dimension of the new shape is divided in one piece.

    >>> reshaped(ShardedDim(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 4, 3))
    ShardedDim(dim=2, length=4, inner=1, parts=(2, 2))
    >>> reshaped(ShardedDim(1, 4, 1, (2, 2)), (5, 4, 7), (20, 7))
    ShardedDim(dim=0, length=4, inner=1, parts=(2, 2))
    >>> reshaped(ShardedDim(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 3, 4)) is None
    True
    """
    # From how many numbers on one step in the divided places goes, and where they begin again.
    step = divided.inner * prod(before[divided.dim + 1 :])
    end = step * divided.length
    for dim, size in enumerate(after):
        below = prod(after[dim + 1 :])
        if not below < end <= below * size:
            continue
        if below <= step:
            if step % below or (below * size) % end:
                return None
            return divided._replace(dim=dim, inner=step // below)
        # What is divided is cut in two, of which the outer one is divided still.
        steps = below // step
        if below % step or divided.length % steps or any(part % steps for part in divided.parts):
            return None
        if (below * size) % end:
            return None
        parts = tuple(part // steps for part in divided.parts)
        return ShardedDim(dim, divided.length // steps, 1, parts)
    return None


Known = Mapping[fx.Node, ShardedDim]
"""How values are divided that are."""


def shape_of(node: fx.Node) -> list[int] | None:
    """The whole shape that a value had when it was recorded; ``None`` if it is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or None in _hints(value):
        return None  # nobody knows how long it is that depends on values
    return sizes_of(value)


def sizes_of(value: Tensor) -> list[int]:
    """The sizes that a value had when it was recorded, also of dimensions that may vary."""
    return [int(hint) for hint in _hints(value)]


def _hints(value: Tensor) -> list[Any]:
    sizes: list[Any] = [*value.shape]
    return [getattr(size, "node", _Plain(size)).hint for size in sizes]


class _Plain(NamedTuple):
    """A size that is a number, as symbolic ones show what they were."""

    hint: int
