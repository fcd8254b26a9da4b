"""``plan``: the search, judged by the simulator.

For every number of devices, schedule, set of replicas and microbatch size, the chain is cut exactly
(``partition``) under the memory of each rank; ``simulate`` then says how long a step takes, and the
shortest step wins. The simulator, not a formula, is the judge: what is predicted here is what
``draw`` shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Literal, NamedTuple

from msgspec.structs import replace

from penstock.base.arguments import public
from penstock.base.errors import InputError, ModelError, PlanError
from penstock.base.telling import Telling
from penstock.base.units import count_of
from penstock.base.values import expect
from penstock.core.cluster import Cluster
from penstock.core.graph import LayerGraph
from penstock.core.schedule import families
from penstock.core.versions import Policy
from penstock.planning.partition.experts import with_expert_ranks
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.closest import ever_closer
from penstock.planning.planner.doubts import doubts_about
from penstock.planning.planner.judged import Judged, raced
from penstock.planning.planner.live import Kept, keeping, missing
from penstock.planning.planner.offloading import weighed
from penstock.planning.planner.orders import in_canonical_order
from penstock.planning.planner.patience import PlanningPatience
from penstock.planning.planner.race import Race, fastest
from penstock.planning.planner.request import (
    PROPOSED,
    Constraints,
    Objective,
    PlanRequest,
    RecomputeRule,
    SpillRule,
)
from penstock.planning.planner.shortfall import Shortfall
from penstock.planning.planner.spilling import offered, spilled_plan
from penstock.planning.planner.task import Task
from penstock.planning.planner.variants import in_groups, in_other_orders, learned, widths
from penstock.planning.planner.why import Rival, alternatives_of, rivals
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.summing import GatheredFor, ReducerName


@public(
    remedies={
        "devices": "give a cluster: pk.plan(graph, pk.Cluster.local(4))",
        "ranks": "give a cluster: pk.plan(graph, pk.Cluster.local(4))",
        "model": "profile it: pk.plan(pk.profile(model, inputs), …)",
    }
)
def plan(  # noqa: PLR0913 - one keyword for each thing that can be asked for
    graph: LayerGraph,
    cluster: Cluster | None = None,
    *,
    microbatches: int | None = None,
    minibatch: int | None = None,
    schedule: str | None = None,
    stages: int | None = None,
    cuts: Sequence[int | str] = (),
    memory_bytes: int | None = None,
    versions: Policy | None = None,
    replicas: Sequence[int] | str | None = None,
    asynchronous: bool = False,
    recompute: RecomputeRule = "where-needed",
    cost_model: str = "ring",
    overlap: float = 0.0,
    tensor_ranks: int | Literal["any"] = 1,
    expert_ranks: int = 1,
    context_ranks: int = 1,
    reducer: ReducerName | Literal["any"] = "owners",
    stale: int = 0,
    gathered_for: GatheredFor = "step",
    hybrid: bool = False,
    layer_order: Literal["execution", "any"] = "execution",
    placer: Literal["exact", "reinforce"] = "exact",
    rate: float | None = None,
    spill: SpillRule = "where-needed",
    engine: str | None = None,
    objective: Objective = "time",
    within_seconds: float | None = None,
    price_per_hour: float | None = None,
    patience_seconds: float | None = None,
) -> Plan:
    """Find the plan with the shortest predicted step that fits in memory.

    Of plans that take equally long within 1 %, the one that needs fewer bytes is chosen, then the
    one on fewer ranks. For each schedule, cuts make the slowest stage as fast as possible, exactly
    (Narayanan et al., SOSP 2019, section 3.1); those of the winner are then moved as long as the
    simulator finds a shorter step. Which stages get replicas comes from PipeDream's exact optimum,
    from all widths and depths of PipeDream-2BW (arXiv 2006.09503, section 4), from DAPPLE's search
    (arXiv 2007.01045) and from data parallelism.

    Args:
        graph: the profiled model.
        cluster: devices to use, all or some of them; by default this machine's cores.
        microbatches: per minibatch, each as large as the one that was profiled; 1 by default
            for a live stream (``partime``, or with a ``rate``), else to be given.
        minibatch: rows of a minibatch, instead; every microbatch size that was profiled and divides
            it is tried, if that does not make too many of them. With both, microbatches have
            ``minibatch / microbatches`` rows.
        schedule: the family to use, its options behind a colon, as in
            ``"interleaved-1f1b:stages_per_rank=4"``; by default the best of all.
        stages: how many; by default the best number.
        cuts: the layers with which all stages but the first begin, by name or number from 0; by
            default the best cuts.
        memory_bytes: what one rank may use, on top of the cluster's own limits.
        versions: which weights passes read (``penstock.versions``); a policy that never flushes
            brings its schedule with it. By default what belongs to the schedule.
        replicas: of each stage, as in ``(2, 1)`` or ``"2-1"``, or ``"any"``; unlike ones with
            the schedules ``1f1b``, ``gpipe``, ``pipedream`` and ``pipedream-2bw``, as many of all
            stages with every other one that drains. By default any, unless a schedule or a number
            of stages is asked for: then none.
        asynchronous: whether to propose schedules that never flush, and so train with weights of
            several ages (``docs/asynchronous.md``).
        recompute: which stages may run forward twice to save memory: ``"where-needed"``,
            ``"never"``, or all by ``"stage"`` or by ``"layers"``.
        cost_model: how exchanges of gradients are counted: ``"ring"``, ``"pipedream-paper"`` or
            ``"pipedream-released"`` (``penstock.planning.partition.chain``).
        overlap: the share of an exchange that hides behind the backward before it, 0 to 1. By
            default the simulator says how much does: parts leave while the last backward runs.
        tensor_ranks: devices that share every layer, each by rows, columns or neither as costs
            least (``docs/tensor-parallelism.md``); ``"any"`` tries all powers of two, and for
            chains replicas of the first layers with one group for the others.
        expert_ranks: copies of each stage that divide the experts of its mixtures among themselves
            (``docs/expert-parallelism.md``); every stage then has a multiple of so many replicas.
        context_ranks: devices that share the sequence of every microbatch, with all weights each
            (``docs/context-parallelism.md``); the model must be captured to be run so.
        reducer: how copies of a stage sum gradients (``docs/data-parallelism.md``): ``"owners"``,
            ``"sharded"``, ``"fully-sharded"``, ``"all-reduce"``, or ``"servers"`` and
            ``"parameter-server"``, which use
            the cluster's spare machines; ``"any"`` takes what is fastest of those that give the
            bits of owners.
        stale: by how many updates the gradients of a copy may be late, with ``"parameter-server"``;
            the cluster's first spare machine is then the server.
        gathered_for: with ``"fully-sharded"``, whether weights stay gathered for a ``"step"``
            (ZeRO-2), or are for each ``"use"`` of a layer (ZeRO-3).
        hybrid: with ``"fully-sharded"``, whether weights are sharded over the replicas of each host
            (HSDP), and not over all of them.
        layer_order: ``"any"`` also cuts branching models where no prefix of their execution order
            ends; the plan then lists layers in another order (``Captured.ordered`` puts a model's
            into it).
        placer: ``"reinforce"`` lets a policy learn which device takes which layers of a
            branching model (``docs/learned-placement.md``); ``"exact"`` cuts chains best.
        rate: frames per second of a live source, each frame a microbatch. The plan then has the
            fewest devices that keep up with it; if no schedule is asked for, ``pipedream`` with
            weight stashing, which learned best (``docs/streams.md``), or ``partime`` where that
            needs fewer devices or is all that fits. By default, as many as make it fastest.
        spill: whether stages may come from one of the cluster's tiers and leave again
            (``docs/larger-than-memory.md``): ``"where-needed"``, if nothing fits otherwise;
            ``"never"`` or ``"always"``. Unless it is ``"never"``, activations may wait in a tier
            where otherwise forwards would run twice, if that is faster.
        engine: another engine that is to run the plan, as ``Plan.to`` takes it
            (``docs/other-engines.md``): only plans that it runs as they are. By default, Penstock.
        objective: ``"time"``, the shortest step; ``"devices"``, the fewest devices of the cluster
            on which a step takes at most ``within_seconds``, or on which the model fits at all; or
            ``"cost"``, what a step costs: the price of its devices, or their hours where they have
            no price (``docs/choosing-devices.md``).
        within_seconds: how long a step may take, where the objective is not time.
        price_per_hour: of each device, in place of what the cluster's devices say.
        patience_seconds: takes the best plan found by then, or says what came closest where none
            fits so far; by default, search to the end.

    Returns:
        The plan; ``print`` shows it, ``save`` keeps it, ``reason`` and ``alternatives`` tell why it
        was chosen.

    Raises:
        PlanError: nothing satisfies the request: more stages than layers or than the devices can
            run, too little memory (says what is over by how much, and what would fit), too slow for
            the rate (says which stage is, what is reached, and how many devices would do) or for
            ``within_seconds``.
        InputError: a count below 1, an unknown schedule, or too many microbatches: more than
            10,000,000, or where every op may have to be simulated, than 100,000, or 2,000,000 by
            the number of ranks.
    """
    request = PlanRequest(
        microbatches=microbatches,
        minibatch=minibatch,
        schedule=schedule,
        stages=stages,
        cuts=cuts,
        memory_bytes=memory_bytes,
        versions=versions,
        replicas=replicas,
        asynchronous=asynchronous,
        recompute=recompute,
        cost_model=cost_model,
        overlap=overlap,
        tensor_ranks=tensor_ranks,
        expert_ranks=expert_ranks,
        context_ranks=context_ranks,
        reducer=reducer,
        stale=stale,
        gathered_for=gathered_for,
        hybrid=hybrid,
        layer_order=layer_order,
        placer=placer,
        rate=rate,
        spill=spill,
        engine=engine,
        objective=objective,
        within_seconds=within_seconds,
        price_per_hour=price_per_hour,
        patience_seconds=patience_seconds,
    )
    return planned(graph, cluster, request)


class SearchInVain(NamedTuple):
    """A search in which nothing was found.

    Attributes:
        tasks: all that was asked for.
        race: of those that might fit.
    """

    tasks: Sequence[Task]
    race: Race


def planned(
    graph: LayerGraph,
    cluster: Cluster | None,
    request: PlanRequest,
    patience: PlanningPatience | None = None,
    in_vain: Mapping[RecomputeRule, SearchInVain] | None = None,
) -> Plan:
    """The best plan for a request, as ``plan`` finds it.

    Args:
        patience: in place of that which the request says.
        in_vain: searches that need not be made again, by the rule of recomputing.
    """
    checked(graph, cluster)
    cluster = cluster or Cluster.local()
    cluster = priced(cluster, request.price_per_hour)
    if patience is None:
        with Telling("planning") as telling:
            patience = PlanningPatience(request.patience_seconds, telling.update)
            return planned(graph, cluster, request, patience, in_vain)
    if request.objective != "time":
        from penstock.planning.planner.objective import sought  # which plans by this module

        return sought(graph, cluster, request, patience)
    plans: list[Plan] = []
    failure: PlanError | None = None
    rules = with_rules(cluster, request)
    for rule, part in zip(rules, patience.divided(len(rules)), strict=True):
        if plans and patience.is_interrupted:  # whoever waits wants what there is
            break
        try:
            own = (in_vain or {}).get(rule.recompute)
            plans.append(_planned(graph, cluster, rule, part, own))
        except PlanError as error:
            failure = failure or error
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: plan.step_seconds)


def checked(graph: LayerGraph, cluster: Cluster | None) -> None:
    """Raise ``InputError`` if these are something else."""
    expect(graph, LayerGraph, "the graph", "measure the model with penstock.profile")
    expect(
        cluster,
        Cluster | None,
        "the cluster",
        'give Cluster.load("FILE") or Cluster.of("dgx-h100")',
    )


def priced(cluster: Cluster, price_per_hour: float | None) -> Cluster:
    """A cluster each of whose devices costs so much; with ``None``, what it says itself."""
    if price_per_hour is None:
        return cluster
    devices = (replace(device, price_per_hour=price_per_hour) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def with_rules(cluster: Cluster, request: PlanRequest) -> list[PlanRequest]:
    """The requests that make up one: other engines recompute everywhere or nowhere."""
    if request.engine is None or request.recompute != "where-needed":
        return [request]
    limits = [cluster.memory_bytes, *(device.memory_bytes for device in cluster.devices)]
    is_limited = request.memory_bytes is not None or any(limits)
    rules: tuple[RecomputeRule, ...] = ("never", "layers") if is_limited else ("never",)
    return [replaced(request, recompute=rule) for rule in rules]


def tasks_of(
    graph: LayerGraph, cluster: Cluster, request: PlanRequest, constraints: Constraints
) -> list[Task]:
    """What is to be planned for a request: a task for each size of microbatches, way to sum, width
    of tensor groups and order of layers that may be."""
    tasks = _single_tasks(graph, cluster, request, constraints)
    if request.expert_ranks > 1:
        tasks = [_with_experts(task, request.expert_ranks) for task in tasks]
    tasks = list(_with_tensor_ranks(list(_with_reducers(tasks, request)), request))
    if request.layer_order == "any" and not constraints.cuts:
        tasks += [other for task in tasks for other in in_other_orders(task)]
    return tasks


def _single_tasks(
    graph: LayerGraph, cluster: Cluster, request: PlanRequest, constraints: Constraints
) -> list[Task]:
    most_ranks = min(len(cluster.devices), len(graph.layers))
    cluster = in_canonical_order(cluster)
    cards = any(group.card is not None for group in cluster.groups)
    sizes = request.microbatch_sizes(graph, most_ranks, shares_cards=cards)
    return [
        Task(
            graph.at(size),
            cluster,
            count,
            request.memory_bytes,
            request.communication,
            marks=constraints.cuts,
            cuts_between=request.cuts_between,
        )
        for size, count in sizes
    ]


def _planned(
    graph: LayerGraph,
    cluster: Cluster,
    request: PlanRequest,
    patience: PlanningPatience,
    in_vain: SearchInVain | None,
) -> Plan:
    constraints = request.constraints(graph)
    tasks = tasks_of(graph, cluster, request, constraints)
    if request.spill == "always":
        return _spilled(_single_tasks(graph, cluster, request, constraints), constraints)
    if request.placer == "reinforce":
        return _learned(tasks, constraints)
    if request.rate is None:
        return _solve(tasks, constraints, patience, in_vain)
    for_rate = _proposed_for_rate if request.proposes_stream else _solve_for_rate
    return for_rate(tasks, constraints, float(request.rate))


def _proposed_for_rate(tasks: Sequence[Task], constraints: Constraints, rate: float) -> Plan:
    """Where no schedule is asked for: the one that learns best of those on the fewest devices."""
    plans: list[Plan] = []
    failure: PlanError | None = None
    for family in PROPOSED:
        try:
            plans.append(_solve_for_rate(tasks, replaced(constraints, schedule=family), rate))
        except PlanError as error:
            failure = error
    if not plans:
        assert failure is not None
        raise failure
    plan = min(plans, key=lambda plan: plan.num_ranks)
    return replace(plan, reason=f"{plan.reason}; {PROPOSED[plan.schedule]}")


def _solve_for_rate(tasks: Sequence[Task], constraints: Constraints, rate: float) -> Plan:
    constraints = replaced(constraints, any_replicas=False)
    kept = None if constraints.replicas else keeping(tasks, constraints, rate)
    if kept is None:
        best = fastest(tasks, constraints)
        if best is None:
            return _solve(tasks, constraints, PlanningPatience())  # which says why there is none
        if best.frames_per_second < rate:
            raise missing(tasks, constraints, rate, best)
        kept = Kept(best, ())
    labelled = rivals(tasks, constraints)
    for candidate in kept.fewer:
        labelled[count_of(candidate.setting.num_ranks, "device")] = Rival(candidate)
    plan = kept.chosen.to_plan(
        kept.reason(rate),
        alternatives_of(kept.chosen, labelled, constraints),
        tuple(doubts_about(kept.chosen, [])),
    )
    return replace(plan, rate=rate)


def _spilled(tasks: Sequence[Task], constraints: Constraints) -> Plan:
    """The plan whose stages come and go, since somebody asks for it."""
    tiers = tasks[0].cluster.tiers
    if not tiers:
        raise PlanError(
            'spill="always" needs a tier to which stages go; give the cluster one, as in '
            "Cluster.local(tiers=[Tier(folder=…)]), or --tier FOLDER"
        )
    if not constraints.may_spill:
        raise InputError(
            "stages that come and go are planned as a whole; leave out schedule, stages, cuts, "
            'replicas and versions, or take spill="never"'
        )
    return weighed(spilled_plan(tasks, constraints, tiers), tasks[0], constraints)


def _learned(tasks: Sequence[Task], constraints: Constraints) -> Plan:
    """The plan with the placement that a policy learned."""
    placed = [
        candidate
        for candidate in (learned(task, constraints) for task in tasks)
        if candidate is not None
    ]
    if not placed:
        raise PlanError(
            "the learned placement does not fit in memory; placer='exact' looks for one that does"
        )
    judged = Judged(min(placed, key=lambda each: each.seconds), (), tasks, constraints)
    return judged.explained(judged.rivals())


def _with_experts(task: Task, num_ranks: int) -> Task:
    """A task whose stages' copies divide experts, so many of them; tokens travel by the slowest
    link that may lie between two."""
    parts = [(layer.name, part) for layer in task.graph.layers for part in layer.experts]
    if not parts:
        raise InputError(
            f"expert_ranks={num_ranks} divides experts of mixtures, and the profile has none; take "
            "expert_ranks=1, or say divides_experts = True in the class of your experts "
            "(docs/expert-parallelism.md)"
        )
    for name, part in parts:
        if why := part.refusal(num_ranks):
            raise InputError(
                f"{num_ranks} expert ranks cannot divide the experts of {name}, since {why}; take "
                "a number that divides them"
            )
    devices = range(len(task.cluster.devices))

    def seconds(num_bytes: float) -> float:
        link = task.topology.slowest_link(devices, num_bytes)
        return task.graph.hop_seconds + link.seconds(num_bytes)

    graph = with_expert_ranks(task.graph, num_ranks, seconds)
    return replaced(task, graph=graph, expert_ranks=num_ranks, undivided=task.alone)


def _with_reducers(tasks: Sequence[Task], request: PlanRequest) -> Iterator[Task]:
    """Each task for the ways to sum that are asked for."""
    reducer = request.reducer
    for task in tasks:
        has_servers = bool(task.cluster.spares)
        if reducer in {"servers", "parameter-server"} and not has_servers:
            raise InputError(
                f"reducer={reducer!r} needs machines that sum, and the cluster has none; give it "
                "[[spares]] (docs/clusters.md)"
            )
        if reducer == "fully-sharded" and task.layers.ties:
            raise ModelError(
                "the model has tied weights, and reducer='fully-sharded' gathers each layer alone; "
                "untie them, put what shares them into one layer, or take reducer='sharded'"
            )
        if reducer == "any":
            yield replaced(task, reducer="owners")
            yield replaced(task, reducer="sharded")
            if has_servers:
                yield replaced(task, reducer="servers")
                yield replaced(task, reducer="parameter-server")
        else:
            if request.hybrid and max(task.topology.hosts, default=-1) < 0:
                raise InputError(
                    "hybrid=True shards weights inside hosts, and the cluster does not say which "
                    "devices share one; give it groups with cards, or leave hybrid out"
                )
            yield replaced(
                task, reducer=reducer, stale=request.stale, gathered_for=request.gathered_for,
                hybrid=request.hybrid,
            )  # fmt: skip


def _with_tensor_ranks(tasks: Sequence[Task], request: PlanRequest) -> Iterator[Task]:
    """Each task for the sizes of tensor groups that are asked for."""
    tensor_ranks, replicas = request.tensor_ranks, request.replicas
    fewest = request.stages or 1
    if replicas and not isinstance(replicas, str):
        is_alike = request.family not in (None, *families.UNLIKE_REPLICAS)
        fewest = max(replicas) if is_alike else sum(replicas)
    context = request.context_ranks
    for task in tasks:
        if context > 1:
            yield from in_groups(task, context, by_positions=True)
            continue
        if tensor_ranks in ("any", 1):
            yield task
        for width in widths(task) if tensor_ranks == "any" else (tensor_ranks,):
            if width > 1:
                grouped = [*in_groups(task, width, elsewhere=request.engine is not None)]
                # Groups that keep to their hosts may be fewer than those that don't.
                enough = [own for own in grouped if len(own.cluster.devices) >= fewest]
                yield from enough or grouped


def _solve(
    tasks: Sequence[Task],
    constraints: Constraints,
    patience: PlanningPatience,
    in_vain: SearchInVain | None = None,
) -> Plan:
    tasks, race = in_vain or (tasks, raced(tasks, constraints, patience))
    chosen = race.winner
    if chosen is None:
        if race.is_complete:
            _check_built(race, tasks[0], constraints)
        if race.failure is not None:
            raise race.failure
        misses: list[Candidate] = []
        race.is_complete &= patience.spend(
            lambda: misses.extend(ever_closer(tasks, constraints)), lambda: True
        )
        nearest = misses[-1] if misses else None
        if nearest is None or not nearest.fits:
            return _fits_nowhere(Shortfall(nearest, tasks, constraints, race))
        chosen = nearest if nearest.setting.is_final else nearest.with_final_order()
    elif not chosen.setting.is_final:  # there was no time to search its order
        chosen = chosen.as_it_stands()
    skipped = len(race.skipped)
    judged = Judged(chosen, race.contenders, tasks, constraints, skipped, race.bound, race.end)
    return judged.plan(judged.rivals(patience))


def _fits_nowhere(shortfall: Shortfall) -> Plan:
    """A plan whose stages come and go, if it may be one; else what would have to change."""
    tasks, constraints = shortfall.tasks, shortfall.constraints
    if constraints.spill == "never" or not constraints.may_spill:
        raise PlanError(str(shortfall))
    if tasks[0].cluster.tiers:
        plan = spilled_plan(tasks, constraints, tasks[0].cluster.tiers)
        return weighed(plan, tasks[0], constraints)
    offer = "" if shortfall.race.patience.is_over else offered(tasks, constraints)
    raise PlanError(f"{shortfall}{offer}")


def _check_built(race: Race, task: Task, constraints: Constraints) -> None:
    """Raise ``PlanError`` or the family's own error if nothing could be built."""
    if race.num_too_large:
        return
    if not race.num_stages:
        *_, last = race.refusals.values()
        if constraints.replicas:
            raise last
        raise PlanError(f"no schedule can be built for this request: {last}")
    if constraints.stages is not None and constraints.stages not in race.num_stages:
        if constraints.versions is not None and constraints.stages in race.refusals:
            raise race.refusals[constraints.stages]
        counts = ", ".join(map(str, sorted(race.num_stages)))
        raise PlanError(
            f"no schedule here cuts the model into {constraints.stages} stages on "
            f"{len(task.cluster.devices)} device(s); ask for {counts} or give a cluster with more "
            "devices"
        )
