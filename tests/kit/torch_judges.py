"""torch's own validator, communication lowering and simulator, asked about our schedules.

They are private in torch; where a newer one has moved them, the import below says so.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from torch.distributed.pipelining import schedules as theirs

from penstock.core.schedule import Schedule
from penstock.core.schedule.check import check

Order = dict[int, list[Any]]
"""torch's form of a schedule: the actions of each rank, by rank."""


def to_torch(schedule: Schedule) -> Order:
    """A schedule of compute ops as torch's actions, read by torch from the schedule's own text."""
    check(schedule)
    rows = csv.reader(io.StringIO(str(schedule)))
    return {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


def validate_with_torch(schedule: Schedule) -> dict[int, int]:
    """The rank of each stage, as torch's validator infers it."""
    counts = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    return theirs._validate_schedule(to_torch(schedule), *counts)


def lower_with_torch(schedule: Schedule) -> Order:
    """torch's sends, and its receives as early as the senders allow."""
    places = validate_with_torch(schedule)
    # torch's lowering empties the order that it is given.
    order = to_torch(schedule)
    return theirs._add_send_recv(order, places.__getitem__, schedule.num_stages)


def simulate_with_torch(schedule: Schedule) -> Order:
    """By rank, the action of each step of torch's simulation, or ``None``. Every action, messages
    too, takes one step there, so the number of steps is no makespan."""
    places, lowered = validate_with_torch(schedule), lower_with_torch(schedule)
    return theirs._simulate_comms_compute(lowered, places.__getitem__, schedule.num_stages)


def loaded_by_torch(path: Any, schedule: Schedule, form: str) -> dict[int, list[Any]]:
    """What torch's runtime would perform, by rank, when it has loaded a CSV by its own loader.

    The runtime is one without stages and processes: it has the counts that its loader asks for.
    """
    runtime = theirs._PipelineScheduleRuntime.__new__(theirs._PipelineScheduleRuntime)
    runtime.__dict__.update(
        pipeline_order={},
        pp_group_size=schedule.num_ranks,
        stage_index_to_group_rank={},
        _defer_pp_recv=False,
        _n_microbatches=schedule.num_microbatches,
        _num_stages=schedule.num_stages,
        _stages=[],
        _max_active_stages=3,
        _unshard_lookahead="full",
        _defer_reduce_grad_wait=False,
        _max_outstanding_sends=None,
    )
    runtime._load_csv(str(path), format=form)
    placed = {op.stage: rank for op, rank in schedule.where.items()}
    assert runtime.stage_index_to_group_rank == placed
    return runtime.pipeline_order_with_comms
