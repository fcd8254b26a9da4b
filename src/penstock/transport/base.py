"""The transport interface: eager sends, receives with a deadline, and news of failures.

``send`` never waits for the receiver (beyond a bounded number of messages under way, which the
schedule check proves harmless); ``recv`` returns the value of exactly the microbatch asked for,
whatever its shapes, or raises before the deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple


class Edge(NamedTuple):
    """A one-way channel between two ranks.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        tag: tells channels between the same two ranks apart.
    """

    source: int
    target: int
    tag: int


class Transport(ABC):
    """One rank's end of all its channels."""

    @abstractmethod
    def send(self, edge: Edge, microbatch: int, value: Any) -> None:
        """Hand over a value (a tensor, or tensors nested in tuples, lists, dicts)."""

    @abstractmethod
    def recv(self, edge: Edge, microbatch: int, waiting: str) -> Any:
        """Wait for the value of ``microbatch``.

        Args:
            edge: from whom.
            microbatch: which one.
            waiting: what waits, for errors; for example ``"rank 0, 0RECV_B3"``.

        Raises:
            PeerError: the source died or failed.
            DeadlineError: nothing came in time.
        """

    @abstractmethod
    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        """Tell the ranks that may wait at the far ends of ``edges`` that this one failed, and why.

        Does not raise, and does not wait long for ranks that do not listen.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything sent has left; called at the end of a step."""
