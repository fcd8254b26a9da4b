"""Plans of jobs that other engines run: what their configs describe, priced like any plan; and a
better one beside it, with the lines to change.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of, format_bytes
from penstock.base.values import expect
from penstock.core.cluster import Cluster
from penstock.core.cluster.cluster import only
from penstock.core.graph import LayerGraph
from penstock.planning.handover.capabilities import capabilities_of
from penstock.planning.handover.described import Described
from penstock.planning.handover.written import described, hand_over
from penstock.planning.planner.changes import WhatIf
from penstock.planning.planner.request import PlanRequest
from penstock.planning.planner.search import planned
from penstock.planning.planner.why import without_limits
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.table import WIDTH


def adopted(engine: str, config: object, graph: LayerGraph, cluster: Cluster | None = None) -> Plan:
    """The plan that a config of another engine describes, with the times and bytes that are
    predicted for it, whether it fits or not. ``Plan.of`` explains the arguments."""
    expect(graph, LayerGraph, "the graph", "measure the model with penstock.profile")
    expect(cluster, Cluster | None, "the cluster", "give a penstock.Cluster")
    said = described(engine, config, graph, len(cluster.devices) if cluster else None)
    num_copies = said.copies
    replicas = (num_copies,) * (len(said.cuts) + 1) if num_copies > 1 else ()
    expert_ranks, unsaid = _experts(said, replicas, graph)
    graph, more = _at_size(graph, said.microbatch_size)
    family = said.schedule.partition(":")[0]
    seats = said.ranks * num_copies * said.tensor_ranks
    there = cluster or Cluster.local(seats)
    if len(there.devices) < seats:
        raise PlanError(
            f"the config needs {seats} devices, but the cluster has {len(there.devices)}"
        )
    request = PlanRequest(
        microbatches=said.microbatches * num_copies,
        schedule=said.schedule,
        cuts=said.cuts,
        stages=len(said.cuts) + 1,
        replicas=replicas or None,
        recompute=said.recompute,
        tensor_ranks=said.tensor_ranks,
        expert_ranks=expert_ranks,
        reducer="sharded" if said.is_sharded and replicas else "owners",
        spill="never",
    )
    plan = planned(graph, without_limits(there), request)
    by_name = {device.name: device for device in there.devices}
    return replace(
        plan,
        devices=tuple(by_name[device.name] for device in plan.devices),
        reason=f"as a config of {capabilities_of(engine).title} says: {family}, "
        f"{count_of(len(plan.stages), 'stage')}",
        alternatives=(),
        warnings=(*said.notes, *unsaid, *more, *_excesses(plan, there)),
    )


def _experts(
    said: Described, replicas: tuple[int, ...], graph: LayerGraph
) -> tuple[int, tuple[str, ...]]:
    """(copies that divide experts, notes), where a plan can say so."""
    size = said.expert_ranks
    parts = [part for layer in graph.layers for part in layer.experts]
    fits = parts and not any(part.refusal(size) for part in parts)
    if size == 1 or (fits and said.tensor_ranks == 1 and max(replicas, default=1) % size == 0):
        return size, ()
    why = "the profile has no experts that it divides" if not fits else (
        "here replicas divide experts, in multiples, and without tensor ranks"
    )  # fmt: skip
    return 1, (f"expert parallelism over {size} ranks is left out: {why}",)


def _at_size(graph: LayerGraph, rows: int) -> tuple[LayerGraph, tuple[str, ...]]:
    """(the profile of microbatches of so many rows, or as it is; notes)."""
    if rows in graph.sizes:
        return graph.at(rows), ()
    if not rows or not graph.microbatch_size:
        return graph, ()
    return graph, (
        f"microbatches have {rows} rows there, but {graph.microbatch_size} in the profile, which "
        "times and bytes are for; profile that size",
    )


def _excesses(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Ranks that need more than their device has, in sentences."""
    by_name = {device.name: device for device in cluster.devices}
    limits = [by_name[device.name].memory_bytes for device in plan.leaders]
    return tuple(
        f"rank {rank} is predicted to need {format_bytes(needed)}, but has {format_bytes(limit)}"
        for rank, (needed, limit) in enumerate(zip(plan.rank_bytes, limits, strict=False))
        if limit and needed > limit
    )


@dataclass(frozen=True)
class Improvement:
    """A plan of another engine's, and a better one that it can run.

    Attributes:
        engine: its name, as ``Plan.to`` takes it.
        before, after: the plans.
        lines: what to change in the engine's words, as a unified diff; empty where nothing is.
    """

    engine: str
    before: Plan
    after: Plan
    lines: str

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Both plans side by side, and the lines to change."""
        title = capabilities_of(self.engine).title
        table = WhatIf(f"a better plan for {title}", self.before, self.after).text(width)
        return f"{table}\n\n{self.lines}" if self.lines else f"{table}\n\nnothing to change"


def improved(plan: Plan, engine: str, graph: LayerGraph, cluster: Cluster) -> Improvement:
    """The best plan that an engine can run for the same minibatch, beside one that it runs.

    Args:
        plan: as ``Plan.of`` gives it.
        engine: its engine.
        graph, cluster: what it was made for.

    Raises:
        PlanError: the engine can run no plan that fits.
    """
    there = only(cluster, range(plan.num_seats))
    request = PlanRequest(
        microbatches=plan.num_microbatches,
        tensor_ranks=plan.num_tensor_ranks,
        expert_ranks=max(stage.expert_ranks for stage in plan.stages),
        reducer=plan.summing.reducer,
        engine=engine,
    )
    best = planned(_at_size(graph, plan.microbatch_size)[0], there, request)
    is_better = best.step_seconds < plan.step_seconds or _excesses(plan, cluster)
    after = best if is_better else plan
    return Improvement(engine, plan, after, _changed_lines(plan, after, engine))


def _changed_lines(before: Plan, after: Plan, engine: str) -> str:
    """A unified diff of what the engine's users paste."""
    try:
        old = str(hand_over(before, engine))
    except InputError:  # what is there may be more than a plan can say of it
        old = ""
    new = str(hand_over(after, engine))
    title = capabilities_of(engine).title
    rows = difflib.unified_diff(
        old.splitlines(),
        new.splitlines(),
        f"{title}, as it is",
        f"{title}, better",
        n=0,
        lineterm="",
    )
    return "\n".join(rows)
