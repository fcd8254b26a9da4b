"""Drive workers as threads of this process: nothing to launch, nothing to pickle.

torch releases the interpreter lock inside its operations, so stages compute at the same time.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.core.schedule.rounds import Segment
from penstock.engine.device.queue import taken_up
from penstock.engine.run.drive.driver import Deadlines, Driver, StageStates, failure_notice, naming
from penstock.engine.run.drive.ticket import ThreadTicket
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition
from penstock.engine.run.outcome import MinibatchOutcome, RankRecord
from penstock.engine.run.rank.worker import Worker, moments_of
from penstock.engine.transport import Edge
from penstock.engine.transport.base import END_TAG, FIRST_EXCHANGE, LARGEST_NUMBER

_GRACE_SECONDS = 5.0
_BROKEN_OFF = "the last step was broken off"
"""No further step is possible if one is interrupted, which may happen at any line, until all ranks
have come to rest."""


T = TypeVar("T")
Inbox = queue.SimpleQueue[Callable[[], None] | None]


def _nobody(*_: object) -> None:
    """Hears of nothing."""


class ThreadDriver(Driver[ThreadTicket]):
    """One thread per rank, for the life of the pipeline.

    Args:
        workers: in the order of their seats; their channels are ``ThreadTransport``.
        num_threads: torch's intra-op threads of each worker.
        deadlines: how long ranks wait for each other.
    """

    def __init__(self, workers: Sequence[Worker], num_threads: int, deadlines: Deadlines) -> None:
        super().__init__([worker.channels for worker in workers], deadlines)
        self._workers = workers
        self._num_threads_before = torch.get_num_threads()
        self._inboxes: list[Inbox] = []
        self._threads = []
        self._unusable: str | None = None
        self._under_way: list[ThreadTicket] = []
        self._failed = False
        self._first_is_through: Callable[[Minibatch], None] = _nobody
        self._rank_has_failed: Callable[[], None] = _nobody
        self._updates_before = [worker.updater.num_updates for worker in workers]
        for worker in workers:
            inbox: Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox, num_threads),
                name=f"penstock rank {worker.seat.number}",
                daemon=True,
            )
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()
        # Also if nobody closes it: the threads know their inboxes, and not the driver.
        self._end = weakref.finalize(self, _end, self._inboxes)
        self._end.atexit = False

    def submit(
        self, segment: Segment, minibatch: Minibatch, position: StreamPosition
    ) -> ThreadTicket:
        if self._under_way and not self._under_way[-1].position.more_follow:
            self.break_off()  # who called has lost it to an interrupt
        if self._unusable:
            raise RunError(f"{self._unusable}; restore the weights and build a new Pipeline")
        callers = moments_of(minibatch, self._workers)
        ticket = ThreadTicket(segment, minibatch, position, len(self._workers), callers)
        self._be_patient(minibatch)
        self._under_way.append(ticket)
        try:  # no context: one that is interrupted as it ends would cancel when it is collected
            self._unusable = _BROKEN_OFF  # until we know better
            for worker, inbox in zip(self._workers, self._inboxes, strict=True):
                inbox.put(partial(self._perform, worker, ticket))
            ticket.handed = True
        except BaseException:
            self._cancel()
            raise
        self._unusable = None
        return ticket

    def collect(self, ticket: ThreadTicket) -> MinibatchOutcome:
        results = self._await(ticket)
        for result in results:
            result.take_up()
        return MinibatchOutcome.of(
            results,
            ticket.minibatch.weights,
            _records(ticket, results),
            results[0].norm,
            begins=ticket.segment.begins,
        )

    def retire(self, ticket: ThreadTicket) -> MinibatchOutcome:
        results = self._await(ticket)
        held = tuple(result.held for result in results if result.held is not None)
        return MinibatchOutcome.of_records(
            _records(ticket, results), held, begins=ticket.segment.begins
        )

    def _await(self, ticket: ThreadTicket) -> list[StepResult]:
        """Wait until all ranks are through with a minibatch."""
        if ticket not in self._under_way:
            raise RunError("this step was cancelled because the one before it failed")
        try:
            self._unusable = _BROKEN_OFF  # until we know better
            went_well = ticket.all_went_well()
        except BaseException:
            self._cancel()
            self._come_to_rest()
            raise
        if not went_well:
            begun = [*self._under_way]
            self._come_to_rest()
            raise self._cause(begun)
        self._under_way.remove(ticket)
        self._went_through(ticket.minibatch, num_proofs=2)
        self._updates_before = ticket.num_updates
        self._unusable = None
        firsts = []
        for worker, result in zip(self._workers, ticket.results, strict=True):
            assert result is not None
            # All members of a rank have the same results; the first one tells them. Of the others
            # the model's parts count, which the caller may read.
            if worker.seat.coordinate or not worker.runs_stages:
                result.take_up()
            else:
                firsts.append(result)
        return firsts

    def is_done(self, ticket: ThreadTicket) -> bool:
        return ticket.is_done

    def listen(
        self, first_is_through: Callable[[Minibatch], None], failed: Callable[[], None]
    ) -> None:
        """Have functions called, in any thread, whenever rank 0 is through with a minibatch, and
        when a rank has failed; the caller must hold nothing that ranks wait for."""
        self._first_is_through, self._rank_has_failed = first_is_through, failed

    def behind(self, errand: Callable[[Worker], T]) -> list[Future[T]]:
        """Have a function called for each worker, between two minibatches, when it is through with
        all that was submitted so far, whether that went well or not."""
        futures: list[Future[T]] = [Future() for _ in self._workers]
        for worker, inbox, future in zip(self._workers, self._inboxes, futures, strict=True):
            task = partial(_fulfil, partial(_on_device, worker, errand), future)
            if self._end.alive:
                inbox.put(task)
            else:
                task()
        return futures

    def break_off(self) -> None:
        if self._under_way:
            self._unusable = _BROKEN_OFF
            self._cancel()
            self._come_to_rest()

    def _cancel(self) -> None:
        for worker in self._workers:
            worker.transport.fail("the run was interrupted", ())

    def _perform(self, worker: Worker, ticket: ThreadTicket) -> None:
        seat = worker.seat.number
        if not ticket.begin(seat):
            return
        try:
            result = self._run(worker, ticket)
        except BaseException as error:
            ticket.fail(seat, error)
            self._rank_has_failed()
        else:
            ticket.succeed(seat, result)
            if seat == 0:
                self._first_is_through(ticket.minibatch)

    def _run(self, worker: Worker, ticket: ThreadTicket) -> StepResult:
        minibatch, position = ticket.minibatch, ticket.position
        if self._failed:
            raise PeerError("the minibatch before this one failed")
        try:
            with naming(worker.seat.number, minibatch.step):
                result = worker.run(ticket.segment, minibatch, position, ticket.callers)
            ticket.num_updates[worker.seat.number] = worker.updater.num_updates
            if not position.more_follow:
                self._await_next(worker, result, minibatch.step)
            return result
        except BaseException as error:
            self._failed = True  # first of all: nobody may begin the next minibatch
            if worker.on_trust:
                # Others may have given up this attempt already: the notice must not seem a part of
                # it. This rank takes no message any more, since no step will follow.
                worker.transport.discard(LARGEST_NUMBER)
            worker.channels.fail(failure_notice(worker.seat.number, error), ())
            raise

    def _await_next(self, worker: Worker, result: StepResult, step: int) -> None:
        """Wait until the next rank is through as well: nobody waits for its last ops, so otherwise
        nobody would notice if it hung in one of them."""
        rank, count = worker.seat.number, len(self._workers)
        if count > 1:
            number = FIRST_EXCHANGE + result.number
            after, before = (rank + 1) % count, (rank - 1) % count
            worker.channels.send(Edge(rank, before, END_TAG), number, None)
            waiting = f"rank {rank}, waiting at the end of step {step} for rank {after}"
            worker.channels.recv(Edge(after, rank, END_TAG), number, waiting)

    def _come_to_rest(self) -> None:
        """Let cancelled workers stop; after a clean stop the next step may run."""
        self._failed = True
        begun = [*self._under_way]
        trained = any(ticket.minibatch.trains for ticket in begun)
        for ticket in begun:
            if not ticket.handed:  # an interrupt came between
                ticket.withdraw()
        self._under_way.clear()
        end = time.monotonic() + _GRACE_SECONDS
        running = [seat for ticket in begun for seat in ticket.still_running(end)]
        if running:
            self._unusable = f"rank {min(running)} still runs an op of the failed step"
            return
        self._reset(trained)
        self._go_on_behind()
        self._failed = False
        updaters = [worker.updater for worker in self._workers]
        self._unusable = None
        if [updater.num_updates for updater in updaters] != self._updates_before:
            self._unusable = "in the failed step some stages were updated and others were not"
        elif any(worker.on_trust for worker in self._workers):
            self._unusable = "updates were made on trust, which the failed step did not validate"

    def _go_on_behind(self) -> None:
        """Let what the caller does next on devices happen behind what ranks have begun there."""
        for worker in self._workers:
            if worker.queue is not None:
                taken_up((), worker.queue.moment())

    def _cause(self, begun: Sequence[ThreadTicket]) -> BaseException:
        """The failure that made the others fail, with what every rank did last as notes."""
        errors = [error for ticket in begun for error in ticket.errors if error is not None]
        consequences = (PeerError, DeadlineError), PeerError, ()
        cause = next(e for kinds in consequences for e in errors if not isinstance(e, kinds))
        if isinstance(cause, DeadlineError) and self._unusable:
            # Who waited may have waited for a rank that itself waited for the stuck one.
            cause = DeadlineError(f"{cause} ({self._unusable})")
        for rank, worker in enumerate(self._workers):
            own = (ticket.errors[rank] for ticket in begun)
            failed = (error for error in own if error is not None)
            # The first: after it, the rank may have begun the next minibatch.
            for note in getattr(next(failed, None), "__notes__", [worker.dump()]):
                if note not in getattr(cause, "__notes__", ()):
                    cause.add_note(note)
        return cause

    def _reset(self, trained: bool) -> None:
        num_attempts = max(worker.num_attempts for worker in self._workers)
        for worker in self._workers:
            worker.num_attempts = num_attempts  # one may have failed when another began anew
            worker.start_over()
            if trained:  # also where all went well
                worker.updater.drop_gradients()
            worker.transport.reset()

    def gather(
        self, states: StageStates, expected: Segment, destination: int | None
    ) -> StageStates:
        return states

    def close(self, why: str = "") -> None:
        self._unusable = "this pipeline is closed"
        self._end()
        end = time.monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, end - time.monotonic()))
        self._go_on_behind()
        torch.set_num_threads(self._num_threads_before)


def _records(ticket: ThreadTicket, results: Sequence[StepResult]) -> list[RankRecord]:
    return [
        RankRecord(
            ops,
            result.starts,
            result.ends,
            result.versions,
            ticket.position.base,
            stamps=result.stamps,
            moved=result.moved,
        )
        for ops, result in zip(ticket.segment.ranks, results, strict=True)
    ]


def _on_device(worker: Worker, errand: Callable[[Worker], T]) -> T:
    with nullcontext() if worker.queue is None else worker.queue.entered():
        return errand(worker)


def _end(inboxes: Sequence[Inbox]) -> None:
    """Let the threads come to their end when they have done what they do."""
    for inbox in inboxes:
        inbox.put(None)


def _serve(inbox: Inbox, num_threads: int) -> None:
    # The setting belongs to the thread that makes it.
    torch.set_num_threads(num_threads)
    while (work := inbox.get()) is not None:
        work()
        # While this thread waits, it must not keep the last step's outputs alive.
        del work


def _fulfil(task: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)
