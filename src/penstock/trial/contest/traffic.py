"""How many bytes the devices of a plan send each other for a minibatch."""

from __future__ import annotations

from itertools import pairwise

from penstock.core.cluster import Link
from penstock.core.graph import LayerGraph
from penstock.planning.partition.tensor import split_layers
from penstock.planning.plans import Plan
from penstock.planning.plans.spilling import traffic


def moved_bytes(
    plan: Plan, graph: LayerGraph, num_servers: int = 0, link: Link | None = None
) -> int:
    """Bytes that all devices of a plan together send for a minibatch, or that go to and from its
    tier.

    Between stages, outputs and their gradients; among copies of a stage, gradients (and weights,
    where another device updates them); among tensor ranks, parts of values.

    Args:
        plan: the plan.
        graph: the profile that it was made of.
        num_servers: machines besides its devices that sum gradients.
        link: between any two devices, on which depends what tensor ranks split; by default so
            fast that it does not count.
    """
    if plan.spill is not None:
        return sum(traffic(plan.stages, plan.num_microbatches))
    return _between_stages(plan) + _of_gradients(plan, num_servers) + _in_groups(plan, graph, link)


def splits_nothing(plan: Plan) -> bool:
    """Whether the devices of its groups compute every layer whole, each on its own, since on their
    links that is fastest."""
    return plan.num_tensor_ranks > 1 and all(
        split == "whole" for stage in plan.stages for split in stage.splits.values()
    )


def _between_stages(plan: Plan) -> int:
    crossing = sum(
        before.transfer_bytes * before.tensor_ranks
        for before, after in pairwise(plan.stages)
        if before.rank != after.rank
    )
    return 2 * plan.num_microbatches * crossing


def _of_gradients(plan: Plan, num_servers: int) -> int:
    total = 0.0
    for stage, copies, updates in zip(
        plan.stages, plan.replicas, plan.updates_per_minibatch, strict=True
    ):
        if copies > 1:
            held = stage.parameter_bytes * stage.tensor_ranks
            total += updates * _of_sums(plan, copies, held, num_servers)
    return round(total)


def _of_sums(plan: Plan, copies: int, num_bytes: int, num_servers: int) -> float:
    """Sent for one sum of ``num_bytes`` of gradients by all copies and servers."""
    if plan.summing.reducer == "parameter-server":
        return 2.0 * copies * num_bytes
    if plan.summing.reducer == "servers" and num_servers:
        # Each copy sums g bytes, each server c; what one sums comes from and goes to all others.
        spread = copies**2 + num_servers * copies - 2 * num_servers
        own = max(0.0, (copies - num_servers) * num_bytes / spread)
        theirs = (num_bytes - copies * own) / num_servers
        return 2 * copies * (copies - 1) * own + 2 * num_servers * copies * theirs
    return 2.0 * (copies - 1) * num_bytes


def _in_groups(plan: Plan, graph: LayerGraph, link: Link | None) -> int:
    if plan.num_tensor_ranks == 1 or splits_nothing(plan):
        return 0
    split = split_layers(
        graph, plan.num_tensor_ranks, link or Link(), num_microbatches=plan.num_microbatches
    )
    return split.moved_bytes
