"""``replan``: the same training on other devices, from a plan that was made for some that are gone.

What decides the losses stays: the model, the microbatches of a minibatch, and their size. What is
free is where the model is cut, and on which devices its stages are.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace as replaced

from msgspec.structs import replace

from penstock.base.arguments import public
from penstock.base.errors import InputError, ModelError, PlanError
from penstock.base.values import expect
from penstock.core.cluster import Cluster, Topology
from penstock.core.graph import Layer, LayerGraph
from penstock.planning.planner.request import PlanRequest
from penstock.planning.planner.search import planned
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spilling import Spill
from penstock.planning.plans.stage_plan import StagePlan
from penstock.planning.plans.summing import BY_SHARE

_FALLBACK = "1f1b"
"""For any number of devices, and with the sums of most others."""

_SECONDS = (
    "forward_seconds", "backward_input_seconds", "backward_weight_seconds", "split_seconds",
    "update_seconds",
)  # fmt: skip
_BYTES = (
    "activation_bytes", "weight_kept_bytes", "parameter_bytes", "optimizer_bytes", "buffer_bytes",
)  # fmt: skip


@public()
def replan(
    plan: Plan,
    cluster: Cluster,
    graph: LayerGraph | None = None,
    *,
    memory_bytes: int | None = None,
) -> Plan:
    """Plan the training of a plan for other devices, all of which are used, so that it can go on
    from a checkpoint on fewer of them, or on more.

    The number of microbatches and their size stay, so losses do: to the bit where the schedules
    sum gradients in the same order (all but ``chimera`` do), and no stage has replicas. The
    schedule stays where it exists for so many devices, else it becomes ``1f1b``.

    Args:
        plan: the old one.
        cluster: the devices to use.
        graph: the profile that the old plan was made from. Without it, costs are taken from the
            plan itself, which knows those of whole stages only: each stage's layers then count as
            alike.
        memory_bytes: what one rank may use, on top of the cluster's own limits; where stages come
            and go, by default what they might use.

    Raises:
        PlanError: the model has fewer layers than there are devices, or does not fit in memory.
        ModelError: the profile is another model's.
        InputError: the plan never flushes, so that what it learns depends on its devices, or shares
            layers among devices.
    """
    expect(plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
    expect(cluster, Cluster, "the cluster", 'give Cluster.load("FILE") or Cluster.of("dgx-h100")')
    expect(graph, LayerGraph | None, "the graph", "give the profile of the plan, or leave it out")
    _check_replannable(plan)
    reducer = plan.summing.reducer
    measured = _graph_of(plan) if graph is None else _measured(plan, graph)
    if reducer in {"servers", "parameter-server"} and not cluster.spares:
        reducer = "owners"  # with the same sums
    request = PlanRequest(
        microbatches=plan.num_microbatches,
        memory_bytes=memory_bytes,
        reducer=reducer,
        stale=plan.summing.stale if reducer == "parameter-server" else 0,
        gathered_for=plan.summing.gathered_for,
        hybrid=_stays_hybrid(plan, cluster),
    )
    if plan.offload is not None and not cluster.tiers:
        cluster = replace(cluster, tiers=(plan.offload.tier,))
    if plan.spill is None:
        anew = _on_all_devices(plan, measured, cluster, request)
    else:
        anew = _spilled(plan, plan.spill, measured, cluster, memory_bytes)
    reason = f"replanned from {plan.num_ranks} ranks: {anew.reason}"
    return replace(anew, model=plan.model, microbatch_size=plan.microbatch_size, reason=reason)


def _stays_hybrid(plan: Plan, cluster: Cluster) -> bool:
    """Whether weights that are sharded inside hosts can be so on a cluster."""
    summing = plan.summing
    has_levels = summing.reducer == "fully-sharded" and len(summing.levels) > 0
    return has_levels and max(Topology(cluster).hosts) >= 0


def _check_replannable(plan: Plan) -> None:
    """Raise ``InputError`` for a plan that trains something else on other devices, or shares
    layers among them."""
    if plan.versions.asynchronous:
        raise InputError(
            f"{plan.schedule} trains with weights as old as its stages are far apart, so that on "
            "other devices it learns something else; plan anew with penstock.plan"
        )
    if plan.num_tensor_ranks > 1:
        raise InputError(
            "the plan shares layers among devices, which replan cannot do; plan anew with "
            "penstock.plan"
        )


def _spilled(
    plan: Plan, spill: Spill, graph: LayerGraph, cluster: Cluster, memory_bytes: int | None
) -> Plan:
    """Where stages come and go, they may go on doing so, from the tier that they have come from
    unless the cluster names others."""
    there = cluster if cluster.tiers else replace(cluster, tiers=(spill.tier,))
    limit = memory_bytes or spill.memory_bytes or None
    return planned(
        graph, there, PlanRequest(microbatches=plan.num_microbatches, memory_bytes=limit)
    )


def _on_all_devices(plan: Plan, graph: LayerGraph, cluster: Cluster, request: PlanRequest) -> Plan:
    """A plan with the same schedule if there is one, else with ``1f1b``; if there is none either,
    what is raised says why."""
    num_devices = len(cluster.devices)
    if max(plan.replicas) == 1:
        num_stages = num_devices * len(plan.stages) // plan.num_ranks
        with suppress(InputError):
            return _planned(graph, cluster, request, plan.schedule, num_stages)
    return _planned(graph, cluster, request, _FALLBACK, num_devices)


def _planned(
    graph: LayerGraph, cluster: Cluster, request: PlanRequest, schedule: str, num_stages: int
) -> Plan:
    plan = planned(graph, cluster, replaced(request, schedule=schedule, stages=num_stages))
    if plan.num_ranks != len(cluster.devices):
        raise PlanError(
            f"{schedule} with {num_stages} stages leaves devices idle: it runs on "
            f"{plan.num_ranks} of {len(cluster.devices)}"
        )
    return plan


def _measured(plan: Plan, graph: LayerGraph) -> LayerGraph:
    if graph.fingerprint != plan.model:
        raise ModelError("the profile is of another model than the plan; give the plan's own")
    return graph.at(plan.microbatch_size) if plan.microbatch_size else graph


def _graph_of(plan: Plan) -> LayerGraph:
    """A profile, as far as a plan knows one: the layers of a stage are alike.

    Raises:
        InputError: it does not know enough.
    """
    if plan.divides_experts:
        raise InputError(
            "a plan whose copies divide experts does not say how large these are as a whole; give "
            "replan the model's graph"
        )
    if plan.summing.reducer == "parameter-server":
        raise InputError(
            "a plan with parameter servers does not say how much optimizer state there is; give "
            "replan the model's graph"
        )
    layers = []
    for index, stage in enumerate(plan.stages):
        speed = min(
            (plan.devices[rank].speed for rank in plan.placement.ranks_of(index) if plan.devices),
            default=1.0,
        )
        shards = plan.replicas[index] if plan.summing.reducer in BY_SHARE else 1
        if plan.summing.reducer == "fully-sharded":
            shards = plan.summing.num_shards(plan.placement.ranks_of(index))
        layers += _layers_of(stage, speed, shards)
    return LayerGraph(
        layers=tuple(layers),
        microbatch_size=max(1, plan.microbatch_size),
        input_bytes=plan.stages[0].input_bytes,
        moved_bytes_per_second=0.0 if plan.spill is None else plan.spill.moved_bytes_per_second,
        new_bytes_per_second=0.0 if plan.spill is None else plan.spill.new_bytes_per_second,
        num_threads=plan.num_threads,
    )


def _layers_of(stage: StagePlan, speed: float, shards: int) -> list[Layer]:
    """The layers of a stage with equal shares of its costs, as on a device of speed 1.

    Args:
        shards: copies that share the update and the optimizer's state.
    """
    count = len(stage.layers)
    stage = replace(
        stage,
        update_seconds=stage.update_seconds * shards,
        optimizer_bytes=stage.optimizer_bytes * shards,
    )
    seconds = {name: getattr(stage, name) * speed / count for name in _SECONDS}
    if stage.recompute_seconds is not None:
        seconds["recompute_seconds"] = stage.recompute_seconds * speed / count
    return [
        Layer(
            name=name,
            **seconds,
            # Shares that add up to the whole.
            **{key: (getattr(stage, key) + place) // count for key in _BYTES},
            gradient_bytes=None
            if stage.gradient_bytes is None
            else (stage.gradient_bytes + place) // count,
            # What a layer hands on inside of a stage, no plan knows.
            output_bytes=stage.transfer_bytes,
            workspace_bytes=stage.workspace_bytes,
        )
        for place, name in enumerate(stage.layers)
    ]
