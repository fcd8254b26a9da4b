"""Seats: one for each member of each rank, and how a member's rank talks from its seat.

A rank of the plan with t tensor ranks has t seats in a row. Members of equal coordinate exchange
what their ranks exchange, so the ops, their edges and their numbers are those of the plan; only
here an edge between two ranks becomes one between two seats.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.tensor.channel_group import ChannelGroup
from penstock.transport import Edge, Transport
from penstock.transport.base import OnTop


class Seat(NamedTuple):
    """Where a member of a rank sits.

    Attributes:
        rank: of the plan.
        coordinate: the member's in the rank's group, from 0.
        size: how many members the group has.
    """

    rank: int
    coordinate: int = 0
    size: int = 1

    @property
    def number(self) -> int:
        """The seat's number among all; processes are numbered so."""
        return self.rank * self.size + self.coordinate

    @classmethod
    def numbered(cls, number: int, size: int) -> Seat:
        """The seat with a number, where every group has ``size`` members."""
        return cls(*divmod(number, size), size)

    def edge(self, edge: Edge) -> Edge:
        """From a channel between two ranks to that between members of this coordinate."""
        source, target = (self._replace(rank=rank) for rank in (edge.source, edge.target))
        return edge if self.size == 1 else Edge(source.number, target.number, edge.tag)

    def group(self, transport: Transport) -> ChannelGroup | None:
        """The member's end of its group; ``None`` if it sits alone.

        Args:
            transport: its channels, numbered by seats.
        """
        if self.size == 1:
            return None
        first = self.rank * self.size
        return ChannelGroup(transport, range(first, first + self.size), self.coordinate)

    def plane(self, transport: Transport) -> Transport:
        """Its channels, numbered by the plan's ranks."""
        return transport if self.size == 1 else PlaneTransport(transport, self)


class PlaneTransport(OnTop):
    """What one member of a rank exchanges with the members of equal coordinate of other ranks.

    Args:
        inner: carries messages between seats.
        seat: the member's.

    Attributes:
        seat: as given.
    """

    def __init__(self, inner: Transport, seat: Seat) -> None:
        super().__init__(inner)
        self.seat = seat

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self.inner.send(self.seat.edge(edge), number, value)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        return self.inner.recv(self.seat.edge(edge), number, waiting)

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        self.inner.fail(reason, map(self.seat.edge, edges))


def seated(rank: int, transport: Transport) -> tuple[Seat, Transport]:
    """Where a rank's transport sits, and the channels between seats under it."""
    if isinstance(transport, PlaneTransport):
        return transport.seat, transport.inner
    return Seat(rank), transport
