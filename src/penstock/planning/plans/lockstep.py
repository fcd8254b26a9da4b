"""Whether copies of stages can run in lockstep, as they must where each has rows of the weights and
gathers a layer whenever it is used, or some of the experts, to which tokens of all copies go: all
copies do so together, and none is ahead by an op."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.units import count_of
from penstock.core.schedule import Schedule


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
