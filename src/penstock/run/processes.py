"""Drive one worker per process, under torchrun: this process performs the ops of its own rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import DeadlineError, ModelError, PeerError, RunError
from penstock.planner import Plan
from penstock.run import outcome
from penstock.run.clocks import clock_offsets
from penstock.run.counting import Peak
from penstock.run.driver import Driver, failure_notice, named, naming, told
from penstock.run.journal import Record
from penstock.run.minibatch import Harvest, Minibatch
from penstock.run.outcome import Outcome
from penstock.run.tags import AGREEMENT_TAG, FIRST_EXCHANGE, REPORT_TAG
from penstock.run.worker import Worker
from penstock.schedule.segment import Segment
from penstock.store import Held
from penstock.timeline import Row
from penstock.transport import Edge, ProcessTransport
from penstock.transport.base import LARGEST_NUMBER
from penstock.transport.meeting import this_host
from penstock.transport.packing import short

_HEARSAY_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.01


class Report(NamedTuple):
    """What a rank tells all others at the end of a step.

    ``times`` holds (start, end) of every op of its program, which all ranks know, and ``versions``
    the weight version that it read: numbers travel ten times as fast as pickled ops.
    """

    times: Tensor | None
    versions: Tensor
    losses: dict[int, Tensor]
    outputs: dict[int, Any]
    metrics: dict[str, dict[int, Tensor]]
    peak: Peak | None
    held: Held | None


class Ticket(NamedTuple):
    """A minibatch of which this rank's ops are done."""

    segment: Segment
    minibatch: Minibatch
    harvest: Harvest


