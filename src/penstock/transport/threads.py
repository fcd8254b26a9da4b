"""Transport between threads of one process: a tensor is handed over as it is, nothing is copied."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.errors import DeadlineError, PeerError
from penstock.transport.base import Edge, Transport


class _Message(NamedTuple):
    edge: Edge
    microbatch: int
    value: Any


class _Failure(NamedTuple):
    reason: str


class ThreadExchange:
    """The inboxes of all ranks of one process.

    Args:
        num_ranks: how many.
        deadline_seconds: how long a receive waits.
    """

    def __init__(self, num_ranks: int, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self.inboxes: list[queue.SimpleQueue[_Message | _Failure]] = [
            queue.SimpleQueue() for _ in range(num_ranks)
        ]
        self.transports = [ThreadTransport(self, rank) for rank in range(num_ranks)]


class ThreadTransport(Transport):
    """One rank's end of a ``ThreadExchange``."""

    def __init__(self, exchange: ThreadExchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._early: dict[tuple[Edge, int], Any] = {}

    def send(self, edge: Edge, microbatch: int, value: Any) -> None:
        self._exchange.inboxes[edge.target].put(_Message(edge, microbatch, value))

    def recv(self, edge: Edge, microbatch: int, waiting: str) -> Any:
        wanted = (edge, microbatch)
        if wanted in self._early:
            return self._early.pop(wanted)
        end = time.monotonic() + self._exchange.deadline_seconds
        while True:
            message = self._next(end, edge, waiting)
            if isinstance(message, _Failure):
                raise PeerError(f"{waiting}: cancelled because {message.reason}", message.reason)
            if (message.edge, message.microbatch) == wanted:
                return message.value
            self._early[message.edge, message.microbatch] = message.value

    def _next(self, end: float, edge: Edge, waiting: str) -> _Message | _Failure:
        try:
            return self._exchange.inboxes[self._rank].get(timeout=max(0, end - time.monotonic()))
        except queue.Empty:
            raise DeadlineError(
                f"{waiting}: nothing came from rank {edge.source} within "
                f"{self._exchange.deadline_seconds:g} s; if its work takes longer, raise "
                "deadline_seconds"
            ) from None

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        # All ranks share this process, so none needs to hear it from a neighbour.
        for rank, inbox in enumerate(self._exchange.inboxes):
            if rank != self._rank:
                inbox.put(_Failure(reason))

    def flush(self) -> None:
        """Nothing is ever under way: the receiver's inbox has it at once."""

    def reset(self) -> None:
        """Forget messages of a failed step."""
        self._early.clear()
        inbox = self._exchange.inboxes[self._rank]
        while not inbox.empty():
            inbox.get_nowait()
