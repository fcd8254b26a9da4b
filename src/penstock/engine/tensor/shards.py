"""Shards: where the part of a value or of a parameter begins and ends that one member has.

The rule is the same for rows, features and parameters. Dropout draws in the order of memory, and
kernels are chosen by it: what has been divided or put together must lie as the whole value does on
one device (``memory_order``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def memory_order(value: Tensor) -> list[int]:
    """The dimensions, the outermost in memory first.

    A dimension of one number tells nothing of its place beside another with the same stride, except
    that it is the inner one.
    """
    strides, sizes = [*value.stride()], [*value.shape]
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))


def put_back(value: Tensor, order: Sequence[int]) -> Tensor:
    """Put the dimensions of ``permute(order)`` back in the places where they were."""
    places = [order.index(dim) for dim in range(len(order))]
    # A view could not be overwritten where a function of autograd gives it.
    return value if places == sorted(places) else value.permute(places).detach()


def dense_copy(value: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """A copy without gaps, of which the dimensions lie in an order; by default in that of the
    value."""
    order = memory_order(value) if order is None else [*order]
    return put_back(value.permute(order).clone(memory_format=torch.contiguous_format), order)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts one behind another along a dimension, lying as the first one does, which is the largest
    and the same for all who join them."""
    order = memory_order(parts[0])
    return put_back(torch.cat([part.permute(order) for part in parts], order.index(dim)), order)


class Bounds(NamedTuple):
    """A part of a dimension: from ``start`` up to, and without, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many entries the part has."""
        return self.stop - self.start


def bounds(size: int, count: int, index: int) -> Bounds:
    """The part of a dimension that one of ``count`` members has; the first ones have one entry more
    where it does not divide.

    >>> [bounds(7, 3, index) for index in range(3)]
    [Bounds(start=0, stop=3), Bounds(start=3, stop=5), Bounds(start=5, stop=7)]
    """
    whole, more = divmod(size, count)
    start = index * whole + min(index, more)
    return Bounds(start, start + whole + (index < more))


def sizes(size: int, count: int) -> list[int]:
    """How many entries each member has.

    >>> sizes(7, 3)
    [3, 2, 2]
    """
    return [bounds(size, count, index).length for index in range(count)]


class ShardSpec(NamedTuple):
    """How a parameter is divided.

    Attributes:
        dim: along which dimension.
        blocks: how many equal pieces lie one behind another along it, each of which is divided:
            queries, keys and values of one linear layer are three.
        unit: entries that stay together, such as those of a head.
    """

    dim: int
    blocks: int = 1
    unit: int = 1

    def bounds(self, size: int, count: int, index: int) -> list[Bounds]:
        """Where the member's part lies: a piece of every block."""
        length = size // self.blocks
        own = bounds(length // self.unit, count, index)
        first, last = own.start * self.unit, own.stop * self.unit
        starts = range(0, length * self.blocks, length or 1)
        return [Bounds(start + first, start + last) for start in starts]

    def part(self, whole: Tensor, count: int, index: int) -> Tensor:
        """The member's part, in memory of its own."""
        return torch.cat(self._pieces(whole, count, index), self.dim).clone(
            memory_format=torch.contiguous_format
        )

    def put(self, whole: Tensor, part: Tensor, count: int, index: int) -> None:
        """Write a member's part back into the whole."""
        pieces = self._pieces(whole, count, index)
        lengths = [piece.shape[self.dim] for piece in pieces]
        for piece, own in zip(pieces, torch.split(part, lengths, self.dim), strict=True):
            piece.copy_(own)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The whole, of all members' parts."""
        if self.blocks == 1:
            return torch.cat(parts, self.dim)
        by_member = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat(
            [piece for block in zip(*by_member, strict=True) for piece in block], self.dim
        )

    def _pieces(self, whole: Tensor, count: int, index: int) -> list[Tensor]:
        size = whole.shape[self.dim]
        return [
            whole.narrow(self.dim, own.start, own.length) for own in self.bounds(size, count, index)
        ]
