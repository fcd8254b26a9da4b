"""A group whose members talk over the transport that joins all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.engine.tensor.group import Group
from penstock.engine.tensor.memory_order import dense_copy
from penstock.engine.transport import Edge, Transport
from penstock.engine.transport.tags import GROUP_TAG


class ChannelGroup(Group):
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

    def _swap(self, given: Sequence[Any]) -> list[Any]:
        """Send each member what is for it, and take what each has for this one."""
        self._number += 1
        for other in self._others:
            self._transport.send(self._edge(self.index, other), self._number, given[other])
        seat = self._seats[self.index]
        return [
            given[other]
            if other == self.index
            else self._transport.recv(
                self._edge(other, self.index),
                self._number,
                f"rank {seat}, waiting for its part of a layer that it shares with "
                f"rank {self._seats[other]}",
            )
            for other in range(self.size)
        ]

    @property
    def _others(self) -> list[int]:
        # Beginning with the one behind, so that none gets everybody's message at once.
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _edge(self, source: int, target: int) -> Edge:
        return Edge(self._seats[source], self._seats[target], GROUP_TAG)