class Board:
    """Where ranks write why they failed, beside the channels.

    gloo ends all connections of a rank whose wait runs out, so that its neighbours hear nothing but
    that it is gone; and of ranks that wait for each other in a row, all run out at once.

    Args:
        group: of all ranks; they write into its store.
        rank: which one writes.
        num_ranks: how many do.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, num_ranks: int) -> None:
        self._store = group.get_group_store()
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]

    def write(self, notice: str) -> None:
        """Tell those who will look."""
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            self._store.set(_key(self._rank), short(notice).decode())

    def explained(self, error: PeerError | DeadlineError) -> PeerError | DeadlineError:
        """The error, with what other ranks have said about the cause, if it was not known."""
        heard = self._hear()
        news = {notice for notice in heard.values() if notice not in told(error)}
        if isinstance(error, DeadlineError):
            silent = [str(other) for other in self._others if other not in heard]
            news |= {f"nothing was heard of rank {' and '.join(silent)}"} if silent else set()
        if not news:
            return error
        message = f"{error}; meanwhile {', '.join(sorted(news))}"
        if isinstance(error, PeerError):
            return PeerError(message, error.reason)
        return DeadlineError(message)

    def _hear(self) -> dict[int, str]:
        """What others have written; some do so only now."""
        end = time.monotonic() + _HEARSAY_SECONDS
        heard: dict[int, str] = {}
        with suppress(RuntimeError):
            while len(heard) < len(self._others) and time.monotonic() < end:
                for other in self._others:
                    if other not in heard and self._store.check([_key(other)]):
                        heard[other] = self._store.get(_key(other)).decode()
                time.sleep(_LOOK_AGAIN_SECONDS)
        return heard


def _key(rank: int) -> str:
    return f"why rank {rank} failed"


class ProcessDriver(Driver[Ticket]):
    """Runs this process's worker and exchanges results with the other processes.

    Args:
        worker: of this process's rank.
        transport: its transport.
        num_ranks: how many processes take part.
        num_threads: torch's intra-op threads, until it is closed.
        record: exchange records too, so that every rank can draw the whole timeline.
        share_results: tell losses, metrics and outputs to every rank; otherwise only the ranks
            that computed them have them.
        clock_offsets: by how many seconds each rank's clock is ahead of rank 0's.
    """

    def __init__(
        self,
        worker: Worker,
        transport: ProcessTransport,
        num_ranks: int,
        *,
        num_threads: int,
        record: bool,
        share_results: bool,
        clock_offsets: Sequence[float] | None,
    ) -> None:
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        self._worker = worker
        self._transport = transport
        self._num_ranks = num_ranks
        self._record = record
        self._share_results = share_results
        self._clock_offsets = clock_offsets
        self._failure: str | None = None
        self._board = Board(transport.group, worker.rank, num_ranks)

    def submit(self, segment: Segment, minibatch: Minibatch) -> Ticket:
        """Perform this rank's ops and tell their results; the other ranks do likewise."""
        if self._failure:
            raise RunError(f"this pipeline has failed ({self._failure}); start the job again")
        with self._telling_failures(segment, minibatch.step):
            harvest = self._worker.run(segment, minibatch)
            if self._worker.rank in self._telling(segment):
                own = self._report(harvest)
                for edge in self._edges_to_all(REPORT_TAG):
                    self._transport.send(edge, FIRST_EXCHANGE + harvest.number, own)
        return Ticket(segment, minibatch, harvest)

    def collect(self, ticket: Ticket) -> Outcome:
        segment, minibatch, harvest = ticket
        with self._telling_failures(segment, minibatch.step):
            reports = self._reports(segment, harvest, minibatch.step)
            if not minibatch.more_follow:
                self._transport.flush()
        return Outcome.of(
            reports,
            minibatch.weights,
            self._rows(ticket, reports) if self._record and any(segment.ranks) else None,
            harvest.norm,
            begins=segment.begins,
        )

    @contextmanager
    def _telling_failures(self, segment: Segment, step: int) -> Iterator[None]:
        rank = self._worker.rank
        try:
            with naming(rank, step):
                yield
        except BaseException as error:
            self._failure = named(error)
            if not getattr(error, "__notes__", ()):
                error.add_note(self._worker.dump())
            edges = [
                *self._worker.outgoing(segment),
                *self._edges_to_all(AGREEMENT_TAG),
                *self._edges_to_all(REPORT_TAG),
            ]
            # Others may have given up this attempt already: the notice must not seem a part of it.
            self._transport.discard(LARGEST_NUMBER)
            notice = failure_notice(rank, error)
            self._transport.fail(notice, edges)
            self._board.write(notice)
            if isinstance(error, PeerError | DeadlineError):
                explained = self._board.explained(error)
                explained.__notes__ = error.__notes__
                raise explained from error.__cause__
            raise

    def _report(self, harvest: Harvest) -> Report:
        times = None
        if self._record:
            pairs = [(start, end) for _, start, end in harvest.records]
            times = torch.tensor(pairs, dtype=torch.float64)
        versions = torch.tensor(harvest.versions, dtype=torch.int64)
        if self._share_results:
            results = harvest.losses, harvest.outputs, harvest.metrics
        else:
            results = {}, {}, {}
        return Report(times, versions, *results, harvest.peak, harvest.held)

    def _reports(self, segment: Segment, harvest: Harvest, step: int) -> list[Report]:
        """Every rank's report that holds anything; of the others nothing is sent."""
        rank = self._worker.rank
        own = self._report(harvest)._replace(
            losses=harvest.losses, outputs=harvest.outputs, metrics=harvest.metrics
        )
        return [
            own
            if other == rank
            else Report(
                *self._transport.recv(
                    Edge(other, rank, REPORT_TAG),
                    FIRST_EXCHANGE + harvest.number,
                    f"rank {rank}, waiting at the end of step {step} for rank {other}'s results",
                )
            )
            for other in sorted({rank, *self._telling(segment)})
        ]

    def _telling(self, segment: Segment) -> set[int]:
        """The ranks that have something to tell: records, peaks, or results of the last stage."""
        if not any(segment.ranks):
            return set()  # others may be in the middle of something
        if self._record or self._worker.counts_memory:
            return set(range(self._num_ranks))
        last = segment.schedule.num_stages - 1
        have_results = set(segment.schedule.ranks_of(last))
        return have_results if self._share_results else set()

    def _rows(self, ticket: Ticket, reports: list[Report]) -> list[Row]:
        self._check_alike(ticket, reports)
        offsets = self._clock_offsets or [0.0] * self._num_ranks
        return [
            outcome.row(
                [Record(op, *times) for op, times in zip(ops, report.times.tolist(), strict=True)],
                report.versions.tolist(),
                ticket.minibatch.base,
                offset,
            )
            for ops, report, offset in zip(ticket.segment.ranks, reports, offsets, strict=True)
            if report.times is not None
        ]

    def _check_alike(self, ticket: Ticket, reports: list[Report]) -> None:
        """Ranks go through the same stream, or their messages belong to different minibatches."""
        for rank, (ops, report) in enumerate(zip(ticket.segment.ranks, reports, strict=True)):
            if report.times is not None and len(report.times) != len(ops):
                raise RunError(
                    f"at step {ticket.minibatch.step}, ranks {self._worker.rank} and {rank} are at "
                    "different ends of their loops; give every rank as many minibatches, of as "
                    "many rows, and let all leave the loop at the same one"
                )

    def _edges_to_all(self, tag: int) -> list[Edge]:
        rank = self._worker.rank
        return [Edge(rank, other, tag) for other in range(self._num_ranks) if other != rank]

    def close(self, why: str = "") -> None:
        torch.set_num_threads(self._num_threads_before)
        reason = f"after {self._worker.num_runs} steps{why and f', {why}'}"
        if not self._failure:
            self._board.write(f"rank {self._worker.rank} closed its pipeline ({reason})")
        self._transport.close(reason)


def agree(group: dist.ProcessGroup, plan: Plan, model: str, seed: int) -> tuple[Plan, int]:
    """Rank 0's plan and seed, on every process: each profiles and plans a little differently.

    Args:
        group: of all processes.
        plan: this process's.
        model: fingerprint of this process's model.
        seed: this process's.

    Raises:
        ModelError: the processes have built different models.
    """
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (plan.to_json(), model, seed), group=group)
    others = [rank for rank, (_, other, _) in enumerate(answers) if other != answers[0][1]]
    if others:
        raise ModelError(
            f"rank {others[0]} has built another model than rank 0; build the same one everywhere"
        )
    return Plan.from_json(answers[0][0]), int(answers[0][2])


def offsets_of_clocks(group: dist.ProcessGroup) -> tuple[float, ...]:
    """By how many seconds each rank's clock is ahead of rank 0's; collective."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, this_host(), group=group)
    return clock_offsets(group, hosts)
