"""The conductor of a rehearsal: lets all ranks begin at one moment, and says what failed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from penstock.base import errors
from penstock.base.errors import RunError
from penstock.training.rehearsal.rank import Failure
from penstock.training.rehearsal.reports import StepTimes

_LEAD_SECONDS, _LEAD_PER_RANK_SECONDS = 5e-3, 0.5e-3
_GRACE_SECONDS = 5.0


class Conductor:
    """Talks to the ranks of one rehearsal.

    Args:
        channels: to each rank; it answers once when it is ready and once after each step.
        watched: what becomes readable when something has ended that must not.
        death: says what that is; empty if nothing has.
    """

    def __init__(
        self,
        channels: Sequence[Connection],
        watched: Sequence[int] = (),
        death: Callable[[], str] = str,
    ) -> None:
        self._channels = channels
        self._watched = watched
        self._death = death

    def steps(self, num_steps: int, *, overlapping: bool = False) -> Iterator[StepTimes]:
        """Let the ranks perform, give the times of each step as it ends, and dismiss the ranks.

        Args:
            overlapping: each rank begins a step when its own last one has ended; otherwise all
                begin together.

        Raises:
            RunError: a rank has failed or died.
        """
        self._answers("before the first step")
        lead = _LEAD_SECONDS + _LEAD_PER_RANK_SECONDS * len(self._channels)
        if overlapping:
            start = time.perf_counter() + lead
            for _ in range(num_steps):
                self._say(start)
        for step in range(num_steps):
            if not overlapping:
                self._say(time.perf_counter() + lead)
            yield self._answers(f"in step {step + 1} of {num_steps}")
        self._say(None)

    def _say(self, start: float | None) -> None:
        for channel in self._channels:
            channel.send(start)

    def _answers(self, when: str) -> list[Any]:
        """One answer of each rank."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._channels):
            trouble = self._listen(answers, None)
            if trouble or any(isinstance(answer, Failure) for answer in answers.values()):
                raise self._cause(answers, when)
        return [answers[channel] for channel in self._channels]

    def _listen(self, answers: dict[Connection, Any], seconds: float | None) -> bool:
        """Take what answers have come; whether something has ended."""
        missing = [channel for channel in self._channels if channel not in answers]
        ready = wait([*missing, *self._watched], seconds)
        for channel in missing:
            if channel in ready:
                answers[channel] = _received(channel)
        return any(channel in self._watched for channel in ready)

    def _cause(self, answers: dict[Connection, Any], when: str) -> RunError:
        """What happened first: news of it may have come to a neighbour sooner than here."""
        end = time.monotonic() + _GRACE_SECONDS
        while True:
            failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
            first = next((failure for failure in failures if not failure.followed), None)
            if first is not None:
                return _error(first)
            if death := self._death():
                return RunError(f"{death} {when} of the rehearsal")
            remaining = end - time.monotonic()
            # All may have said that another has gone, before it is known how that one ended.
            if failures and remaining <= 0:
                return _error(failures[0])
            self._listen(answers, max(remaining, 0.01))


def _received(channel: Connection) -> Any:
    try:
        return channel.recv()
    except (EOFError, OSError):
        return Failure("RunError", "a rank has ended without a word", followed=True)


def _error(failure: Failure) -> RunError:
    """The error that a rank told of, in its own class if that is one of ours."""
    kind = getattr(errors, failure.kind, RunError)
    return kind(failure.message) if issubclass(kind, RunError) else RunError(failure.message)
