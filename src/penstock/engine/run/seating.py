"""Seats: one for each member of each rank, and how a member's rank talks from its seat.

A rank of the plan with t tensor ranks has t seats in a row. The ops of ranks, their edges and their
numbers are those of the plan; only here a message from one rank to another becomes one between
seats. Members of equal coordinate exchange what groups of equal size exchange. Between groups of
different sizes, ``tensor.routes`` says who sends which slice to whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from penstock.engine.model import tree
from penstock.engine.tensor.group import Bounds, ChannelGroup, dense_copy, joined, memory_order
from penstock.engine.tensor.layouts import Layouts
from penstock.engine.tensor.unequal_groups import receivers, senders, slices
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.base import SHARED_TAGS, OnTop


class RankSeat:
    """Where a member of a rank sits.

    Args:
        rank: of the plan.
        coordinate: the member's in the rank's group, from 0.
        sizes: how many members the group of each rank has; by default every rank sits alone.

    Attributes:
        rank, coordinate, sizes: as given.
        size: how many members its group has.
        number: the seat's among all; processes are numbered so.
    """

    def __init__(self, rank: int, coordinate: int = 0, sizes: tuple[int, ...] = ()) -> None:
        self.rank = rank
        self.coordinate = coordinate
        self.sizes = sizes
        self.size = sizes[rank] if sizes else 1
        self.number = self._number(rank, coordinate)

    @classmethod
    def all_of(cls, sizes: tuple[int, ...]) -> list[RankSeat]:
        """All seats in their order.

        Args:
            sizes: of the group of each rank.
        """
        alone = max(sizes) == 1
        return [
            cls(rank, coordinate, () if alone else sizes)
            for rank, size in enumerate(sizes)
            for coordinate in range(size)
        ]

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """By rank, the number of its first seat; empty where every rank sits alone."""
        return tuple(accumulate(self.sizes[:-1], initial=0)) if self.sizes else ()

    def first(self, rank: int) -> int:
        """The number of a rank's first seat."""
        return self.firsts[rank] if self.sizes else rank

    def _number(self, rank: int, coordinate: int) -> int:
        return self.first(rank) + coordinate

    def edges(self, edge: Edge, *, divided: bool = False) -> list[Edge]:
        """From a channel between two ranks, of which this is one, to those between its own seat and
        seats of the other.

        Args:
            divided: whether what travels there is, so that all members of both groups exchange.
        """
        if not self.sizes:
            return [edge]
        away = edge.source == self.rank
        other = edge.target if away else edge.source
        size = self.sizes[other]
        divided = divided and size != self.size
        own = self.coordinate
        if away:
            others = receivers(own, self.size, size, divided=divided)
            return [Edge(self.number, self._number(other, member), edge.tag) for member in others]
        others = senders(size, own, divided=divided)
        return [Edge(self._number(other, member), self.number, edge.tag) for member in others]

    def group(self, transport: Transport) -> ChannelGroup | None:
        """The member's end of its group; ``None`` if it sits alone.

        Args:
            transport: its channels, numbered by seats.
        """
        if self.size == 1:
            return None
        first = self.first(self.rank)
        return ChannelGroup(transport, range(first, first + self.size), self.coordinate)


class MeshTransport(OnTop):
    """One member's messages from and to other ranks.

    Args:
        inner: carries messages between seats.
        seat: the member's.
        group: its end of its group.
        divided: by tags, along which dimension values are divided that groups hand over.

    Attributes:
        seat, group: as given.
    """

    def __init__(
        self,
        inner: Transport,
        seat: RankSeat,
        group: ChannelGroup | None,
        divided: Mapping[int, Layouts],
    ) -> None:
        super().__init__(inner)
        self.seat = seat
        self.group = group
        self._divided = divided

    def edges(self, edge: Edge) -> list[Edge]:
        """Those between seats that stand for one between ranks."""
        return self.seat.edges(edge, divided=self._divided.get(edge.tag) is not None)

    def send(self, edge: Edge, number: int, value: Any) -> None:
        dim, edges = self._divided.get(edge.tag), self.edges(edge)
        size = self.seat.sizes[edge.target]
        # Layouts of single leaves come between groups of equal size only.
        if dim is None or isinstance(dim, tuple) or size == self.seat.size:
            for place, between in enumerate(edges):
                # Between threads gradients are handed over as they are, and who has handed them
                # writes the sums there when it has these: from the first one, who has then read
                # them. The others may not have.
                answers = place == 0 or edge.tag < SHARED_TAGS
                self.inner.send(between, number, value if answers else _copied(value))
            return
        pieces = self._pieces(value, dim, size)
        for between, piece in zip(edges, pieces, strict=True):
            self.inner.send(between, number, piece)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        edges = self.edges(edge)
        values = [
            self.inner.recv(between, number, self._told(waiting, between)) for between in edges
        ]
        if len(values) == 1:
            return values[0]
        dim = self._divided[edge.tag]
        assert isinstance(dim, int)  # otherwise there is one sender
        leaves, structure = tree.flatten(values[0])
        columns = zip(*(tree.flatten(value)[0] for value in values), strict=True)
        joined = [_joined(column, dim) for column in columns]
        return tree.unflatten(joined, structure) if leaves else values[0]

    def _told(self, waiting: str, edge: Edge) -> str:
        """The text of a wait, in both numbers of ranks: errors of what is below count by seats."""
        if not self.seat.sizes:
            return waiting
        return (
            f"{waiting} (ranks of the plan; counted by devices, rank {edge.target} waits for rank "
            f"{edge.source})"
        )

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        self.inner.fail(reason, [between for edge in edges for between in self.edges(edge)])

    def _pieces(self, value: Any, dim: int, size: int) -> list[Any]:
        """A value, cut for the members of another group."""
        leaves, structure = tree.flatten(value)
        cut = [self._cut(leaf, dim, size) for leaf in leaves]
        return [tree.unflatten(list(piece), structure) for piece in zip(*cut, strict=True)] or [
            value
        ] * size

    def _cut(self, leaf: Any, dim: int, size: int) -> list[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf] * size
        length, own = leaf.shape[dim], self.seat.coordinate
        lengths = [length]
        if self.group is not None:
            lengths = self.group.tell(length)
        return [
            tree.apart(leaf, partial(_slice, dim=dim, within=piece.within))
            for piece in slices(lengths, size)
            if piece.source == own
        ]


def _copied(value: Any) -> Any:
    return tree.replace(Tensor, Tensor.clone, value)


def _slice(tensor: Tensor, dim: int, within: Bounds) -> Tensor:
    return dense_copy(tensor.narrow(dim, within.start, within.length), memory_order(tensor))


def _joined(pieces: tuple[Any, ...], dim: int) -> Any:
    if not isinstance(pieces[0], Tensor):
        return pieces[0]
    rest = [piece.detach() for piece in pieces[1:]]
    return tree.apart(pieces[0], lambda first: joined([first, *rest], dim))


def seated(rank: int, transport: Transport) -> tuple[RankSeat, Transport]:
    """Where a rank's transport sits, and the channels between seats under it."""
    if isinstance(transport, MeshTransport):
        return transport.seat, transport.inner
    return RankSeat(rank), transport
