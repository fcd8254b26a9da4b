"""The transport interface: eager sends, receives with a deadline, and news of failures.

``send`` never waits for the receiver (beyond a bounded number of messages under way, which the
schedule check proves harmless); ``recv`` returns exactly the message asked for, whatever its
shapes, or raises before the deadline.

Tags tell the channels between two ranks apart. There is one list of them, so that no two mean the
same. Tags below these are the chain's own, two per stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.engine.device.queue import DeviceQueue

REPORT_TAG = 1 << 20
AGREEMENT_TAG = REPORT_TAG + 1
END_TAG = REPORT_TAG + 2
STATE_TAG = REPORT_TAG + 3
ORDER_TAG = REPORT_TAG + 4
GROUP_TAG = REPORT_TAG + 5
"""Of the exchanges of a group's members while they share a layer."""
SKIP_TAGS = 1 << 21
"""The first of them: two per skip."""
SHARED_TAGS = 1 << 22
"""The first of them: sixteen per purpose of a message and group of shared weights."""
RENEWED_TAGS = 1 << 24
"""The first of those of weights that were updated for others: sixteen per group of weights. It may
be in the next minibatch that they are awaited."""

FIRST_EXCHANGE = 1 << 60
"""Numbers of messages that belong to no microbatch: above those of all that do."""


LARGEST_NUMBER = 2**62 - 1
NOTE_BYTES = 40


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


class Noted(NamedTuple):
    """A value with a note: a few bytes that may differ with every message, and cost nothing, where
    a number in the value itself would make each message one of a new kind.

    It arrives as it was sent, if its note is not empty.

    Attributes:
        value: see ``Transport.send``.
        note: exactly ``NOTE_BYTES`` of them, not all zero; or none.
    """

    value: Any
    note: bytes


class Patience(NamedTuple):
    """How long a message may take, and what gives it longer.

    Attributes:
        seconds: the most that it may take.
        argument: the name of the argument that says so, for errors.
    """

    seconds: float
    argument: str = "deadline_seconds"


class RankFailure(NamedTuple):
    """The words of a rank that fails to all others.

    Attributes:
        reason: why it failed.
        number: the lowest that it had not discarded.
    """

    reason: str
    number: int


class Transport(ABC):
    """One rank's end of all its channels; used by one thread.

    Attributes:
        patience: how long a message may take; it may be changed between two calls, also by another
            thread.
    """

    patience: Patience

    @property
    def queue(self) -> DeviceQueue | None:
        """The rank's work on its device, which what is received joins; ``None`` where all is done
        in main memory."""
        return None

    @abstractmethod
    def send(self, edge: Edge, number: int, value: Any) -> None:
        """Hand over a value (a tensor, or tensors nested in tuples, lists, dicts).

        Args:
            edge: to whom.
            number: the message's, 0 … ``LARGEST_NUMBER``; both ends agree on it.
            value: its tensors may be overwritten as soon as this returns, except between threads,
                which hand over tensors as they are, and on an accelerator, from which they leave
                later: there, only behind something that the target has made of them. May be
                ``Noted``.

        Raises:
            PeerError: the target died, or has closed its pipeline.
            DeadlineError: too many messages are under way, and none was taken in time.
            RunError: there is no memory for the message, or it holds an object that cannot travel.
        """

    @abstractmethod
    def recv(self, edge: Edge, number: int, waiting: str) -> Any:
        """Wait for the message with a number; others of the edge may come before or after.

        Args:
            edge: from whom.
            number: the message's.
            waiting: what waits, for errors; for example ``"rank 0, waiting at 0RECV_B3"``.

        Returns:
            The value. Its tensors belong to the caller, who may overwrite them.

        Raises:
            PeerError: the source died, failed or has closed its pipeline.
            DeadlineError: nothing came in time.
            RunError: what came is no message.
        """

    def has_come(self, edge: Edge, number: int) -> bool | None:
        """Whether ``recv`` would not wait: the message is here, or will never be; ``None`` where
        nobody can tell without waiting."""
        return None

    def first_of(self, expected: Sequence[tuple[Edge, int]], waiting: str) -> int | None:
        """Wait until one of several messages is here, each an edge and a number.

        Returns:
            Which of them came first; ``None`` where nobody can tell, and nothing was waited for.

        Raises:
            PeerError, DeadlineError: as ``recv``, of any of them.
        """
        return None

    def failure_heard(self) -> str:
        """Why another rank has failed, as far as is known without waiting, for whoever waits for
        something that does not come through this transport; empty if none has, or nobody can
        tell."""
        return ""

    @abstractmethod
    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        """Tell the ranks that may wait at the far ends of ``edges`` that this one failed, and why.

        Does not raise, and does not wait long for ranks that do not listen.
        """

    def hand_over(self) -> None:  # noqa: B027 - most hold back nothing
        """Let go of messages that are held back until their tensors have left an accelerator; this
        waits for that. Call it before anything else that other ranks may wait for."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything sent has left; called at the end of a step."""

    @abstractmethod
    def discard(self, before: int) -> None:
        """Forget messages whose number is below ``before``, arrived or still to come.

        So too failures of ranks that had not yet called this with a number as high. Call it on
        every rank after a step was given up, and use higher numbers from then on.
        """

    def reset(self) -> None:  # noqa: B027 - most have nothing to forget
        """Forget what has come, where all ranks have given up a step and none sends any more: so it
        is between threads. Other transports need nothing but ``discard``."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Leave for good: who waits for this rank gets a ``PeerError`` with the reason at once.

        Received tensors stay valid. Does not raise and does not wait; may be called twice.
        """


class OnTop(Transport):
    """A transport on top of another, which does all that it does not do itself.

    Args:
        inner: the transport below.

    Attributes:
        inner: as given.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def queue(self) -> DeviceQueue | None:
        return self.inner.queue

    @property
    def patience(self) -> Patience:
        return self.inner.patience

    @patience.setter
    def patience(self, patience: Patience) -> None:
        self.inner.patience = patience

    def has_come(self, edge: Edge, number: int) -> bool | None:
        return self.inner.has_come(edge, number)

    def first_of(self, expected: Sequence[tuple[Edge, int]], waiting: str) -> int | None:
        return self.inner.first_of(expected, waiting)

    def failure_heard(self) -> str:
        return self.inner.failure_heard()

    def fail(self, reason: str, edges: Iterable[Edge]) -> None:
        self.inner.fail(reason, edges)

    def hand_over(self) -> None:
        self.inner.hand_over()

    def flush(self) -> None:
        self.inner.flush()

    def discard(self, before: int) -> None:
        self.inner.discard(before)

    def reset(self) -> None:
        self.inner.reset()

    def close(self, reason: str) -> None:
        self.inner.close(reason)


def gone(rank: int | str) -> str:
    """Words on a rank that will not answer any more."""
    return f"rank {rank} is gone (its process ended or was killed)"


def overdue(waiting: str, rank: int, patience: Patience) -> str:
    """Words on a rank that did not answer in time: it is slow, or it has nothing to say.

    Args:
        waiting: what waits for it.
        rank: the one that did not answer.
        patience: how long it had.
    """
    return (
        f"{waiting}: rank {rank} did not answer within {patience.seconds:g} s; if its work takes "
        f"longer, raise {patience.argument}; if it was given fewer minibatches or microbatches, "
        "give every rank the same"
    )
