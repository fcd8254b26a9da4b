"""What passes between the stages of a rank, and to and from other ranks, while a stream lasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.engine.run.rank.program import SkipChannel
from penstock.engine.stage.microbatch_graph import Gradients
from penstock.engine.transport import Edge, Transport


class Letter(NamedTuple):
    """What one rank has sent to another.

    Attributes:
        edge: the way that it went.
        unit: what it belongs to.
        value: the gradients of the leaves of one value, ``None`` where nothing flows back.
    """

    edge: Edge
    unit: int
    value: Gradients


class Mail:
    """Keeps what one op has made until the op that needs it comes, here or on another rank.

    Units count from the beginning of the stream, so that segments take up each other's messages.

    Args:
        transport: to the other ranks.
        number: tells the messages of this attempt at a stream from all others.
        remembers: whether gradients are remembered while they are on their way, so that a stream
            can be saved with them: a stage takes them two frames later for each stage between.

    Attributes:
        number: as given.
        values: the inputs of forwards, by stage and unit.
        gradients: those of stages' outputs, by stage and unit.
    """

    def __init__(self, transport: Transport, number: int, *, remembers: bool = False) -> None:
        self.number = number
        self.values: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Gradients] = {}
        self._transport = transport
        self._skips: dict[tuple[int, int, bool], Any] = {}
        self._remembers = remembers
        self._on_their_way: dict[Edge, deque[Letter]] = {}

    def send(self, edge: Edge, unit: int, value: Any) -> None:
        """Hand something to another rank."""
        self._transport.send(edge, self.number + unit, value)
        if self._remembers and edge.source > edge.target:
            letters = self._on_their_way.get(edge)
            if letters is None:
                letters = deque(maxlen=2 * (edge.source - edge.target))
                self._on_their_way[edge] = letters
            letters.append(Letter(edge, unit, value))

    @property
    def letters(self) -> list[Letter]:
        """What is on its way back to other ranks, where that is remembered."""
        return [letter for letters in self._on_their_way.values() for letter in letters]

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
