"""Branching models may be cut where no prefix of their execution order ends: their layers are put
into another order first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.core.schedule import families
from penstock.core.schedule.lower import add_update
from penstock.core.timing.simulator import simulate
from penstock.planning.partition import best_partition
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.offers import PLAIN, Offer
from penstock.planning.planner.task import Task
from penstock.planning.planner.wish import Wish

if TYPE_CHECKING:
    from penstock.planning.partition.placement import Stages

_USUAL_BYTES = 2**20


def in_other_orders(task: Task) -> Iterator[Task]:
    """The task with its layers in other orders: those that the exact partitions of the graph, in
    the steady state, have."""
    names = [layer.name for layer in task.graph.layers]
    for updates in (1 / task.num_microbatches, 1.0):
        for straight in (False, True):
            partition = best_partition(
                task.graph,
                task.cluster,
                task.communication,
                updates=updates,
                straight=straight,
                order="any",
            )
            order = [name for stage in partition.stages for name in stage.layers]
            if order != names:
                names = order
                yield replace(task, graph=task.graph.reordered(order))


def learned(task: Task, wish: Wish) -> Candidate | None:
    """The candidate whose placement of layers on devices a policy learned by trial and error,
    judged by simulations of 1F1B (``planning.partition.placement.learned``); ``None`` if it does
    not fit.

    Args:
        task: with devices that are all used, or fewer.
        wish: what may run twice.
    """
    from penstock.planning.partition.placement import (  # for those who ask
        learned_placement,
        stage_costs,
    )

    link = task.topology.slowest_link(range(len(task.cluster.devices)), _USUAL_BYTES)

    def score(stages: Stages) -> float:
        schedule = families.build(
            PLAIN, num_ranks=len(stages), num_microbatches=task.num_microbatches
        )
        return simulate(add_update(schedule), stage_costs(task.graph, stages, link)).makespan

    num_devices = min(len(task.cluster.devices), task.num_layers)
    stages = learned_placement(task.graph, num_devices, score).stages
    return _candidate(task, wish, stages)


def _candidate(task: Task, wish: Wish, stages: Sequence[Sequence[str]]) -> Candidate | None:
    order = [name for stage in stages for name in stage]
    cuts = tuple(accumulate(map(len, stages), initial=0))
    placed = replace(task, graph=task.graph.reordered(order), marks=cuts)
    offer = Offer(PLAIN, tuple(range(len(stages))), recompute=wish.recompute)
    candidate = with_cuts(placed, offer.setting(placed), cuts)
    return candidate if candidate.fits else None
