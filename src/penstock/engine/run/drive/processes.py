"""Drive one worker per process, under torchrun: this process performs the ops of its own rank.
``RankReport`` is what ranks then tell each other at the end of a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.core.schedule import Op
from penstock.core.schedule.rounds import Segment
from penstock.core.timing.spans import TransferKind
from penstock.engine.device.queue import happened
from penstock.engine.run.digests import Call, CallDigest, ComparingTransport, check_alike
from penstock.engine.run.drive.driver import (
    Deadlines,
    Driver,
    StageStates,
    failure_notice,
    loader_notice,
    named,
    naming,
)
from penstock.engine.run.drive.joining import Board
from penstock.engine.run.minibatch import Minibatch, StepResult, StreamPosition, call_digest_of
from penstock.engine.run.outcome import Loss, MinibatchOutcome, Peak, RankRecord, as_numbers
from penstock.engine.run.rank.worker import NUMBERS_PER_RUN, Worker, moments_of
from penstock.engine.transport import Edge, Noted
from penstock.engine.transport.base import (
    AGREEMENT_TAG,
    FIRST_EXCHANGE,
    LARGEST_NUMBER,
    ORDER_TAG,
    REPORT_TAG,
    STATE_TAG,
)
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.engine.weights.store import HeldVersions

_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)


class RankReport(NamedTuple):
    """A rank's message to all others at the end of a step.

    It travels as plain data. Where records are exchanged, ``times`` holds the starts and the ends
    of the ops of its program, which all ranks know, ``versions`` the weight version that each
    read, and ``moved`` a row for each thing that it moved: numbers travel ten times
    as fast as ops.
    """

    times: Tensor | None
    versions: Tensor | None
    moved: Tensor | None
    losses: Mapping[int, Loss]
    outputs: dict[int, Any]
    metrics: dict[str, dict[int, Tensor]]
    peak: Peak | None
    held: HeldVersions | None

    def packed(self) -> Any:
        """The report as it travels: mostly there are losses and nothing else, which are one tensor
        then, and take half as long as a tuple in which the rest is empty."""
        losses = _packed_losses(self.losses)
        more = self.outputs or self.metrics or self.peak or self.held
        if isinstance(losses, Tensor) and self.times is None and not more:
            return losses
        peak = None if self.peak is None else tuple(self.peak)
        held = None if self.held is None else tuple(self.held)
        results = losses, self.outputs, self.metrics
        return self.times, self.versions, self.moved, *results, peak, held

    @classmethod
    def unpacked(cls, packed: Any) -> RankReport:
        """Undo ``packed``."""
        if isinstance(packed, Tensor):
            return cls(None, None, None, _unpacked_losses(packed), {}, {}, None, None)
        times, versions, moved, losses, outputs, metrics, peak, held = packed
        peak, held = peak and Peak(*peak), held and HeldVersions(*held)
        own = _unpacked_losses(losses)
        return cls(times, versions, moved, own, outputs, metrics, peak, held)

    @classmethod
    def of(cls, result: StepResult, *, records: bool, results: bool) -> RankReport:
        """The report of a rank's own result.

        Args:
            records: whether when ops ran is told.
            results: whether losses, outputs and metrics are.
        """
        times = versions = moved = None
        if records:
            # Of an accelerator it is known when all has happened: this waits for the device.
            columns = happened(result.starts, result.ends, result.stamps)
            times = torch.from_numpy(np.array(columns, np.float64))
            versions = torch.tensor(result.versions, dtype=torch.int64)
            if result.moved:
                rows = [(_KINDS.index(kind), *numbers) for kind, *numbers in result.moved]
                moved = torch.tensor(rows, dtype=torch.float64)
        own = (result.losses, result.outputs, result.metrics) if results else ({}, {}, {})
        return cls(times, versions, moved, *own, result.peak, result.held)

    def record(self, ops: Sequence[Op], base: int, clock_offset: float) -> RankRecord | None:
        """When the rank performed its ops, if it tells that; arguments as for ``RankRecord``."""
        if self.times is None or self.versions is None:
            return None
        starts, ends = (array("d", column.tolist()) for column in self.times)
        versions = self.versions.tolist()
        return RankRecord(ops, starts, ends, versions, base, clock_offset, moved=self._moved())

    def _moved(self) -> list[tuple[TransferKind, int, int, float, float]]:
        rows = [] if self.moved is None else self.moved.tolist()
        return [
            (_KINDS[int(kind)], int(stage), int(number), start, end)
            for kind, stage, number, start, end in rows
        ]


def _packed_losses(losses: Mapping[int, Loss]) -> Any:
    """Losses by microbatch as they travel: in one tensor, which is faster than many values."""
    numbers = as_numbers(losses.values())
    if numbers:
        return torch.tensor([[*losses], numbers], dtype=torch.float64, device="cpu")
    each = [loss for loss in losses.values() if isinstance(loss, Tensor)]
    return [*losses], torch.stack(each) if len({loss.dtype for loss in each}) == 1 else each


def _unpacked_losses(packed: Any) -> dict[int, Loss]:
    if isinstance(packed, Tensor):
        microbatches, numbers = packed.tolist()
        return dict(zip(map(int, microbatches), numbers, strict=True))
    return dict(zip(*packed, strict=True))


_MOST_SEGMENTS = 64
"""For which a rank remembers who tells of them."""


class ProcessTicket(NamedTuple):
    """A minibatch of which this rank's ops are done.

    Attributes:
        report: what this rank tells the others, if there is anything that they wait for.
        digest: what other ranks must have been given, too.
    """

    segment: Segment
    minibatch: Minibatch
    position: StreamPosition
    result: StepResult
    report: RankReport
    digest: bytes


class ProcessDriver(Driver[ProcessTicket]):
    """Runs this process's worker and exchanges results with the other processes.

    Args:
        worker: this process's rank.
        transport: carries the worker's messages, and this driver's, as main memory holds them; the
            worker's own may add to it what an accelerator needs.
        meeting: where all ranks have built the pipeline.
        deadlines: how long ranks wait for each other.
        num_told: how many ranks run stages, and so have results.
        num_threads: torch's intra-op threads, until it is closed.
        clock_offsets: by how many seconds each rank's clock is ahead of rank 0's; records are
            exchanged too, so that every rank can draw the whole timeline. ``None``: they are not.
        share_results: tell losses, metrics and outputs to every rank; otherwise only the ranks
            that computed them have them.
    """

    def __init__(
        self,
        worker: Worker,
        transport: ComparingTransport,
        meeting: Rendezvous,
        deadlines: Deadlines,
        *,
        num_told: int,
        num_threads: int,
        clock_offsets: Sequence[float] | None,
        share_results: bool,
    ) -> None:
        super().__init__([transport], deadlines)
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        self._worker = worker
        self._seat = worker.seat
        self._firsts = (worker.seat.firsts or tuple(range(num_told)))[:num_told]
        self._transport = transport
        # Else the gradients that ranks sum are not all of one minibatch.
        self._compares_sums = not worker.updater.sums.stale
        self._num_ranks = meeting.num_ranks
        self._others = [rank for rank in range(meeting.num_ranks) if rank != meeting.rank]
        self._records = clock_offsets is not None
        self._clock_offsets = clock_offsets or [0.0] * meeting.num_ranks
        self._share_results = share_results
        self._failure: str | None = None
        self._board = Board(meeting)
        self._telling = lru_cache(_MOST_SEGMENTS)(self._find_telling)

    def submit(
        self, segment: Segment, minibatch: Minibatch, position: StreamPosition
    ) -> ProcessTicket:
        """Perform this rank's ops and tell their results; the other ranks do likewise."""
        self._check_usable()
        self._be_patient(minibatch)
        if position.failure is not None:
            # Whoever gives up meanwhile for want of this rank reads what was first.
            self._board.write(loader_notice(self._seat.number, position.failure))
        with self._telling_failures(segment, minibatch.step, position.failure):
            digest = self._transport.digest = call_digest_of(minibatch, position)
            self._transport.synchronous = position.synchronous and self._compares_sums
            callers = moments_of(minibatch, [self._worker])
            result = self._worker.run(segment, minibatch, position, callers)
            self._worker.transport.hand_over()
            result.take_up()
            report = RankReport.of(result, records=self._records, results=self._share_results)
            if self._seat.number in self._telling(segment):
                own = Noted(report.packed(), digest)
                for edge in self._edges_to_all(REPORT_TAG):
                    self._transport.send(edge, FIRST_EXCHANGE + result.number, own)
        return ProcessTicket(segment, minibatch, position, result, report, digest)

    def _check_usable(self) -> None:
        if self._failure:
            raise RunError(f"this pipeline has failed ({self._failure}); start the job again")

    def collect(self, ticket: ProcessTicket) -> MinibatchOutcome:
        self._check_usable()  # a wait in vain would hide what has failed first
        segment, minibatch, result = ticket.segment, ticket.minibatch, ticket.result
        with self._telling_failures(segment, minibatch.step, ticket.position.failure):
            by_seat = self._reports(ticket)
            # All members of a rank have the same results; the first one tells them.
            firsts = [report for seat, report in by_seat.items() if seat in self._firsts]
            reports = firsts or [*by_seat.values()]
            if not ticket.position.more_follow:
                self._worker.transport.flush()
        all_reported = len(by_seat) == self._num_ranks
        self._went_through(minibatch, num_proofs=2 if all_reported else 1)
        return MinibatchOutcome.of(
            reports,
            minibatch.weights,
            self._records_of(ticket, reports) if self._records and any(segment.ranks) else None,
            result.norm,
            begins=segment.begins,
        )

    def is_done(self, ticket: ProcessTicket) -> bool:
        return all(self._has_told(other, ticket) for other in self._telling(ticket.segment))

    def _has_told(self, other: int, ticket: ProcessTicket) -> bool | None:
        rank, number = self._worker.rank, FIRST_EXCHANGE + ticket.result.number
        return other == rank or self._transport.has_come(Edge(other, rank, REPORT_TAG), number)

    @property
    def can_look(self) -> bool:
        """Whether ``is_done`` can tell of what other ranks have done."""
        edges = (Edge(other, self._worker.rank, REPORT_TAG) for other in self._others)
        return all(self._transport.has_come(edge, FIRST_EXCHANGE) is not None for edge in edges)

    def announce(self, number: int, orders: Mapping[int, Any], expected: Segment) -> None:
        """Tell other ranks what to do next, where one of them leads.

        Args:
            number: how many orders came before.
            orders: by rank.
            expected: as for ``gather``.

        Raises:
            PeerError, DeadlineError: one of them is gone.
        """
        with self._telling_failures(expected, self._worker.num_runs):
            for rank, order in orders.items():
                edge = Edge(self._worker.rank, rank, ORDER_TAG)
                self._transport.send(edge, FIRST_EXCHANGE + number, order)
            self._worker.transport.hand_over()

    def announced(self, number: int, expected: Segment) -> Any:
        """Wait for what rank 0 tells this one to do next; arguments as for ``announce``.

        Raises:
            PeerError, DeadlineError: rank 0 is gone, or says nothing.
        """
        rank = self._worker.rank
        waiting = f"rank {rank}, waiting for rank 0 to begin with the next frame"
        with self._telling_failures(expected, self._worker.num_runs):
            return self._transport.recv(Edge(0, rank, ORDER_TAG), FIRST_EXCHANGE + number, waiting)

    @contextmanager
    def _telling_failures(
        self, segment: Segment, step: int, of_loader: BaseException | None = None
    ) -> Iterator[None]:
        """Tell all ranks of a failure; of the loader's instead, if that was before: this rank's
        caller hears of that one, too."""
        rank = self._seat.number
        try:
            with naming(rank, step):
                yield
        except BaseException as error:
            self._failure = named(error)
            self._worker.updater.sums.close(failed=True)
            if not getattr(error, "__notes__", ()):
                error.add_note(self._worker.dump())
            edges = [
                *self._worker.outgoing(segment),
                *self._edges_to_all(AGREEMENT_TAG),
                *self._edges_to_all(REPORT_TAG),
                *self._edges_to_all(STATE_TAG),
                *self._edges_to_all(ORDER_TAG),
            ]
            # Others may have given up this attempt already: the notice must not seem a part of it.
            self._worker.channels.discard(LARGEST_NUMBER)
            failed = failure_notice(rank, error)
            notice = failed if of_loader is None else loader_notice(rank, of_loader)
            self._worker.channels.fail(notice, edges)
            self._board.write(notice)
            if isinstance(error, PeerError | DeadlineError):
                explained = self._board.explained(error)
                explained.__notes__ = error.__notes__
                raise explained from error.__cause__
            raise

    def _reports(self, ticket: ProcessTicket) -> dict[int, RankReport]:
        """By seat, in their order, every report that holds anything; of the others nothing is
        sent."""
        rank, result = self._seat.number, ticket.result
        own = ticket.report._replace(
            losses=result.losses, outputs=result.outputs, metrics=result.metrics
        )
        return {
            other: own if other == rank else self._report_of(other, ticket)
            for other in sorted({rank} | self._telling(ticket.segment))
        }

    def _report_of(self, other: int, ticket: ProcessTicket) -> RankReport:
        """Another rank's report.

        Raises:
            RunError: it was given something else than this rank.
        """
        rank, step = self._seat.number, ticket.minibatch.step
        waiting = f"rank {rank}, waiting at the end of step {step} for rank {other}'s results"
        return RankReport.unpacked(
            self._told_by(other, ticket.result.number, ticket.digest, waiting)
        )

    def _told_by(self, other: int, number: int, digest: bytes, waiting: str) -> Any:
        """Another rank's message to all, on what they do together.

        Raises:
            RunError: it does something else.
        """
        rank = self._seat.number
        message = self._transport.recv(
            Edge(other, rank, REPORT_TAG), FIRST_EXCHANGE + number, waiting
        )
        if type(message) is Noted:
            message, its_digest = message
            check_alike(digest, its_digest, (rank, other), waiting)
        return message

    def _find_telling(self, segment: Segment) -> frozenset[int]:
        """The ranks that have something to tell: records, peaks, or results of the last stage."""
        if not any(segment.ranks):
            return frozenset()  # others may be in the middle of something
        if self._records or self._worker.counts_memory:
            return frozenset(self._firsts)
        last = segment.schedule.num_stages - 1
        have_results = frozenset(self._firsts[rank] for rank in segment.schedule.ranks_of(last))
        return have_results if self._share_results else frozenset()

    def _records_of(self, ticket: ProcessTicket, reports: list[RankReport]) -> list[RankRecord]:
        self._check_alike(ticket, reports)
        offsets = [self._clock_offsets[seat] for seat in self._firsts]
        records = (
            report.record(ops, ticket.position.base, offset)
            for ops, report, offset in zip(ticket.segment.ranks, reports, offsets, strict=True)
        )
        return [record for record in records if record is not None]

    def _check_alike(self, ticket: ProcessTicket, reports: list[RankReport]) -> None:
        """Ranks go through the same stream. Digests tell if not, except behind the last minibatch:
        a rank that has left its loop drains, with nothing to compare."""
        for rank, (ops, report) in enumerate(zip(ticket.segment.ranks, reports, strict=True)):
            if report.times is not None and report.times.shape[1] != len(ops):
                raise RunError(
                    f"at step {ticket.minibatch.step}, ranks {self._seat.rank} and {rank} are at "
                    "different ends of their loops; give every rank as many minibatches, of as "
                    "many rows, and let all leave the loop at the same one"
                )

    def _edges_to_all(self, tag: int) -> list[Edge]:
        return [Edge(self._seat.number, other, tag) for other in self._others]

    def gather(
        self, states: StageStates, expected: Segment, destination: int | None
    ) -> StageStates:
        self._check_usable()
        with self._telling_failures(expected, self._worker.num_runs):
            number = self._worker.next_number()
            self._announce_gathering(number, expected, destination)
            self._await_gathering(number, destination)
            # One rank after the other tells its own, so that nobody waits for room in a channel
            # whose other end is sending, too.
            by_rank = [
                self._told_weights(source, number, states, destination)
                for source in range(self._num_ranks)
            ]
            self._transport.flush()
        if destination not in (None, self._seat.number):
            return {}
        return {stage: state for own in by_rank for stage, state in own.items()}

    def _told_weights(
        self, source: int, number: int, states: StageStates, destination: int | None
    ) -> StageStates:
        """The states of one rank's stages, where this process is to have them."""
        rank, number = self._seat.number, FIRST_EXCHANGE + number
        if source == rank:
            for other in self._others if destination is None else {destination} - {rank}:
                self._transport.send(Edge(rank, other, STATE_TAG), number, states)
            return states
        if destination not in (None, rank):
            return {}
        waiting = f"rank {rank}, waiting for rank {source}'s weights"
        theirs: StageStates = self._transport.recv(Edge(source, rank, STATE_TAG), number, waiting)
        return theirs

    def _announce_gathering(self, number: int, expected: Segment, destination: int | None) -> None:
        """Tell the others, also those that do something else: they find it in the place of the
        first message that they wait for."""
        announcement = Noted(destination, CallDigest(Call.GATHER).packed())
        for edge, unit in self._worker.first_units(expected).items():
            self._transport.send(edge, number + unit, announcement)
        # Nobody waits for these if all is well.
        self._transport.discard(number + NUMBERS_PER_RUN)
        for edge in self._edges_to_all(REPORT_TAG):
            self._transport.send(edge, FIRST_EXCHANGE + number, announcement)

    def _await_gathering(self, number: int, destination: int | None) -> None:
        for other in self._others:
            waiting = (
                f"rank {self._seat.number}, waiting in gather_state_dict(), which every rank must "
                f"call, for rank {other}"
            )
            theirs = self._told_by(other, number, CallDigest(Call.GATHER).packed(), waiting)
            if theirs != destination:
                raise RunError(
                    f"rank {self._seat.number} calls gather_state_dict(rank={destination}), but "
                    f"rank {other} gather_state_dict(rank={theirs}); give every rank the same"
                )

    def close(self, why: str = "") -> None:
        torch.set_num_threads(self._num_threads_before)
        told_why = why or "and all ranks must leave a loop at the same one"
        reason = f"after {self._worker.num_runs} steps, {told_why}"
        self._worker.updater.sums.close(failed=bool(self._failure or why))
        if not self._failure:
            self._board.write(f"rank {self._seat.number} closed its pipeline ({reason})")
        self._worker.transport.close(reason)
