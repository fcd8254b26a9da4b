"""Whether copies of stages can divide the experts of their mixtures: all of a stage's copies do the
same in the same order, for tokens travel between them in the middle of an op."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core.schedule import Schedule
from penstock.core.versions import Policy
from penstock.planning.plans.lockstep import EXPERTS, check_lockstep
from penstock.planning.plans.spilling import Spill
from penstock.planning.plans.stage_plan import StagePlan, sharing_ranks
from penstock.planning.plans.summing import Summing

_REDUCERS = ("owners", "sharded")


def check_experts(
    schedule: Schedule,
    stages: Sequence[StagePlan],
    summing: Summing,
    versions: Policy,
    spill: Spill | None,
) -> None:
    """Raise ``InputError`` if that experts are divided does not go with the rest of a plan.

    Args:
        schedule: of one minibatch.
    """
    kind = sharing_ranks(stages)
    divided = [index for index, stage in enumerate(stages) if stage.expert_ranks > 1]
    several = False
    for index in divided:
        size, copies = stages[index].expert_ranks, len(schedule.ranks_of(index))
        several = several or size < copies
        if copies % size:
            raise InputError(
                f"stage {index}: expert_ranks is {size}, and the stage has {copies} "
                f"{'copy' if copies == 1 else 'copies'}; experts are divided among copies, so give "
                f"it replicas in multiples of {size}, or take expert_ranks=1"
            )
    asked = {
        f"reducer={summing.reducer!r}": (
            summing.reducer not in _REDUCERS,
            f"take one of {', '.join(_REDUCERS)}",
        ),
        "reducer='sharded' with several groups of copies that have all experts": (
            summing.reducer == "sharded" and several,
            "take 'owners', or as many expert_ranks as copies",
        ),
        "a schedule that never flushes": (versions.asynchronous, "take a synchronous schedule"),
        f"{kind}_ranks": (
            any(stage.tensor_ranks > 1 for stage in stages),
            f"take {kind}_ranks=1",
        ),
        "spill": (spill is not None, 'take spill="never"'),
    }
    for words, (is_asked, remedy) in asked.items():
        if is_asked:
            raise InputError(f"expert_ranks do not go with {words}; {remedy}, or expert_ranks=1")
    check_lockstep(schedule, EXPERTS)


def with_expert_ranks(
    placement: Schedule, stages: Sequence[StagePlan], expert_ranks: int, chosen: Collection[int]
) -> tuple[StagePlan, ...]:
    """Stages with experts divided among so many copies.

    Args:
        chosen: which ones, by number; none: those that have copies, and experts if stages say so.

    Raises:
        InputError: none has several copies.
    """
    # Who wrote a plan by hand need not say which stages have experts: then all count.
    known = {k for k, own in enumerate(stages) if own.expert_loads or own.expert_ranks > 1}
    candidates = known or range(len(stages))
    wanted = {*chosen} or {index for index in candidates if len(placement.ranks_of(index)) > 1}
    if expert_ranks != 1 and not wanted:
        who = "stage with experts" if known else "stage"
        raise InputError(
            f"expert_ranks={expert_ranks} divides experts among copies, and no {who} of this plan "
            "has several; plan with replicas=…, or take expert_ranks=1"
        )
    alone = (1.0,) if expert_ranks == 1 else ()
    return tuple(
        replace(own, expert_ranks=expert_ranks, expert_loads=alone if index in known else ())
        if index in wanted
        else own
        for index, own in enumerate(stages)
    )
