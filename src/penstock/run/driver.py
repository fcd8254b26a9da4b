"""The interface between the façade and those who make workers run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.errors import PeerError
from penstock.run.outcome import Outcome
from penstock.run.worker import Minibatch
from penstock.schedule import Schedule


class Driver(ABC):
    """Makes all ranks run a schedule on a minibatch."""

    @abstractmethod
    def run(self, schedule: Schedule, minibatch: Minibatch) -> Outcome:
        """Run one minibatch; every rank gets the same loss or outputs.

        Raises:
            RunError: the first failure of any rank.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers; may be called twice."""


def failure_notice(rank: int, error: BaseException) -> str:
    """What to tell other ranks: what happened first, wherever that was."""
    if isinstance(error, PeerError):
        return error.reason
    return f"rank {rank} failed: {error or type(error).__name__}"
