"""The interface of those who make workers run, and how failures of ranks are told."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from penstock.base.errors import InputError, PeerError, PenstockError, StageError
from penstock.base.values import number
from penstock.core.schedule.rounds import Segment
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.outcome import MinibatchOutcome
from penstock.engine.transport import Transport
from penstock.engine.transport.base import Patience

T = TypeVar("T")
StageStates = dict[int, dict[str, Tensor]]

_LEAST_STARTUP_SECONDS = 60.0
_PROOFS_NEEDED = 2


class Deadlines(NamedTuple):
    """How long ranks wait for each other, each time.

    Attributes:
        start: while the pipeline is built, and until every rank has been through a first minibatch:
            it may still be importing, initialising, or allocating.
        step: from then on.
    """

    start: Patience
    step: Patience

    @classmethod
    def of(cls, deadline_seconds: float, startup_seconds: float | None) -> Self:
        """The deadlines that the arguments of ``Pipeline`` set.

        Raises:
            InputError: one of them is not positive and finite.
        """
        _check_deadline("deadline_seconds", deadline_seconds)
        if startup_seconds is None:
            startup_seconds = max(_LEAST_STARTUP_SECONDS, 2 * deadline_seconds)
            startup_seconds = min(startup_seconds, threading.TIMEOUT_MAX)
        _check_deadline("startup_seconds", startup_seconds)
        return cls(Patience(startup_seconds, "startup_seconds"), Patience(deadline_seconds))


def _check_deadline(argument: str, seconds: float) -> None:
    try:
        number(argument, seconds, positive=True, most=threading.TIMEOUT_MAX)
    except InputError as error:
        raise InputError(
            f"{error}: without a deadline, a rank that hangs would hang all others"
        ) from None


class Driver(ABC, Generic[T]):
    """Makes all ranks run segments on minibatches, in the order in which they are submitted.

    ``T`` is what stands for a submitted minibatch until it is collected.

    Args:
        transports: those of the ranks in this process.
        deadlines: how long they wait.
    """

    def __init__(self, transports: Sequence[Transport], deadlines: Deadlines) -> None:
        self._transports = transports
        self._deadlines = deadlines
        self._num_proofs = Counter[bool]()

    def _be_patient(self, minibatch: Minibatch) -> None:
        """Wait as long as befits a minibatch: longer if some rank may not have been through one of
        its kind, to train or to evaluate."""
        known = self._num_proofs[minibatch.trains] >= _PROOFS_NEEDED
        for transport in self._transports:
            transport.patience = self._deadlines.step if known else self._deadlines.start

    def _went_through(self, minibatch: Minibatch, num_proofs: int) -> None:
        """A minibatch is done here. Two of them prove that every rank is through the first one,
        since the second's forwards come after that; so does one of which all ranks have told."""
        self._num_proofs[minibatch.trains] += num_proofs

    @abstractmethod
    def submit(self, segment: Segment, minibatch: Minibatch, position: StreamPosition) -> T:
        """Begin one minibatch.

        Args:
            position: where it stands in its stream.
        """

    @abstractmethod
    def collect(self, ticket: T) -> MinibatchOutcome:
        """Wait for a minibatch; every rank gets the same loss or outputs.

        Raises:
            RunError: the first failure of any rank.
        """

    def retire(self, ticket: T) -> MinibatchOutcome:
        """As ``collect``, where somebody has told of losses and outputs already: they may be
        left out."""
        return self.collect(ticket)

    @abstractmethod
    def is_done(self, ticket: T) -> bool:
        """Whether all ranks are through with a minibatch, as far as this process knows, and none
        has failed."""

    def break_off(self) -> None:
        """Stop what was submitted and will not be collected; by default nothing runs then."""

    @abstractmethod
    def gather(
        self, states: StageStates, expected: Segment, destination: int | None
    ) -> StageStates:
        """The states of all ranks' stages, where this process is their destination; elsewhere
        nothing. Every process must call it.

        Args:
            states: those of this process's stages, by number.
            expected: what a rank would run that does something else meanwhile.
            destination: the number of the process that gets them; ``None``: every one.

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
    """The text of an exception; its type's name if it has none, or fails when it is asked."""
    with suppress(Exception):
        if text := str(error):
            return text
    return type(error).__name__


def failure_notice(rank: int, error: BaseException) -> str:
    """The text for other ranks: the failure that came first, wherever that was."""
    if isinstance(error, PeerError):
        return error.reason
    return f"rank {rank} failed: {named(error).removeprefix(f'rank {rank}, ')}"


def loader_notice(rank: int, error: BaseException) -> str:
    """The notice for other ranks where a loader has raised behind the minibatch at hand."""
    raised = f"the loader of rank {rank} has raised an error behind this minibatch"
    return f"rank {rank} failed: {raised} ({named(error)})"


def named(error: BaseException) -> str:
    """The text of an exception, behind its type's name if it is not Penstock's own:
    ``SystemExit(3)`` says no more than 3."""
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
