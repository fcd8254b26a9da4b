"""How a dimension of a recorded value is divided, and what becomes of it where shapes change."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Divided(NamedTuple):
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
        """What a member has of a whole dimension of ``size``."""
        return size // self.length * self.parts[member]

    def at(self, dim: int) -> Divided:
        """The same in another place."""
        return self._replace(dim=dim)

    def alike(self, other: Divided) -> bool:
        """Whether members have the same numbers of a dimension of the same size."""
        mine, theirs = (
            (one.length * one.inner, *(part * one.inner for part in one.parts))
            for one in (self, other)
        )
        return mine == theirs


def reshaped(divided: Divided, before: Sequence[int], after: Sequence[int]) -> Divided | None:
    """What is divided of a value that is seen in another shape.

    Args:
        before, after: its whole shapes.

    Returns:
        ``None`` if no dimension of the new shape is divided in one piece.

    >>> reshaped(Divided(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 4, 3))
    Divided(dim=2, length=4, inner=1, parts=(2, 2))
    >>> reshaped(Divided(1, 4, 1, (2, 2)), (5, 4, 7), (20, 7))
    Divided(dim=0, length=4, inner=1, parts=(2, 2))
    >>> reshaped(Divided(2, 12, 1, (6, 6)), (5, 7, 12), (5, 7, 3, 4)) is None
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
        return Divided(dim, divided.length // steps, 1, parts)
    return None
