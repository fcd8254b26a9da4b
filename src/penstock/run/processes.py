"""Drive one worker per process, under torchrun: this process performs the ops of its own rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ModelError, RunError
from penstock.planner import Plan
from penstock.run import outcome
from penstock.run.driver import Driver, failure_notice
from penstock.run.interpreter import Record
from penstock.run.outcome import Outcome
from penstock.run.worker import Harvest, Minibatch, Worker
from penstock.schedule import Schedule
from penstock.timeline import Timeline
from penstock.transport import Edge, ProcessGroupTransport

_REPORT_TAG = 1 << 20


class Report(NamedTuple):
    """What a rank tells all others at the end of a step.

    ``times`` holds (start, end) of every op of its program, which all ranks know: numbers travel
    ten times as fast as pickled ops.
    """

    times: Tensor | None
    losses: dict[int, Tensor]
    outputs: dict[int, Any]


class ProcessDriver(Driver):
    """Runs this process's worker and exchanges results with the other processes.

    Args:
        worker: of this process's rank.
        transport: its transport.
        num_ranks: how many processes take part.
        record: exchange records too, so that every rank can draw the whole timeline.
    """

    def __init__(
        self, worker: Worker, transport: ProcessGroupTransport, num_ranks: int, record: bool
    ) -> None:
        self._worker = worker
        self._transport = transport
        self._num_ranks = num_ranks
        self._record = record
        self._failure: str | None = None

    def run(self, schedule: Schedule, minibatch: Minibatch) -> Outcome:
        if self._failure:
            raise RunError(f"this pipeline has failed ({self._failure}); start the job again")
        try:
            harvest = self._worker.run(schedule, minibatch)
            reports = self._exchange(schedule, harvest, minibatch.step)
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            edges = [*self._worker.outgoing(schedule), *self._report_edges()]
            self._transport.fail(failure_notice(self._worker.rank, error), edges)
            raise
        losses = {k: loss for report in reports for k, loss in report.losses.items()}
        outputs = {k: value for report in reports for k, value in report.outputs.items()}
        return Outcome(
            outcome.weighted_sum(losses, minibatch.weights),
            outcome.joined(outputs),
            self._timeline(schedule, reports) if self._record else None,
        )

    def _exchange(self, schedule: Schedule, harvest: Harvest, step: int) -> list[Report]:
        """Every rank's report that holds anything; of the others nothing is sent."""
        rank, telling = self._worker.rank, self._telling(schedule)
        times = [(start, end) for _, start, end in harvest.records] if self._record else None
        own = Report(
            None if times is None else torch.tensor(times, dtype=torch.float64),
            harvest.losses,
            harvest.outputs,
        )
        for edge in self._report_edges() if rank in telling else ():
            self._transport.send(edge, step, own)
        reports = [
            own
            if other == rank
            else self._transport.recv(
                Edge(other, rank, _REPORT_TAG),
                step,
                f"rank {rank}, waiting at the end of step {step} for rank {other}'s results",
            )
            for other in sorted({rank, *telling})
        ]
        self._transport.flush()
        return reports

    def _telling(self, schedule: Schedule) -> set[int]:
        """The ranks that have something to tell: records, or results of the last stage."""
        if self._record:
            return set(range(self._num_ranks))
        last = schedule.num_stages - 1
        return {rank for op, rank in schedule.where.items() if op.stage == last}

    def _timeline(self, schedule: Schedule, reports: list[Report]) -> Timeline:
        records = [
            [Record(op, *times) for op, times in zip(ops, report.times.tolist(), strict=True)]
            for ops, report in zip(schedule.ranks, reports, strict=True)
            if report.times is not None
        ]
        return outcome.timeline(records, schedule.name)

    def _report_edges(self) -> list[Edge]:
        rank = self._worker.rank
        return [Edge(rank, other, _REPORT_TAG) for other in range(self._num_ranks) if other != rank]

    def close(self) -> None:
        """Nothing to end: the process is the user's."""


def agree(transport: ProcessGroupTransport, plan: Plan, model: str, seed: int) -> tuple[Plan, int]:
    """Rank 0's plan and seed, on every process: each profiles and plans a little differently.

    Args:
        transport: of this process.
        plan: this process's.
        model: fingerprint of this process's model.
        seed: this process's.

    Raises:
        ModelError: the processes have built different models.
    """
    answers: list[Any] = [None] * dist.get_world_size(transport.group)
    dist.all_gather_object(answers, (plan.to_json(), model, seed), group=transport.group)
    others = [rank for rank, (_, other, _) in enumerate(answers) if other != answers[0][1]]
    if others:
        raise ModelError(
            f"rank {others[0]} has built another model than rank 0; build the same one everywhere"
        )
    return Plan.from_json(answers[0][0]), int(answers[0][2])
