"""What a rehearsal's processes need to know: one value, which travels as a line of JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from penstock.base.values import Value
from penstock.core.schedule import Op, Schedule
from penstock.core.timing.costs import Costs
from penstock.core.versions import Flush, Policy

RehearsalTransport = Literal["shared-memory", "threads"]
WaitsName = Literal["relative", "logical"]
UpdateMode = Literal["separate", "agreed", "post-validated"]


class Job(Value, frozen=True, kw_only=True):
    """One rehearsal.

    Attributes:
        ops: a lowered schedule as CSV; slices are microbatches of their own (``flattened``).
        costs: seconds of these ops.
        num_steps: how often to perform them, warm-up included.
        message_bytes: the size of an output, and of its gradient.
        waits: what ops do instead of computing.
        updates: whether stages update each for itself, when all ranks have agreed, or on trust. In
            the last case ranks go from step to step without waiting for each other's ends.
        versions: the policy of a stream, all of which is one step.
        deadline_seconds: how long a receive waits.
    """

    ops: str
    costs: Costs
    num_steps: int
    message_bytes: int
    waits: WaitsName
    updates: UpdateMode = "separate"
    versions: Policy = field(default_factory=Flush)
    deadline_seconds: float

    @property
    def overlapping(self) -> bool:
        """Whether steps follow each other without a common start."""
        return self.updates == "post-validated"

    def schedule(self) -> Schedule:
        """The ops, read."""
        return Schedule.parse(self.ops)


def flattened(schedule: Schedule) -> Schedule:
    """Each slice as a microbatch of its own, so that two numbers name all work. What slices need of
    each other within a stage, the order of their rank already gives."""
    num_slices = schedule.num_slices

    def flat(op: Op) -> Op:
        return op._replace(microbatch=op.microbatch * num_slices + op.slice, slice=0)

    return schedule.with_ranks([flat(op) for op in ops] for ops in schedule.ranks)
