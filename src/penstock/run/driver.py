"""The interface between the façade and those who make workers run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from penstock.errors import PeerError, PenstockError, StageError
from penstock.run.minibatch import Minibatch
from penstock.run.outcome import Outcome
from penstock.schedule.segment import Segment

T = TypeVar("T")


class Driver(ABC, Generic[T]):
    """Makes all ranks run segments on minibatches, in the order in which they are submitted.

    ``T`` is what stands for a submitted minibatch until it is collected.
    """

    @abstractmethod
    def submit(self, segment: Segment, minibatch: Minibatch) -> T:
        """Begin one minibatch."""

    @abstractmethod
    def collect(self, ticket: T) -> Outcome:
        """Wait for a minibatch; every rank gets the same loss or outputs.

        Raises:
            RunError: the first failure of any rank.
        """

    def run(self, segment: Segment, minibatch: Minibatch) -> Outcome:
        """Run one minibatch from beginning to end."""
        return self.collect(self.submit(segment, minibatch))

    @abstractmethod
    def close(self, why: str = "") -> None:
        """End the workers; may be called twice.

        Args:
            why: what made this process leave, for those that still wait for it.
        """


def told(error: BaseException) -> str:
    """What an exception says; its type's name if it says nothing, or fails when it is asked."""
    with suppress(Exception):
        if text := str(error):
            return text
    return type(error).__name__


def failure_notice(rank: int, error: BaseException) -> str:
    """What to tell other ranks: what happened first, wherever that was."""
    if isinstance(error, PeerError):
        return error.reason
    return f"rank {rank} failed: {named(error)}"


def named(error: BaseException) -> str:
    """What an exception says, behind its type's name if it is not Penstock's own: ``SystemExit(3)``
    says no more than 3."""
    text, kind = told(error), type(error).__name__
    return text if isinstance(error, PenstockError) or text == kind else f"{kind}: {text}"


@contextmanager
def naming(rank: int, step: int) -> Iterator[None]:
    """Name the rank of an error that arose beside its ops, for example in a scheduler's step."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        named = StageError(f"rank {rank}, step {step}: {type(error).__name__}: {told(error)}")
        for note in getattr(error, "__notes__", ()):
            named.add_note(note)
        raise named from error
