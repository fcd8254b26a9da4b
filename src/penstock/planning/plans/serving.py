"""Parameter servers in a plan: which ranks they are, and which stages' weights they have.

A server of stages whose ranks are groups of tensor ranks is such a group itself: what a member of a
stage hands in, the member of the server with the same coordinate sums and updates. Stages of
different numbers of tensor ranks have different servers; those of one machine stand together.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.timing.simulator.beside import Served
from penstock.planning.plans.shape import Shape


def served_stages(plan: Shape) -> tuple[int, ...]:
    """The stages that parameter servers update: those with copies, if the plan has such servers."""
    if plan.summing.reducer != "parameter-server":
        return ()
    ranks_of = plan.placement.ranks_of
    return tuple(stage for stage in range(len(plan.stages)) if len(ranks_of(stage)) > 1)


def _server_sizes(plan: Shape) -> tuple[int, ...]:
    """How many members each parameter server has, in the order of their ranks."""
    sizes = sorted({plan.stages[stage].tensor_ranks for stage in served_stages(plan)})
    return tuple(sizes) * max(len(plan.summing.servers), 1)


def server_ranks(plan: Shape) -> range:
    """The numbers of the ranks that are parameter servers: those behind the plan's own."""
    return range(plan.num_ranks, plan.num_ranks + len(_server_sizes(plan)))


def servers_of(plan: Shape, stage: int) -> tuple[int, ...]:
    """The ranks that update a stage as parameter servers; none if it has no copies."""
    if stage not in served_stages(plan):
        return ()
    sizes = zip(server_ranks(plan), _server_sizes(plan), strict=True)
    return tuple(rank for rank, size in sizes if size == plan.stages[stage].tensor_ranks)


def all_group_sizes(plan: Shape) -> tuple[int, ...]:
    """How many members each rank has, parameter servers included."""
    return (*plan.group_sizes, *_server_sizes(plan))


def num_processes(plan: Shape) -> int:
    """How many processes perform a plan: one for each member of each rank."""
    return sum(all_group_sizes(plan))


def stages_held(plan: Shape, rank: int) -> Sequence[int]:
    """The stages whose weights a rank has: those that it runs, or those that it updates as a
    parameter server."""
    if rank in server_ranks(plan):
        return tuple(stage for stage in served_stages(plan) if rank in servers_of(plan, stage))
    return plan.placement.stages_of[rank]


def ranks_holding(plan: Shape, stage: int) -> tuple[int, ...]:
    """The ranks that have a stage's weights, parameter servers included."""
    return (*plan.placement.ranks_of(stage), *servers_of(plan, stage))


def served_by(plan: Shape) -> Served:
    """Which stages hand their gradients to how many servers, of whatever kind."""
    summing, updates = plan.summing, plan.summing.reducer == "parameter-server"
    count = max(len(summing.servers), 1) if updates else len(summing.servers)
    if not count:
        return Served()
    ranks_of = plan.placement.ranks_of
    counts = (count * (len(ranks_of(stage)) > 1) for stage in range(len(plan.stages)))
    return Served(tuple(counts), updates)
