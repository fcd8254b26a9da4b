"""What passes between the stages of a rank, and to and from other ranks, while a stream lasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.run.rank.program import SkipChannel
from penstock.stage.microbatch_graph import Gradients
from penstock.transport import Edge, Transport


class Mail:
    """Keeps what one op has made until the op that needs it comes, here or on another rank.

    Units count from the beginning of the stream, so that segments take up each other's messages.

    Args:
        transport: to the other ranks.
        number: tells the messages of this attempt at a stream from all others.

    Attributes:
        number: as given.
        values: the inputs of forwards, by stage and unit.
        gradients: those of stages' outputs, by stage and unit.
    """

    def __init__(self, transport: Transport, number: int) -> None:
        self.number = number
        self.values: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Gradients] = {}
        self._transport = transport
        self._skips: dict[tuple[int, int, bool], Any] = {}

    def send(self, edge: Edge, unit: int, value: Any) -> None:
        """Hand something to another rank."""
        self._transport.send(edge, self.number + unit, value)

    def receive(self, edge: Edge, unit: int, waiting: str) -> Any:
        """Wait for something from another rank; ``waiting`` says for what, in errors."""
        return self._transport.recv(edge, self.number + unit, waiting)

    def skips(self, channels: Iterable[SkipChannel], unit: int) -> dict[str, Any]:
        """What comes over some channels, by the keys of the skips."""
        return {channel.route.key: self._take(channel, unit) for channel in channels}

    def hand_skips(
        self, channels: Iterable[SkipChannel], unit: int, skips: Mapping[str, Any]
    ) -> None:
        """Let skips, or their gradients, go where their channels lead."""
        for channel in channels:
            value = skips[channel.route.key]
            if channel.edge is None:
                self._skips[channel.route.number, unit, channel.backward] = value
            else:
                # The chain carries the same microbatch there later, so nobody waits for it.
                self.send(channel.edge, unit, value)

    def _take(self, channel: SkipChannel, unit: int) -> Any:
        if channel.edge is None:
            return self._skips.pop((channel.route.number, unit, channel.backward))
        return self.receive(channel.edge, unit, channel.waiting)
