"""``MemoryParts``: on what the memory of a rank is spent when it needs most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from penstock.core.schedule import Kind, Schedule
from penstock.core.schedule.memory import Sizes
from penstock.planning.plans.spilling import Spill, held_by_op
from penstock.planning.plans.stage_plan import StagePlan, sizes_of


class MemoryParts(NamedTuple):
    """The bytes that a rank needs at its worst moment, by their purpose; of several tensor ranks,
    those of each.

    Attributes:
        weights: in all their versions; fully sharded, with what is gathered at once.
        gradients: of one version.
        optimizer: its state, masters included, or the shard of it that the rank has.
        buffers: what the model's state has besides.
        activations: what microbatches in flight keep, or the inputs from which it is computed
            again.
        recomputed: what a microbatch keeps whose forward has run again.
        communication: of gradients that are summed with other ranks.
        workspace: what layers need for themselves while they run.
        visiting: weights, gradients and optimizer state of stages that come and go; ``weights``,
            ``gradients`` and ``optimizer`` are then 0.
        allocator: what the allocator of its device takes besides tensors.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    recomputed: int
    communication: int
    workspace: int
    visiting: int = 0
    allocator: int = 0

    @property
    def total(self) -> int:
        """All of it: the predicted peak of the rank."""
        return sum(self)


def allocated(tensor_bytes: Sequence[int], slacks: Sequence[float]) -> tuple[int, ...]:
    """Bytes that the ranks' allocators take of their devices for tensors of so many bytes.

    Args:
        slacks: of each rank's device, ``Device.allocator_slack``; empty where there is none.
    """
    if not any(slacks):
        return tuple(tensor_bytes)
    return tuple(ceil(size * (1 + slack)) for size, slack in zip(tensor_bytes, slacks, strict=True))


def parts_of_ranks(
    stages: Sequence[StagePlan],
    schedule: Schedule,
    rank_bytes: Sequence[int],
    spill: Spill | None,
) -> Iterator[MemoryParts]:
    """The parts of each rank, without what its allocator takes besides.

    Args:
        schedule: with the recomputes that the stages want.
        rank_bytes: of tensors on each rank, as predicted.
        spill: where stages come from, if they come and go.
    """
    for rank, (own, num_bytes) in enumerate(zip(schedule.stages_of, rank_bytes, strict=True)):
        yield _of_rank(stages, schedule, rank, own, num_bytes, stays=spill is None)


def _of_rank(
    stages: Sequence[StagePlan],
    schedule: Schedule,
    rank: int,
    own: Sequence[int],
    num_bytes: int,
    *,
    stays: bool,
) -> MemoryParts:
    held = [stages[stage] for stage in own]
    rooms = [stage.workspace_bytes for stage in held]
    state = MemoryParts(
        weights=sum(stage.weight_versions * stage.held_bytes for stage in held) * stays,
        gradients=sum(stage.summed_bytes for stage in held) * stays,
        optimizer=sum(stage.optimizer_bytes for stage in held) * stays,
        buffers=sum(stage.buffer_bytes for stage in held),
        activations=0,
        recomputed=0,
        communication=sum(stage.sum_bytes for stage in held),
        workspace=sum(rooms) if stays else max(rooms, default=0),
    )
    rest = num_bytes - state.total
    if not stays:
        return state._replace(visiting=rest)
    again = min(_recomputed_bytes(stages, schedule, rank), rest)
    return state._replace(activations=rest - again, recomputed=again)


def _recomputed_bytes(stages: Sequence[StagePlan], schedule: Schedule, rank: int) -> int:
    """Bytes that microbatches keep at the rank's worst moment since their forwards have run again,
    beyond the inputs that were kept for that."""
    ops = schedule.ranks[rank]
    if not any(op.kind is Kind.RECOMPUTE for op in ops):
        return 0
    sizes = sizes_of(stages)
    never = Sizes(
        activation=[
            stage.input_bytes if stage.recompute == "stage" else kept
            for stage, kept in zip(stages, sizes.activation, strict=True)
        ],
        kept_for_weight=sizes.kept_for_weight,
        stage_input=sizes.stage_input,
    )
    num_slices, kind = schedule.num_slices, schedule.activations
    behind = [held for _, held in held_by_op(ops, sizes, None, num_slices, kind)]
    worst = max(range(len(behind)), key=behind.__getitem__)
    without = [held for _, held in held_by_op(ops, never, None, num_slices, kind)]
    return int(behind[worst] - without[worst])
