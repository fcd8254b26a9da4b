"""Which part of a parameter a member has, and how it goes back into the whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.tensor.parts import Bounds, bounds


class Cut(NamedTuple):
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
