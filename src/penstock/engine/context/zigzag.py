"""Which positions of a sequence each member of a group has.

A position attends to those before it, so later ones are more work. The sequence is cut into twice
as many chunks as there are members, and member i has chunk i and the i-th from the end: in every
round of a ring each then computes as many scores as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import ModelError
from penstock.engine.tensor.group import Bounds, bounds


def chunks(length: int, size: int, index: int) -> tuple[Bounds, Bounds]:
    """The two chunks of positions that one of ``size`` members has.

    >>> [[(own.start, own.stop) for own in chunks(8, 2, index)] for index in range(2)]
    [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    """
    return bounds(length, 2 * size, index), bounds(length, 2 * size, 2 * size - 1 - index)


def shares(length: int, size: int) -> tuple[int, ...]:
    """How many positions each member has.

    Raises:
        ModelError: there are fewer than two for each.

    >>> shares(9, 2)
    (5, 4)
    """
    if length < 2 * size:
        raise ModelError(
            f"a sequence of {length} positions cannot be shared by {size} context ranks, each of "
            "which needs two; take fewer ranks, or longer sequences"
        )
    return tuple(sum(own.length for own in chunks(length, size, index)) for index in range(size))


class PositionDim(NamedTuple):
    """Where positions lie in a value.

    Attributes:
        dim: the dimension, of ``outer × length × inner`` numbers.
        length: of the sequence.
        inner: numbers that belong to one position.
    """

    dim: int
    length: int
    inner: int = 1


def taken(whole: Tensor, place: PositionDim, size: int, index: int) -> Tensor:
    """A member's positions of a whole value, in memory of its own."""
    dim, length, inner = place
    pieces: Tensor = torch.unflatten(whole, dim, (-1, length, inner))
    own = [pieces.narrow(dim + 1, part.start, part.length) for part in chunks(length, size, index)]
    return torch.cat(own, dim + 1).flatten(dim, dim + 2)


def put_together(parts: Sequence[Tensor], place: PositionDim) -> Tensor:
    """The whole value of all members' positions, which are given in the order of the members."""
    dim, length, inner = place
    size = len(parts)
    by_chunk: dict[int, Tensor] = {}
    for index, part in enumerate(parts):
        first, last = chunks(length, size, index)
        pieces: Tensor = torch.unflatten(part, dim, (-1, first.length + last.length, inner))
        by_chunk[index] = pieces.narrow(dim + 1, 0, first.length)
        by_chunk[2 * size - 1 - index] = pieces.narrow(dim + 1, first.length, last.length)
    ordered = [by_chunk[number] for number in range(2 * size)]
    return torch.cat(ordered, dim + 1).flatten(dim, dim + 2)
