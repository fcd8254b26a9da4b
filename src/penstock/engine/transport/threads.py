"""Transport between threads of one process: a tensor is handed over as it is, nothing is copied."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport.base import Edge, Patience, RankFailure, Transport, overdue


class _Message(NamedTuple):
    edge: Edge
    number: int
    value: Any


class _Farewell(NamedTuple):
    rank: int
    reason: str


_LETTING_GO_SECONDS = 1e-4
"""Waking a thread on an idle core takes half of it."""

_Notice = _Message | RankFailure | _Farewell


class ThreadExchange:
    """The inboxes of all ranks of one process.

    Args:
        num_ranks: how many ranks there are.
        deadline_seconds: how long a receive waits, unless its transport's ``patience`` is changed.
    """

    def __init__(self, num_ranks: int, deadline_seconds: float) -> None:
        self.inboxes: list[queue.SimpleQueue[_Notice]] = [
            queue.SimpleQueue() for _ in range(num_ranks)
        ]
        patience = Patience(deadline_seconds)
        self.transports = [ThreadTransport(self, rank, patience) for rank in range(num_ranks)]


class ThreadTransport(Transport):
    """One rank's end of a ``ThreadExchange``.

    Attributes:
        waits: whether it waits for a message now.
    """

    def __init__(self, exchange: ThreadExchange, rank: int, patience: Patience) -> None:
        self.patience = patience
        self.waits = False
        self._exchange = exchange
        self._rank = rank
        self._early: dict[tuple[Edge, int], Any] = {}
        self._farewells: dict[int, str] = {}
        self._lowest = 0
        self._closed: str | None = None

    def send(self, edge: Edge, number: int, value: Any) -> None:
        self._check_open()
        inbox = self._exchange.inboxes[edge.target]
        inbox.put(_Message(edge, number, value))
        receiver = self._exchange.transports[edge.target]
        if receiver.waits:
            # It would wait on, for this thread to let go of the interpreter in its next kernel.
            end = time.perf_counter() + _LETTING_GO_SECONDS
            while receiver.waits and not inbox.empty() and time.perf_counter() < end:
                time.sleep(0)

    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        self._check_open()
        wanted = (edge, number)
        patience = self.patience
        end = time.monotonic() + patience.seconds
        while wanted not in self._early:
            if farewell := self._farewells.get(edge.source):
                raise PeerError(f"{waiting}: {farewell}", farewell)
            notice = self._next(end)
            if notice is None:
                raise DeadlineError(overdue(waiting, edge.source, patience))
            self._take_in(notice, waiting)
        return self._early.pop(wanted)

    def first_of(self, expected: Sequence[tuple[Edge, int]], waiting: str) -> int:
        self._check_open()
        places = {wanted: place for place, wanted in enumerate(expected)}
        patience = self.patience
        end = time.monotonic() + patience.seconds
        while True:
            # What came first stands first.
            for wanted in self._early:
                if wanted in places:
                    return places[wanted]
            sources = [edge.source for edge, _ in expected]
            for source in sources:
                if farewell := self._farewells.get(source):
                    raise PeerError(f"{waiting}: {farewell}", farewell)
            notice = self._next(end)
            if notice is None:
                raise DeadlineError(overdue(waiting, sources[0], patience))
            self._take_in(notice, waiting)

    def _take_in(self, notice: _Notice, waiting: str) -> None:
        match notice:
            case _Message(edge, number, value):
                if number >= self._lowest:
                    self._early[edge, number] = value
            case RankFailure(reason, number):
                if number >= self._lowest:
                    raise PeerError(f"{waiting}: cancelled because {reason}", reason)
            case _Farewell(rank, reason):
                self._farewells[rank] = f"rank {rank} closed its pipeline ({reason})"

    def _next(self, end: float) -> _Notice | None:
        self.waits = True
        try:
            return self._exchange.inboxes[self._rank].get(timeout=max(0, end - time.monotonic()))
        except queue.Empty:
            return None
        finally:
            self.waits = False

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        # All ranks share this process, so none needs to hear it from a neighbour.
        self._tell_all(RankFailure(reason, self._lowest))

    def flush(self) -> None:
        """Nothing is ever under way: the receiver's inbox has it at once."""

    def discard(self, before: int) -> None:
        self._lowest = max(self._lowest, before)
        for key in [key for key in self._early if key[1] < self._lowest]:
            del self._early[key]

    def close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._early.clear()
            self._tell_all(_Farewell(self._rank, reason))

    def _tell_all(self, notice: _Notice) -> None:
        for rank, inbox in enumerate(self._exchange.inboxes):
            if rank != self._rank:
                inbox.put(notice)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RunError(f"rank {self._rank} has closed its pipeline ({self._closed})")

    def reset(self) -> None:
        """Forget messages of a failed step."""
        self._early.clear()
        inbox = self._exchange.inboxes[self._rank]
        while not inbox.empty():
            inbox.get_nowait()
