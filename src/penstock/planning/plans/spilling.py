"""Plans with more than fits into memory. Under ``Spill`` stages come from a tier before their ranks
compute with them, and leave again; under ``Offload`` what microbatches keep leaves between forward
and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Annotated

from msgspec import Meta

from penstock.base.errors import InputError
from penstock.base.values import Value, whole
from penstock.core.cluster.parts import Tier
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.lower import add_late_agreement, add_late_update, add_update
from penstock.core.schedule.memory import Sizes, changes
from penstock.core.schedule.offload import add_offload
from penstock.core.schedule.op import Activations
from penstock.core.schedule.residence import (
    StageBytes,
    add_residence,
    resident_bytes,
    whole_pages,
)
from penstock.core.timing.costs import Costs
from penstock.core.versions import Policy
from penstock.planning.plans.stage_plan import StagePlan, sharing_ranks, sizes_of
from penstock.planning.plans.summing import ReducerName


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
        kind = sharing_ranks(stages)
        raise InputError(
            f"activations of stages that several {kind} ranks share stay in memory; leave offload "
            f"out, or plan with {kind}_ranks=1"
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


class Spill(Value, frozen=True, kw_only=True):
    """That the stages of each rank come from a tier and leave again.

    Attributes:
        tier: where they are meanwhile.
        memory_bytes: what a rank may hold of weights, gradients, optimizer state and activations; 0
            where there is no limit.
        ahead: how many visits before its own a stage begins to come.
        moved_bytes_per_second, new_bytes_per_second: as the model's profile has them, for cores
            that compute while their threads move stages.
    """

    tier: Tier = Tier()
    memory_bytes: int = 0
    ahead: int = 1
    moved_bytes_per_second: float = 0.0
    new_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields("spill")
        whole("spill: ahead", self.ahead, 0, 1000)


def check_spill(
    schedule: Schedule, versions: Policy, stages: Sequence[StagePlan], reducer: ReducerName
) -> None:
    """Raise ``InputError`` if stages cannot come and go in a plan."""
    name, remedy = schedule.name, 'take schedule="spilled", or leave spill out'
    if versions.asynchronous:
        raise InputError(
            f"{name} never flushes, so that weights have several versions, of which a stage that "
            f"leaves memory can keep none; {remedy}"
        )
    if schedule.splits_backward:
        raise InputError(
            f"{name} splits backwards, and each half would have to bring its weights in; {remedy}"
        )
    if schedule.weight_copies > 1:
        raise InputError(
            f"{name} has stages on several ranks, whose gradients are summed; stages that come and "
            f"go have one rank each: {remedy}"
        )
    if (size := max(stage.tensor_ranks for stage in stages)) > 1:
        kind = sharing_ranks(stages)
        raise InputError(
            f"stages of {size} {kind} ranks cannot come and go; leave spill out, or plan with "
            f"{kind}_ranks=1"
        )
    if reducer == "fully-sharded":
        raise InputError(
            "the reducer 'fully-sharded' keeps rows of weights in memory, and with spill stages "
            "come and go; leave spill out, or take the reducer 'owners'"
        )
    if reducer == "parameter-server":
        raise InputError(
            "parameter servers send weights to stages that are in memory, and with spill they "
            "come and go; leave spill out, or take the reducer 'owners'"
        )


def with_residence(
    schedule: Schedule, spill: Spill, *, agrees: bool = False, updates: bool = True
) -> Schedule:
    """A schedule with its updates, and with all fetches and leaves.

    Args:
        schedule: compute, and what runs again.
        agrees: whether updates depend on all gradients (clipping): then they come with the next
            minibatch, and gradients leave before.
        updates: whether the minibatch ends with an update.
    """
    if agrees:
        schedule = add_late_update(schedule)
    elif updates:
        schedule = add_update(schedule)
    schedule = add_residence(schedule, ahead=spill.ahead)
    return add_late_agreement(schedule) if agrees and updates else schedule


def stage_bytes(stages: Sequence[StagePlan]) -> StageBytes:
    """The sizes of a stage that come and go, in buffers of whole pages."""
    return StageBytes(
        [whole_pages(stage.parameter_bytes) for stage in stages],
        [whole_pages(stage.summed_bytes) for stage in stages],
        [whole_pages(stage.optimizer_bytes) for stage in stages],
    )


def bytes_of_spilled_ranks(
    stages: Sequence[StagePlan],
    schedule: Schedule,
    spill: Spill,
    *,
    agrees: bool = False,
    keeps_freed: bool = False,
) -> tuple[int, ...]:
    """Predicted memory of each rank at its worst moment: the stages that are there, what the order
    of its ops keeps of activations, buffers of all its stages and room to work.

    Args:
        schedule: with the recomputes that the stages want.
        agrees: whether updates depend on all gradients, and so come late.
        keeps_freed: whether memory that activations and updates leave is kept for later ones, so
            that what comes and goes never lies there. An update makes up to two tensors for a
            weight, which has half of a layer's at most in nearly all models.
    """
    own_bytes, how = stage_bytes(stages), {"agrees": agrees, "keeps_freed": keeps_freed}
    return tuple(
        most_held(stages, schedule, spill, own_bytes, rank, **how)
        for rank in range(schedule.num_ranks)
    )


_SCATTERED = 2
"""Over what is in use: memory of which an allocator keeps what is freed, as has been measured."""


def most_held(
    stages: Sequence[StagePlan],
    schedule: Schedule,
    spill: Spill,
    own_bytes: StageBytes,
    rank: int,
    *,
    agrees: bool,
    keeps_freed: bool = False,
) -> int:
    """As ``bytes_of_spilled_ranks``, for one rank, of whose stages somebody knows the bytes."""
    ops = with_residence(schedule, spill, agrees=agrees).ranks[rank]
    there = None if keeps_freed else own_bytes
    held = held_by_op(ops, sizes_of(stages), there, schedule.num_slices)
    worst = max((while_it_runs for while_it_runs, _ in held), default=0)
    if keeps_freed:
        most_there = max(resident_bytes(ops, own_bytes), default=0)
        worst = most_there + _SCATTERED * (worst + max(own_bytes.weights, default=0))
    own = [stages[stage] for stage in schedule.stages_of[rank]]
    always = sum(stage.buffer_bytes + stage.sum_bytes for stage in own)
    return ceil(worst) + always + max(stage.workspace_bytes for stage in own)


def held_by_op(
    ops: Sequence[Op],
    sizes: Sizes,
    own_bytes: StageBytes | None,
    num_slices: int = 1,
    activations: Activations = "own",
) -> Iterator[tuple[float, float]]:
    """For each op of a rank, the bytes that come and go as they are while it runs, and behind it.

    Args:
        ops: in the rank's order.
        sizes: of what microbatches keep.
        own_bytes: of stages that come and go; ``None`` where all of them stay.
        num_slices, activations: as ``Schedule`` has them.
    """
    steps = changes(ops, sizes, num_slices, activations)
    at_starts, bytes_changed = (column.tolist() for column in steps)
    kept_behind = accumulate(bytes_changed)
    resident = [0] * len(ops) if own_bytes is None else resident_bytes(ops, own_bytes)
    rows = zip(resident, kept_behind, at_starts, bytes_changed, strict=True)
    for there, kept, at_start, change in rows:
        # What a backward goes through is there while gradients already take their room.
        yield there + kept - (0 if at_start else min(change, 0)), there + kept


def spilled_costs(
    costs: Costs, stages: Sequence[StagePlan], spill: Spill, schedule: Schedule
) -> Costs:
    """The costs of a plan with those of its transfers: each on its own, and what compute loses by
    them and by new pages, in the ops that lose it.

    Args:
        schedule: with the recomputes that the stages want.
    """
    weights = [stage.parameter_bytes for stage in stages]
    state = [stage.optimizer_bytes for stage in stages]
    tier, lost = spill.tier, list(_lost_seconds(stages, spill, schedule))

    def with_lost(kind: Kind) -> list[float]:
        return [costs.duration(Op(stage, kind, 0)) + own[kind] for stage, own in enumerate(lost)]

    return replace(
        costs,
        forward=with_lost(Kind.FORWARD),
        recompute=with_lost(Kind.RECOMPUTE),
        backward=with_lost(Kind.BACKWARD),
        update=with_lost(Kind.UPDATE),
        fetch=[*map(tier.read_seconds, weights)],
        fetch_state=[*map(tier.read_seconds, state)],
        leave=[*map(tier.write_seconds, weights)],
        leave_state=[*map(tier.write_seconds, state)],
    )


def _lost_seconds(
    stages: Sequence[StagePlan], spill: Spill, schedule: Schedule
) -> Iterator[dict[Kind, float]]:
    """What each op of each stage loses: passes by what moves meanwhile, and whoever makes what is
    kept, or what an update makes, by new pages."""
    limit, pages = spill.memory_bytes, spill.new_bytes_per_second
    goes_back = (
        limit
        and pages
        and limit < max(bytes_of_spilled_ranks(stages, schedule, spill, keeps_freed=True))
    )
    by_moving = 1 / spill.moved_bytes_per_second if spill.moved_bytes_per_second else 0.0
    by_pages = 1 / pages if goes_back else 0.0
    for stage in stages:
        twice = stage.recompute == "stage"
        # Weights come for the forwards, and again for the backwards, behind which they go with
        # the state that came for the update.
        coming = stage.parameter_bytes / schedule.num_microbatches * by_moving
        rest = 2 * (stage.parameter_bytes + stage.optimizer_bytes) / schedule.num_microbatches
        again = stage.again_seconds if twice else 0.0
        back = stage.backward_input_seconds + stage.backward_weight_seconds
        share = again / (again + back) if again else 0.0
        kept = stage.kept_bytes * by_pages
        yield {
            Kind.FORWARD: coming + (0.0 if twice else kept),
            Kind.RECOMPUTE: share * rest * by_moving + (kept if twice else 0.0),
            Kind.BACKWARD: (1 - share) * rest * by_moving,
            Kind.UPDATE: 2 * stage.parameter_bytes * by_pages,
        }


def traffic(
    stages: Sequence[StagePlan], num_microbatches: int, group: int = 0, *, agrees: bool = False
) -> tuple[int, int]:
    """Bytes that one rank with all of these stages reads and writes for a minibatch: with weights P
    (P₀ of the first stage, Pₗ of the last) and optimizer state S, 2P+S−P₀−Pₗ and P+S, whatever the
    number of microbatches is.

    Args:
        group: of the schedule ``spilled``; where the microbatches go through in several groups, all
            weights come once more for each, and gradients leave and come back in between.
        agrees: whether the update is late, for which gradients leave and come back as well.
    """
    weights, first = sum(stage.parameter_bytes for stage in stages), stages[0].parameter_bytes
    state, last = sum(stage.optimizer_bytes for stage in stages), stages[-1].parameter_bytes
    if len(stages) == 1:
        first = last = weights
    groups = ceil(num_microbatches / (group or num_microbatches))
    once = 2 * weights - last - first if len(stages) > 1 else 0
    read, written = groups * once + state, weights + state
    gradients = sum(stage.summed_bytes for stage in stages)
    between = (groups - 1) * gradients + (gradients if agrees else 0)
    return read + between, written + between
