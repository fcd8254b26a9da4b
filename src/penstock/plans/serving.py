"""Parameter servers in a plan: which ranks they are, and which stages' weights they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plans.plan import Plan


def served_stages(plan: Plan) -> tuple[int, ...]:
    """The stages that parameter servers update: those with copies, if the plan has such servers."""
    if plan.summing.reducer != "parameter-server":
        return ()
    ranks_of = plan.placement.ranks_of
    return tuple(stage for stage in range(len(plan.stages)) if len(ranks_of(stage)) > 1)


def server_ranks(plan: Plan) -> range:
    """The numbers of the ranks that are parameter servers: those behind the plan's own."""
    count = max(len(plan.summing.servers), 1) if served_stages(plan) else 0
    return range(plan.num_ranks, plan.num_ranks + count)


def num_processes(plan: Plan) -> int:
    """How many processes perform a plan: one for each seat, and one for each parameter server."""
    return plan.num_seats + len(server_ranks(plan))


def stages_held(plan: Plan, rank: int) -> Sequence[int]:
    """The stages whose weights a rank has: those that it runs, or those that it updates as a
    parameter server."""
    if rank in server_ranks(plan):
        return served_stages(plan)
    return plan.placement.stages_of[rank]


def ranks_holding(plan: Plan, stage: int) -> tuple[int, ...]:
    """The ranks that have a stage's weights, parameter servers included."""
    servers = server_ranks(plan) if stage in served_stages(plan) else ()
    return (*plan.placement.ranks_of(stage), *servers)
