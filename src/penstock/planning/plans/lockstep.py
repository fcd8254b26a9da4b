"""Whether copies of stages can run in lockstep, as they must where each has rows of the weights and
gathers a layer whenever it is used, or some of the experts, to which tokens of all copies go: all
copies do so together, and none is ahead by an op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.core.schedule import Schedule
from penstock.core.versions import Policy
from penstock.planning.plans.spilling import Spill
from penstock.planning.plans.stage_plan import StagePlan, sharing_ranks
from penstock.planning.plans.summing import Summing


class LockstepReason(NamedTuple):
    """Why copies go on together, in words.

    Attributes:
        who: goes on together.
        doing: the words for what they do.
        remedy: the words for what else to take.
    """

    who: str
    doing: str
    remedy: str


GATHERING = LockstepReason(
    "where gathered_for='use' copies of a stage",
    "gather its weights together",
    "or take gathered_for='step'",
)
EXPERTS = LockstepReason(
    "copies of a stage that divide its experts",
    "exchange tokens within ops",
    "or take expert_ranks=1",
)


def check_lockstep(schedule: Schedule, reason: LockstepReason = GATHERING) -> None:
    """Raise ``InputError`` unless all copies of a stage are on ranks that do the same in the same
    order, each with microbatches of its own, and none then waits for what comes later.

    Args:
        schedule: of whole minibatches.
        reason: why they must.
    """
    who, doing, remedy = reason
    if schedule.num_slices > 1:
        raise InputError(
            f"{schedule.name} cuts sequences into slices, and {who} {doing} by a whole "
            f"microbatch; take a schedule of whole microbatches, {remedy}"
        )
    homes = {stage: schedule.ranks_of(stage) for stage in range(schedule.num_stages)}
    home_of = {rank: ranks for ranks in homes.values() for rank in ranks}
    for stage, ranks in homes.items():
        orders = [[(op.kind, op.stage) for op in schedule.ranks[rank]] for rank in ranks]
        for rank, order in zip(ranks, orders, strict=True):
            if order != orders[0]:
                raise InputError(
                    f"ranks {ranks[0]} and {rank} have copies of stage {stage} and do not perform "
                    f"the same {count_of(len(orders[0]), 'op')} in the same order, but {who} "
                    f"{doing}; take a number of microbatches that the copies divide, "
                    f"as many copies of all stages of a rank, {remedy}"
                )
    _check_acyclic(schedule, home_of, reason)


def _check_acyclic(
    schedule: Schedule, home_of: dict[int, tuple[int, ...]], reason: LockstepReason
) -> None:
    """Raise ``InputError`` if ops that all copies perform at once wait for each other."""
    place = {
        op: (home_of[rank], index)
        for rank, ops in enumerate(schedule.ranks)
        for index, op in enumerate(ops)
    }
    before: dict[tuple[tuple[int, ...], int], set[tuple[tuple[int, ...], int]]] = {}
    for op, (home, index) in place.items():
        needed = before.setdefault((home, index), set())
        if index:
            needed.add((home, index - 1))
        needed |= {place[need] for need in schedule.dependencies(op) if need in place}
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        ranks = sorted({rank for home, _ in error.args[1] for rank in home})
        raise InputError(
            f"in {schedule.name}, ranks {', '.join(map(str, ranks))} would wait for each other: "
            f"{reason.who} go on together only; give all stages as many copies, {reason.remedy}"
        ) from None


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
