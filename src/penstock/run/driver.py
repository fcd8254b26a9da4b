"""The interface between the façade and those who make workers run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from torch import Tensor

from penstock.errors import PeerError, PenstockError, StageError
from penstock.run.minibatch import Minibatch
from penstock.run.outcome import Outcome
from penstock.schedule.segment import Segment

T = TypeVar("T")
States = dict[int, dict[str, Tensor]]


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
    def gather(self, states: States) -> States:
        """The states of all ranks' stages, where this process is rank 0; elsewhere nothing. Every
        process must call it.

        Args:
            states: of this process's stages, by number.

        Raises:
            RunError: another process did not call it.
        """

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
    return f"rank {rank} failed: {told(error)}"


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
