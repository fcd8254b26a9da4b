"""Drive workers as threads of this process: nothing to launch, nothing to pickle.

torch releases the interpreter lock inside its operations, so stages compute at the same time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial

import torch

from penstock.errors import DeadlineError, PeerError, RunError
from penstock.run import outcome
from penstock.run.driver import Driver, failure_notice
from penstock.run.outcome import Outcome
from penstock.run.worker import Harvest, Minibatch, Worker
from penstock.schedule import Schedule
from penstock.transport import ThreadTransport

_GRACE_SECONDS = 5.0

Task = Callable[[], Harvest]


class ThreadDriver(Driver):
    """One thread per rank, for the life of the pipeline.

    Args:
        workers: in the order of their ranks; their transports are ``ThreadTransport``.
        num_threads: torch's intra-op threads of each worker.
    """

    def __init__(self, workers: Sequence[Worker], num_threads: int) -> None:
        self._workers = workers
        self._num_threads_before = torch.get_num_threads()
        self._inboxes: list[queue.SimpleQueue[tuple[Task, Future[Harvest]] | None]] = []
        self._threads = []
        self._unusable: str | None = None
        for worker in workers:
            inbox: queue.SimpleQueue[tuple[Task, Future[Harvest]] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox, num_threads),
                name=f"penstock rank {worker.rank}",
                daemon=True,
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def run(self, schedule: Schedule, minibatch: Minibatch) -> Outcome:
        if self._unusable:
            raise RunError(f"{self._unusable}; restore the weights and build a new Pipeline")
        # Until we know better: an interrupt may come at any line.
        self._unusable = "the last step was broken off"
        updates_before = self._num_updates()
        futures: list[Future[Harvest]] = [Future() for _ in self._workers]
        try:
            for worker, inbox, future in zip(self._workers, self._inboxes, futures, strict=True):
                inbox.put((partial(_run, worker, schedule, minibatch), future))
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            for worker in self._workers:
                worker.transport.fail("the run was interrupted", ())
            self._come_to_rest(futures, updates_before)
            raise
        if any(not future.done() or future.exception() for future in futures):
            self._come_to_rest(futures, updates_before)
            raise self._cause(futures)
        self._unusable = None
        harvests = [future.result() for future in futures]
        losses = {k: loss for harvest in harvests for k, loss in harvest.losses.items()}
        outputs = {k: value for harvest in harvests for k, value in harvest.outputs.items()}
        records = [harvest.records for harvest in harvests]
        return Outcome(
            outcome.weighted_sum(losses, minibatch.weights),
            outcome.joined(outputs),
            outcome.timeline(records, schedule.name),
        )

    def _num_updates(self) -> int:
        return sum(worker.num_updates for worker in self._workers)

    def _come_to_rest(self, futures: list[Future[Harvest]], updates_before: int) -> None:
        """Let cancelled workers stop; after a clean stop the next step may run."""
        _, running = wait(futures, timeout=_GRACE_SECONDS)
        stuck = [rank for rank, future in enumerate(futures) if future in running]
        if stuck:
            self._unusable = f"rank {stuck[0]} still runs an op of the failed step"
            return
        self._reset()
        self._unusable = (
            "in the failed step some stages were updated and others were not"
            if self._num_updates() != updates_before
            else None
        )

    def _cause(self, futures: list[Future[Harvest]]) -> BaseException:
        """The failure that made the others fail."""
        errors = [e for f in futures if f.done() and (e := f.exception()) is not None]
        cause = next((error for error in errors if not isinstance(error, PeerError)), errors[0])
        if isinstance(cause, DeadlineError) and self._unusable:
            # Who waited may have waited for a rank that itself waited for the stuck one.
            return DeadlineError(f"{cause} ({self._unusable})")
        return cause

    def _reset(self) -> None:
        for worker in self._workers:
            worker.forget()
            if isinstance(worker.transport, ThreadTransport):
                worker.transport.reset()

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        end = time.monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        torch.set_num_threads(self._num_threads_before)


def _run(worker: Worker, schedule: Schedule, minibatch: Minibatch) -> Harvest:
    try:
        return worker.run(schedule, minibatch)
    except BaseException as error:
        worker.transport.fail(failure_notice(worker.rank, error), ())
        raise


def _serve(inbox: queue.SimpleQueue[tuple[Task, Future[Harvest]] | None], num_threads: int) -> None:
    # The setting belongs to the thread that makes it.
    torch.set_num_threads(num_threads)
    while (work := inbox.get()) is not None:
        _fulfil(*work)
        # While this thread waits, it must not keep the last step's outputs alive.
        del work


def _fulfil(task: Task, future: Future[Harvest]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
