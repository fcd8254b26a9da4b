"""``plan``: the search over number of ranks × schedule × cuts, judged by the simulator.

For every number of ranks and every schedule family, the chain is cut exactly (``partition``) under
each rank's memory limit; ``simulate`` then says how long a step takes, and the shortest step wins.
The simulator, not a formula, is the judge: what is predicted here is what ``draw`` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf

from penstock.cluster import Cluster
from penstock.errors import InputError, PlanError
from penstock.graph import LayerGraph
from penstock.partition import balance
from penstock.planner.candidate import Candidate, Setting, Task
from penstock.planner.plan import Plan
from penstock.planner.table import format_bytes, format_seconds, format_speed_up
from penstock.schedule import Kind, families
from penstock.schedule.families.replicated import read_replicas
from penstock.values import expect
from penstock.versions import USUAL, Flush, Policy, check_policy

_SAME = 0.01
"""Relative: no prediction tells plans this close apart, so the one that needs less memory wins."""


def plan(
    graph: LayerGraph,
    cluster: Cluster | None = None,
    *,
    microbatches: int,
    schedule: str | None = None,
    stages: int | None = None,
    memory_bytes: int | None = None,
    versions: Policy | None = None,
    replicas: Sequence[int] | str | None = None,
) -> Plan:
    """Find the plan with the shortest predicted step that fits in memory.

    Of plans that take equally long within 1 %, the one that needs fewer bytes is chosen, then the
    one on fewer ranks. The cuts are PipeDream's for a chain without replicas, solved exactly
    (Narayanan et al., SOSP 2019, section 3.1).

    Args:
        graph: the profiled model.
        cluster: devices to use, all or some of them; by default this machine's cores.
        microbatches: per step, each as large as the one that was profiled.
        schedule: the family to use; by default the best of all.
        stages: how many; by default the best number.
        memory_bytes: what one rank may use, on top of the cluster's own limits.
        versions: which weights passes read (``penstock.versions``); a policy that never flushes
            brings its schedule with it. By default what belongs to the schedule, and only schedules
            that flush unless another is asked for.
        replicas: of each stage, as in ``(2, 1)`` or ``"2-1"``; with the schedules ``1f1b``,
            ``gpipe``, ``pipedream`` and ``pipedream-2bw``. The devices of stage 0 come first.

    Returns:
        The plan; ``print`` shows it, ``save`` keeps it, ``reason`` tells why it was chosen.

    Raises:
        PlanError: nothing satisfies the request: more stages than layers or than the devices can
            run, or too little memory; says what is over by how much.
        InputError: a count below 1, or an unknown schedule.
    """
    expect(graph, LayerGraph, "the graph", "measure the model with penstock.profile")
    expect(microbatches, int, "microbatches", "give a whole number")
    expect(memory_bytes, int | None, "memory_bytes", "give a number of bytes, as in 8 * 2**30")
    expect(versions, Policy | None, "versions", "take one of penstock.versions, as in Stash()")
    task = Task(graph, cluster or Cluster.local(), microbatches, memory_bytes)
    _check_counts(task, stages)
    if versions is not None and versions.asynchronous and schedule is None:
        schedule = versions.family
    if replicas:
        settings = [_replicated(task, schedule or "1f1b", stages, replicas, versions)]
    else:
        settings = _settings(task, schedule, stages, versions)
    cut = (one for setting in settings for one in _candidates(task, setting))
    fitting = [one for one in cut if one.excess()[0] <= 0]
    if not fitting:
        raise PlanError(_what_is_over(task, settings))
    chosen = _best(fitting)
    return chosen.to_plan(_reason(chosen, fitting))


def _check_counts(task: Task, stages: int | None) -> None:
    asked = (
        ("microbatches", task.num_microbatches),
        ("stages", stages),
        ("memory_bytes", task.memory_bytes),
    )
    for name, count in asked:
        if count is not None and count < 1:
            raise InputError(f"{name} is {count}, but must be ≥ 1")
    num_layers = len(task.graph.layers)
    if stages is not None and stages > num_layers:
        raise PlanError(
            f"{num_layers} layers cannot make {stages} stages, each needs at least one; ask for "
            f"at most {num_layers} stages"
        )


def _settings(
    task: Task, schedule: str | None, stages: int | None, versions: Policy | None
) -> list[Setting]:
    """Every schedule that the request allows, on 1 to all devices."""
    num_devices = len(task.cluster.devices)
    built: list[Setting] = []
    refusals: dict[int, InputError] = {}
    unasked = {*families.SEARCHED, *USUAL}
    fixed = (name for name in families.names() if name not in unasked)
    for name in fixed if schedule is None else (schedule,):
        families.family(name)  # an unknown name is the caller's mistake, not a refusal
        for num_ranks in range(1, min(num_devices, len(task.graph.layers)) + 1):
            try:
                made = _setting(task, name, num_ranks, versions)
            except InputError as error:
                refusals[num_ranks] = error
                continue
            if schedule is not None or _is_plain(made):
                built.append(made)
    if not built:
        *_, last = refusals.values()
        raise PlanError(f"no schedule can be built for this request: {last}")
    counts = sorted({setting.num_stages for setting in built})
    if stages is not None and stages not in counts:
        if versions is not None and stages in refusals:
            raise refusals[stages]
        raise PlanError(
            f"no schedule here cuts the model into {stages} stages on {num_devices} device(s); ask "
            f"for {', '.join(map(str, counts))} or give a cluster with more devices"
        )
    return [one for one in built if stages in (None, one.num_stages)]


def _is_plain(setting: Setting) -> bool:
    """Whether one may get it unasked. Not every model is capable of slices; and what each op costs
    on top of its layers (several stages per rank), or a backward in two halves, is not in a profile
    yet."""
    schedule = setting.schedule
    split = any(op.kind is Kind.BACKWARD_INPUT for op in schedule.where)
    return setting.num_stages == setting.num_ranks and schedule.num_slices == 1 and not split


def _replicated(
    task: Task,
    schedule: str,
    stages: int | None,
    replicas: Sequence[int] | str,
    versions: Policy | None,
) -> Setting:
    """The one setting that given replicas allow."""
    counts = read_replicas(replicas)
    num_devices = len(task.cluster.devices)
    if stages not in (None, len(counts)):
        raise InputError(f"replicas are given for {len(counts)} stages, but stages is {stages}")
    if sum(counts) > num_devices:
        raise PlanError(
            f"replicas {'-'.join(map(str, counts))} need {sum(counts)} devices, but there are "
            f"{num_devices}"
        )
    if len(counts) > len(task.graph.layers):
        raise PlanError(f"{len(task.graph.layers)} layers cannot make {len(counts)} stages")
    policy = versions or USUAL.get(schedule, Flush())
    count = max(task.num_microbatches, *counts)
    built = families.build(schedule, num_ranks=sum(counts), num_microbatches=count, replicas=counts)
    return Setting(built, policy, counts)


def _setting(task: Task, name: str, num_ranks: int, versions: Policy | None) -> Setting:
    """Raise ``InputError`` where the family refuses (say, an odd number of ranks) or wants more
    stages than there are layers."""
    policy = versions or USUAL.get(name, Flush())
    # Of a stream, as many as fill the pipeline.
    least = num_ranks if policy.asynchronous else 1
    count = max(task.num_microbatches, least)
    made = Setting(families.build(name, num_ranks=num_ranks, num_microbatches=count), policy)
    check_policy(policy, name, (1,) * made.num_stages, task.num_microbatches)
    if made.schedule.weight_copies > 1:
        raise PlanError(
            f"{name} keeps {made.schedule.weight_copies} copies of each stage; a plan gives every "
            "stage one rank, so ask for another schedule"
        )
    if made.num_stages > len(task.graph.layers):
        raise PlanError(
            f"{name} on {num_ranks} rank(s) needs {made.num_stages} stages, but there are only "
            f"{len(task.graph.layers)} layers"
        )
    return made


def _candidates(task: Task, setting: Setting, slack: float = 0.0) -> Iterator[Candidate]:
    """The best cuts for ``setting``: by compute alone, and with the hops added.

    No single number says how far a hop delays a step (that depends on the schedule), so both are
    made and the simulator decides. Nothing comes if no cuts keep every stage within ``slack`` bytes
    of its rank's limit.
    """
    layers = task.graph.layers
    hops = [2 * task.hop_seconds(stop) for stop in range(1, len(layers))]
    found = []
    for edges in ((), hops) if any(hops) else ((),):
        try:
            cuts = balance(
                [layer.compute_seconds for layer in layers],
                setting.num_stages,
                edges=edges,
                speeds=[
                    task.cluster.devices[rank].speed * setting.replicas_of(stage)
                    for stage, rank in enumerate(setting.rank_of)
                ],
                fits=_fits(task, setting, slack),
            )
        except PlanError:
            return
        if cuts not in found:
            found.append(cuts)
            stages = (task.stage(setting, k, *bounds) for k, bounds in enumerate(pairwise(cuts)))
            yield Candidate(task, setting, tuple(stages))


def _fits(task: Task, setting: Setting, slack: float) -> Callable[[int, int, int], bool] | None:
    limits = [task.limit(rank) + slack for rank in setting.rank_of]
    if min(limits) == inf:
        return None
    peaks = [setting.peaks[rank] for rank in setting.rank_of]
    copies = [setting.weight_versions(stage, task.num_microbatches) for stage in range(len(peaks))]

    def fits(stage: int, start: int, stop: int) -> bool:
        parameters, optimizer, activations = task.sizes(start, stop)
        held = (copies[stage] + 1) * parameters + optimizer + round(peaks[stage] * activations)
        return held <= limits[stage]

    return fits


def _best(fitting: Sequence[Candidate]) -> Candidate:
    """The fastest; simulates only those that their lower bound leaves in the race."""
    least = inf
    contenders = []
    for one in sorted(fitting, key=lambda one: one.least_seconds):
        if one.least_seconds > least * (1 + _SAME):
            break
        least = min(least, one.seconds)
        contenders.append(one)
    ties = (one for one in contenders if one.seconds <= least * (1 + _SAME))
    return min(
        ties, key=lambda one: (sum(one.rank_bytes), one.setting.num_ranks, one.peak, one.seconds)
    )


def _reason(chosen: Candidate, fitting: Sequence[Candidate]) -> str:
    """One sentence on why ``chosen`` won, with the best plan it beat."""
    speed_up = format_speed_up(chosen.to_plan().one_device_seconds, chosen.seconds)
    verdict = f"{chosen}: {format_seconds(chosen.seconds)} a step, {speed_up} one device"
    ranks, name = chosen.setting.num_ranks, chosen.setting.schedule.name
    # The nearest alternative says most: another schedule on the same ranks, except on one rank,
    # where all schedules do the same.
    siblings = [
        one
        for one in fitting
        if one.setting.num_ranks == ranks > 1 and one.setting.schedule.name != name
    ]
    rivals = siblings or [one for one in fitting if one.setting.num_ranks != ranks]
    if not rivals:
        return f"{verdict}; no other plan was allowed or fits"
    rival = _best(rivals)
    return f"{verdict}; {_comparison(chosen, rival, named=not siblings)}"


def _comparison(chosen: Candidate, rival: Candidate, *, named: bool) -> str:
    name = str(rival) if named else rival.setting.schedule.name
    if rival.seconds > chosen.seconds * (1 + _SAME):
        return f"{name} would take {format_seconds(rival.seconds)}"
    as_long = f"{name} would take as long and "
    if rival.peak != chosen.peak:
        return as_long + f"hold {rival.peak:g} instead of {chosen.peak:g} microbatches"
    return as_long + f"need {format_bytes(sum(rival.rank_bytes))} in all"


def _what_is_over(task: Task, settings: Sequence[Setting]) -> str:
    """The message for a request that no memory limit allows: the plan that misses by least.

    Each plan found tightens the slack for the next, so that what remains is the least excess.
    """
    least, message = inf, ""
    for setting in settings:
        found = True
        while found:
            found = False
            for candidate in _candidates(task, setting, slack=least - 1):
                over, described = candidate.excess()
                if over < least:
                    least, message, found = over, f"{candidate}, needs {described}", True
    return (
        f"no plan fits in memory; the closest, {message}: allow that much, or profile smaller "
        "microbatches"
    )
