"""The supervisor: it loads everything once, and forks the ranks from itself as often as needed.

An attempt is all ranks once, from their start until the last of them has ended.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from penstock.base.errors import RunError
from penstock.base.units import count_of
from penstock.engine.run.logbook import PAGE_BYTES, Logbook, Notes
from penstock.engine.transport.rendezvous import empty_store
from penstock.training.supervisor.job import SupervisedJob
from penstock.training.supervisor.processes import (
    Ended,
    FailureCause,
    Forked,
    Signals,
    door,
    first_cause,
    held_back,
    keep_store,
)

_CAUSE_SECONDS = 1.0
"""How long to wait for the rank that failed first, when another has told of it and ended."""


class Rank(NamedTuple):
    """That this process is a rank now."""

    number: int


class AttemptMoments(NamedTuple):
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


class AttemptRecord(NamedTuple):
    """The record of an attempt that is over.

    Attributes:
        cause: why it ended; ``None`` if every rank ended well.
        interrupted: the signal to the supervisor that ended it.
        first_step: the number of the first minibatch that ranks trained on.
        moments: when what happened.
        num_ranks: how many there were.
    """

    cause: FailureCause | None
    interrupted: signal.Signals | None
    first_step: int | None
    moments: AttemptMoments
    num_ranks: int


class Attempt:
    """All ranks of a job, once.

    Args:
        job: what is asked for.
        number: how often ranks were started before.
        signals: those to this process.
    """

    def __init__(self, job: SupervisedJob, number: int, signals: Signals) -> None:
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

    def wait(self) -> AttemptRecord:
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
        return AttemptRecord(
            first_cause(self._failed) if self._failed else None,
            self._interrupted,
            min(first_steps, default=None),
            AttemptMoments(
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


class SupervisionResult(NamedTuple):
    """The outcome of a job.

    Attributes:
        accounts: of each attempt, in order.
        code: the exit code for the whole.
        verdict: why it ended before all ranks ended well; empty if they did.
    """

    accounts: tuple[AttemptRecord, ...]
    code: int
    verdict: str = ""


def supervise(job: SupervisedJob, say: Callable[[str], None]) -> SupervisionResult | Rank:
    """Run a job, and start all ranks again when one has failed.

    This returns in every rank, too, where the caller must run the job's script and then end: an
    interpreter ends as usual only if its stack is unwound.

    Args:
        say: takes what happens, one line at a time.

    Raises:
        RunError: this system has no descriptors of processes.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        raise RunError(f"penstock run needs Linux, and this is {sys.platform}; use torchrun")
    load()
    signals = Signals()
    try:
        return _attempts(job, say, signals)
    finally:
        signals.give_back()


def _attempts(
    job: SupervisedJob, say: Callable[[str], None], signals: Signals
) -> SupervisionResult | Rank:
    accounts: list[AttemptRecord] = []
    causes: set[tuple[str, int | None]] = set()
    before: FailureCause | None = None
    for number in range(job.restarts + 1):
        attempt, supervisor = Attempt(job, number, signals), os.getpid()
        try:
            rank = attempt.start()
            if rank is not None:
                return rank
            account = attempt.wait()
        except BaseException:
            if os.getpid() == supervisor:
                attempt.kill()
            raise
        accounts.append(account)
        if account.interrupted is not None:
            code = 128 + account.interrupted
            return SupervisionResult((*accounts,), code, f"ended by {account.interrupted.name}")
        if account.cause is None:
            return SupervisionResult((*accounts,), 0)
        cause = account.cause
        if cause.own_fault and cause.known_as in causes:
            again = "the same error as before, so it would come again"
            return SupervisionResult((*accounts,), cause.code, f"{cause}: {again}")
        causes.add(cause.known_as)
        if number < job.restarts:
            goes_on, is_lost = "all ranks start again", _is_lost(before, cause)
            if job.elastic and job.num_ranks > 1 and is_lost:
                assert cause.killed is not None
                slot, job = job.slots[cause.killed], job.without(cause.killed)
                ranks = count_of(job.num_ranks, "rank")
                goes_on = f"slot {slot} is given up, and training goes on with {ranks}"
            say(f"{cause}; {goes_on} ({number + 1} of {job.restarts})")
            before = None if is_lost else cause  # of those that are left, each begins anew
    spent = f"; {job.restarts} restarts are spent" if job.restarts else ""
    return SupervisionResult((*accounts,), cause.code, f"{cause}{spent}")


def _is_lost(before: FailureCause | None, cause: FailureCause) -> bool:
    """Whether a slot is lost for good: its rank was killed from outside in two attempts, one after
    the other. Once may be bad luck, and whoever kills at random seldom hits the same rank again."""
    return before is not None and cause.killed is not None and before.killed == cause.killed


def load() -> None:
    """Load what scripts need, once here instead of once in every rank.

    Whether an accelerator is there is asked of its driver's library: torch's usual way would
    initialise it, and then it could not be used after a fork.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    import penstock.engine.tracing
    import penstock.planning.planner
    import penstock.training.pipeline
    import penstock.training.profiler  # noqa: F401

    # The first optimizer loads what takes a second.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
