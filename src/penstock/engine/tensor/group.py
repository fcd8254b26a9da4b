"""A group of members: the shards by which it shares values and parameters, and all that it does.

The rule by which things are cut (``bounds``) is the same for rows, features and parameters. Dropout
draws in the order of memory, and kernels are chosen by it: what has been divided or put together
must lie as the whole value does on one device (``memory_order``).

All that members do is one exchange: every member hands a tensor to every other one, and gets one
from each. A ring would send as many bytes; by direct messages a member waits once instead of t−1
times. With t members and a value of V bytes a member sends (t−1)/t · V in a gather, a
reduce-scatter and an all-to-all of rows and features less by another t, and 2(t−1)/t · V in an
all-reduce: what ``docs/tensor-parallelism.md`` says that a ring sends. Members talk over the
transport that joins all ranks (``ChannelGroup``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import GROUP_TAG


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


class TensorGroup(ABC):
    """One member's end of its group. Every member calls the same methods in the same order.

    Attributes:
        index: this member's coordinate, from 0.
        size: how many members there are.
    """

    index: int
    size: int

    @abstractmethod
    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Hand ``parts[j]`` to member j, and take what each member has for this one.

        Args:
            parts: as many as there are members. They may be overwritten as soon as this returns.

        Returns:
            In the order of the members; this one's own part is given back as it is. Those of others
            belong to the caller.

        Raises:
            PeerError, DeadlineError: a member failed, or did not come.
        """

    @abstractmethod
    def tell(self, number: int) -> list[int]:
        """Tell a number, and hear every member's, in their order; no device has to be waited for.

        Raises:
            PeerError, DeadlineError: a member failed, or did not come.
        """

    @abstractmethod
    def hand_on(self, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Send the next member some tensors, the last one the first.

        Args:
            tensors: nobody overwrites them after this; between threads they are handed over as
                they are.

        Returns:
            A function that waits for those of the member before. It may be called later, also
            behind another call of this; what it gives must not be overwritten.

        Raises:
            PeerError, DeadlineError: a member failed, or did not come; so does the function.
        """

    def gather(self, part: Tensor, dim: int) -> tuple[Tensor, list[int]]:
        """The whole of which every member has a part, and how much each has along ``dim``."""
        parts = self.exchange([part] * self.size)
        return joined(parts, dim), [there.shape[dim] for there in parts]

    def reduce_scatter(
        self, value: Tensor, dim: int, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """This member's part of the sum of all members' values.

        Args:
            value: of the same shape everywhere.
            dim: along which the sum is divided.
            lengths: of the parts; by default those of ``bounds``.
        """
        lengths = sizes(value.shape[dim], self.size) if lengths is None else list(lengths)
        return _summed(self.exchange(torch.split(value, lengths, dim)), memory_order(value))

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of all members' values, with the same bits on all of them."""
        flat = value.reshape(-1)
        part = self.reduce_scatter(flat, 0)
        whole, _ = self.gather(part, 0)
        # Nobody else has this memory; a view of it could not be overwritten behind a custom node.
        total: Tensor = torch.ops.aten._unsafe_view(whole, value.shape)
        order = memory_order(value)
        return total if order == memory_order(total) else dense_copy(total, order)

    def all_to_all(
        self, part: Tensor, have: int, want: int, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """From a part along one dimension to a part along another.

        Args:
            have: the dimension along which ``part`` is divided.
            want: the one along which the result is.
            lengths: of the parts of the result; by default those of ``bounds``.

        Returns:
            The part, and how much each member had along ``have``.
        """
        lengths = sizes(part.shape[want], self.size) if lengths is None else list(lengths)
        parts = self.exchange(torch.split(part, lengths, want))
        return joined(parts, have), [there.shape[have] for there in parts]

    def part(self, value: Tensor, dim: int) -> Tensor:
        """This member's part of a value that all have; a tensor of its own."""
        own = bounds(value.shape[dim], self.size, self.index)
        return dense_copy(value.narrow(dim, own.start, own.length), memory_order(value))

    def of_first(self, value: Tensor) -> Tensor:
        """The first member's value, of the same shape everywhere."""
        if self.index == 0:
            self.exchange([value] * self.size)
            return value
        nothing = value.new_empty(0)
        return self.exchange([nothing] * self.size)[0]

    def largest(self, value: Tensor) -> Tensor:
        """Entry by entry, the largest of all members' values."""
        return torch.stack(self.exchange([value] * self.size)).amax(0)


def _summed(terms: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """In the order of the members, so that whoever adds gets the same bits; in memory, dimensions
    lie in another given order."""
    total = dense_copy(terms[0], order)
    for term in terms[1:]:
        total += term
    return total


class ChannelGroup(TensorGroup):
    """One member's end of a group.

    Args:
        transport: the member's end of its channels, numbered by seats.
        seats: those of the members, in the order of their coordinates.
        index: this member's coordinate.

    Attributes:
        sent_bytes: what this member has handed to others so far.
    """

    def __init__(self, transport: Transport, seats: Sequence[int], index: int) -> None:
        self.index = index
        self.size = len(seats)
        self.sent_bytes = 0
        self._transport = transport
        self._seats = tuple(seats)
        self._number = 0

    def begin(self, number: int) -> None:
        """A new stream begins, or the next attempt at one; ``number`` tells its messages from those
        of others."""
        self._number = number

    def outgoing(self) -> set[Edge]:
        """The channels on which other members may wait for this one."""
        return {self._edge(self.index, other) for other in self._others}

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        given = [*parts]
        for other in self._others:
            part = parts[other].detach()
            self.sent_bytes += part.numel() * part.element_size()
            # Between threads it is handed over as it is, and the caller may overwrite its own.
            given[other] = dense_copy(part)
        return self._swap(given)

    def tell(self, number: int) -> list[int]:
        return self._swap([number] * self.size)

    def hand_on(self, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        self._number += 1
        following = (self.index + 1) % self.size
        own = tuple(tensor.detach() for tensor in tensors)
        self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in own)
        self._transport.send(self._edge(self.index, following), self._number, own)
        return partial(self._taken, (self.index - 1) % self.size, self._number)

    def _taken(self, other: int, number: int) -> Any:
        """What a member has sent under a number."""
        return self._transport.recv(
            self._edge(other, self.index),
            number,
            f"rank {self._seats[self.index]}, waiting for its part of a layer that it shares with "
            f"rank {self._seats[other]}",
        )

    def _swap(self, given: Sequence[Any]) -> list[Any]:
        """Send each member what is for it, and take what each has for this one."""
        self._number += 1
        for other in self._others:
            self._transport.send(self._edge(self.index, other), self._number, given[other])
        return [
            given[other] if other == self.index else self._taken(other, self._number)
            for other in range(self.size)
        ]

    @property
    def _others(self) -> list[int]:
        # Beginning with the one behind, so that none gets everybody's message at once.
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _edge(self, source: int, target: int) -> Edge:
        return Edge(self._seats[source], self._seats[target], GROUP_TAG)
