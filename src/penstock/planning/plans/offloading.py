"""Plans in which what microbatches keep leaves memory between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from penstock.base.errors import InputError
from penstock.base.values import Value, whole
from penstock.core.cluster.parts import Tier
from penstock.core.schedule import Kind, Schedule
from penstock.core.schedule.offload import add_offload
from penstock.core.timing.costs import Costs
from penstock.core.versions import Policy
from penstock.planning.plans.stage_plan import StagePlan


class Offload(Value, frozen=True, kw_only=True):
    """That the activations of some stages leave behind a forward and come back for its backward.

    Attributes:
        tier: where they are meanwhile.
        stages: whose activations leave, by their numbers; all of them if it is empty.
        ahead: how many passes of the rank before its own backward a fetch begins.
    """

    tier: Tier = Tier(kind="host")
    stages: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    ahead: int = 1

    def __post_init__(self) -> None:
        self.check_fields("offload")
        whole("offload: ahead", self.ahead, 0, 1000)

    def chosen(self, num_stages: int) -> tuple[int, ...]:
        """The numbers of the stages whose activations leave."""
        return self.stages or tuple(range(num_stages))


def check_offload_fits(offload: Offload, stages: Sequence[StagePlan], versions: Policy) -> None:
    """Raise ``InputError`` if activations cannot leave in a plan."""
    if versions.asynchronous:
        raise InputError(
            "activations leave only where the pipeline drains: a stream has no end at which all of "
            "them are back; leave offload out, or take a synchronous schedule"
        )
    absent = [stage for stage in offload.stages if stage >= len(stages)]
    if absent:
        raise InputError(
            f"offload: there is no stage {absent[0]}: the plan has {len(stages)}, numbered from 0"
        )
    for index in offload.chosen(len(stages)):
        if stages[index].recompute != "none":
            raise InputError(
                f"stage {index} keeps little, since it runs again, and its activations are to "
                'leave as well; take recompute="none" there, or leave it out of offload'
            )
    if max(stage.tensor_ranks for stage in stages) > 1:
        raise InputError(
            "activations of stages that several tensor ranks share stay in memory; leave offload "
            "out, or plan with tensor_ranks=1"
        )


def with_offload(schedule: Schedule, offload: Offload) -> Schedule:
    """A schedule in which the activations leave and come back."""
    return add_offload(schedule, offload.chosen(schedule.num_stages), offload.ahead)


def offloading_costs(costs: Costs, stages: Sequence[StagePlan], offload: Offload) -> Costs:
    """The costs of a plan with those of moving activations."""
    sizes = [stage.kept_bytes for stage in stages]
    return replace(
        costs,
        fetch_stash=[*map(offload.tier.read_seconds, sizes)],
        leave_stash=[*map(offload.tier.write_seconds, sizes)],
    )


def moved_activations(schedule: Schedule, stages: Sequence[StagePlan]) -> int:
    """Bytes of activations that leave in a minibatch; as many come back."""
    left = (op for op in schedule.where if op.kind is Kind.LEAVE_STASH)
    return sum(stages[op.stage].kept_bytes for op in left) // schedule.num_slices
