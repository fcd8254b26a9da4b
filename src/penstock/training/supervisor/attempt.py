"""One attempt: all ranks from their start until the last of them has ended."""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import time
from functools import partial
from typing import NamedTuple

from penstock.engine.run.logbook import PAGE_BYTES, Logbook, Notes
from penstock.engine.transport.private_store import empty_store
from penstock.training.supervisor.causes import Cause, Ended, first_cause
from penstock.training.supervisor.forking import Forked, door, keep_store
from penstock.training.supervisor.job import Job
from penstock.training.supervisor.signals import Signals, held_back

_CAUSE_SECONDS = 1.0
"""How long to wait for the rank that failed first, when another has told of it and ended."""


class Rank(NamedTuple):
    """That this process is a rank now."""

    number: int


class Moments(NamedTuple):
    """When what happened to an attempt, as by ``time.monotonic``; ``None``: it did not.

    Attributes:
        started: ranks began to be forked.
        forked: all were there.
        built: the last rank had a pipeline, so that all had met.
        noticed: that the first one had failed.
        ended: all were gone.
    """

    started: float
    forked: float
    built: float | None
    noticed: float | None
    ended: float


class Account(NamedTuple):
    """What became of an attempt.

    Attributes:
        cause: why it ended; ``None`` if every rank ended well.
        interrupted: the signal to the supervisor that ended it.
        first_step: the number of the first minibatch that ranks trained on.
        moments: when what happened.
        num_ranks: how many there were.
    """

    cause: Cause | None
    interrupted: signal.Signals | None
    first_step: int | None
    moments: Moments
    num_ranks: int


class Attempt:
    """All ranks of a job, once.

    Args:
        job: what is asked for.
        number: how often ranks were started before.
        signals: those to this process.
    """

    def __init__(self, job: Job, number: int, signals: Signals) -> None:
        self._job = job
        self._number = number
        self._signals = signals
        self._memory = os.memfd_create("penstock-logbook", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, job.num_ranks * PAGE_BYTES)
        self._store = empty_store()
        self._running: dict[int, Forked] = {}
        self._ranks: list[Forked] = []
        self._failed: list[Ended] = []
        self._started = self._forked = time.monotonic()
        self._interrupted: signal.Signals | None = None
        self._ending = False
        self._patience = job.grace_seconds
        self._poll = select.poll()
        self._poll.register(signals.descriptor, select.POLLIN)

    def start(self) -> Rank | None:
        """Fork all ranks.

        Returns:
            In a rank, which number it has; in this process ``None``.

        Raises:
            OSError: there can be no more processes.
        """
        gc.freeze()  # what is there stays: collections in the ranks need not copy its pages
        listening = door()
        port = listening.getsockname()[1]
        with held_back():
            keeper = Forked.started(
                "the keeper of the job's store", self._signals, partial(keep_store, listening)
            )
            assert keeper is not None  # it never returns
            listening.close()  # the door is the keeper's now; ranks need not have it, too
            self._watch(keeper)
            for rank in range(self._job.num_ranks):
                forked = Forked.started(
                    f"rank {rank}", self._signals, partial(self._prepare, rank, port)
                )
                if forked is None:
                    return Rank(rank)
                self._ranks.append(forked)
                self._watch(forked)
        self._forked = time.monotonic()
        return None

    def _watch(self, forked: Forked) -> None:
        self._running[forked.ended] = forked
        self._poll.register(forked.ended, select.POLLIN)

    def _prepare(self, rank: int, port: int) -> None:
        """In a rank: hold nothing open of others, and say where it is."""
        for descriptor in self._running:
            os.close(descriptor)
        os.environ |= self._job.environment(rank, self._number, port, self._memory, self._store)

    def wait(self) -> Account:
        """Wait until all ranks have ended; if one has failed, or somebody wants the job to end, end
        the others."""
        while self._are_running() and not self._failed and self._interrupted is None:
            self._look(None)
        noticed = time.monotonic() if self._failed else None
        if self._failed:
            self._hear_of_cause()
        self._end(self._interrupted or signal.SIGTERM)
        notes = [self._notes(rank) for rank in range(self._job.num_ranks)]
        os.close(self._memory)
        os.close(self._store)
        built = [note.built for note in notes if note.built is not None]
        first_steps = [note.first_step for note in notes if note.first_step is not None]
        return Account(
            first_cause(self._failed) if self._failed else None,
            self._interrupted,
            min(first_steps, default=None),
            Moments(
                self._started,
                self._forked,
                max(built) if len(built) == len(notes) else None,
                noticed,
                time.monotonic(),
            ),
            self._job.num_ranks,
        )

    def kill(self) -> None:
        """End everything at once; for when something has gone wrong here."""
        for forked in self._running.values():
            forked.send(signal.SIGKILL)
        for forked in self._running.values():
            forked.take_away()
        self._running.clear()

    def _are_running(self) -> bool:
        return any(rank.ended in self._running for rank in self._ranks)

    def _look(self, seconds: float | None) -> None:
        """Wait until something has happened, and take note of it."""
        for descriptor, _ in self._poll.poll(None if seconds is None else 1000 * max(0.0, seconds)):
            if descriptor == self._signals.descriptor:
                self._come(self._signals.take())
            else:
                self._take_away(descriptor)

    def _come(self, signals: list[signal.Signals]) -> None:
        for number in signals:
            if self._interrupted is not None:
                self._patience = 0.0  # whoever asks twice does not want to wait
            self._interrupted = self._interrupted or number

    def _take_away(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        forked = self._running.pop(descriptor)
        code = forked.take_away()
        is_rank = forked in self._ranks
        if not self._ending and (code or not is_rank):
            rank = self._ranks.index(forked) if is_rank else None
            notes = None if rank is None else self._notes(rank)
            self._failed.append(Ended(forked.name, code, notes, rank))

    def _notes(self, rank: int) -> Notes:
        with mmap.mmap(self._memory, PAGE_BYTES, offset=rank * PAGE_BYTES) as page:
            return Logbook(page).read()

    def _hear_of_cause(self) -> None:
        """Wait a moment for the rank that failed first, if only others have ended so far."""
        end = time.monotonic() + _CAUSE_SECONDS
        while first_cause(self._failed).followed and self._are_running():
            remaining = end - time.monotonic()
            if remaining <= 0 or self._interrupted is not None:
                return
            self._look(remaining)

    def _end(self, number: signal.Signals) -> None:
        """End what still runs: ask, wait, kill."""
        self._ending = True
        self._send(number)
        asked = time.monotonic()
        while self._are_running():
            remaining = asked + self._patience - time.monotonic()
            if remaining <= 0:
                break
            self._look(remaining)
        self._send(signal.SIGKILL)
        while self._are_running():
            self._look(None)
        for forked in self._running.values():  # the keeper, which ranks may have needed to the end
            forked.send(signal.SIGKILL)
            forked.take_away()
        self._running.clear()

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.ended in self._running:
                rank.send(number)
