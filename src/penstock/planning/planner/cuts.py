"""The best cuts for a setting, exactly, within the memory of every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import numpy as np

from penstock.base.errors import PlanError
from penstock.planning.partition.chain import Floats, Table, balance, lightest
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.limits import least_excess
from penstock.planning.planner.request import RecomputeRule
from penstock.planning.planner.setting import MemoryLimits, Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay

_MOST_MOVES = 60
_SQUEEZES: dict[RecomputeRule, tuple[RecomputeWay, ...]] = {
    "where-needed": ("none", "stage"),
    "never": ("none",),
    "stage": ("stage",),
    "layers": ("layers",),
}


def candidates(task: Task, setting: Setting, slack: float = 0.0) -> list[Candidate]:
    """The best cuts for ``setting``: by compute alone, and with the hops added.

    No single number says how far a hop delays a step (that depends on the schedule), so both are
    made and the simulator decides. A stage that has no room for its activations runs forward twice
    if the setting allows it, which counts as compute.

    Args:
        slack: bytes by which limits may be exceeded.

    Returns:
        Only what fits. Where every rank has one stage and a memory of its own, something is found
        if there is anything.
    """
    if setting.num_stages > task.num_layers or least_excess(task) > slack:
        return []
    # Several stages of a rank share its memory; they get even shares if they do not fit without.
    for shared in (True,) if setting.is_single else (False, True):
        memory = MemoryLimits(task, setting, slack, shared)
        balanced = _balanced(task, setting, memory)
        fitting = [candidate for candidate in balanced if candidate.excess.num_bytes <= slack]
        if fitting:
            return fitting
    if not setting.is_single:
        squeezed = _squeezed(task, setting, slack)
        if squeezed is not None:
            return [squeezed]
    if task.topology.shared_memories:
        return [
            candidate
            for candidate in _lightest(task, setting, slack)
            if candidate.excess.num_bytes <= slack
        ]
    return []


def refined(coarse: Candidate, slack: float = 0.0) -> list[Candidate]:
    """The best cuts of a candidate's setting among all layers near its cuts, where the search could
    not look between all layers; nothing for other candidates.

    Args:
        slack: as for ``candidates``.
    """
    if not coarse.task.is_coarse:
        return []
    near = replace(coarse.task, near=coarse.cuts)
    return [
        replace(candidate, task=coarse.task)
        for candidate in candidates(near, coarse.setting, slack)
    ]


def with_layers_moved(candidate: Candidate) -> list[Candidate]:
    """The candidates with one layer of this one on the other side of a cut, as far as they fit."""
    moved = (with_cuts(candidate.task, candidate.setting, cuts) for cuts in _moves(candidate.cuts))
    return [candidate for candidate in moved if candidate.fits]


def _moves(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for index, step in product(range(1, len(cuts) - 1), (-1, 1)):
        if cuts[index - 1] < cuts[index] + step < cuts[index + 1]:
            yield (*cuts[:index], cuts[index] + step, *cuts[index + 1 :])


def _squeezed(task: Task, setting: Setting, slack: float) -> Candidate | None:
    """Where ranks have several stages, no table tells what fits: from even cuts, layers move to
    where most is free until everything does, or nothing helps any more."""
    free = replace(setting, recompute="never")
    start = next(iter(_balanced(task, free, MemoryLimits(task, free, inf))), None)
    if start is None:
        return None
    for how in _SQUEEZES[setting.recompute]:
        best = replace(start, setting=setting, recomputes=(how,) * setting.num_stages)
        for _ in range(_MOST_MOVES):
            if best.excess.num_bytes <= slack:
                return best
            moved = [replace(best, cuts=cuts) for cuts in _moves(best.cuts)]
            nearest = min(moved, key=lambda candidate: candidate.excess.num_bytes, default=best)
            if nearest.excess.num_bytes >= best.excess.num_bytes:
                break
            best = nearest
    return None


def with_cuts(task: Task, setting: Setting, cuts: tuple[int, ...]) -> Candidate:
    """Given cuts, with as much recomputing as they need; they may not fit even so."""
    return _candidate(task, setting, cuts, MemoryLimits(task, setting))


def _balanced(task: Task, setting: Setting, memory: MemoryLimits) -> Iterator[Candidate]:
    if not memory.is_free or (setting.versions.asynchronous and task.ties):
        choices = _balance(task, setting, memory)
    else:
        # Without limits, cuts depend on the devices only: many schedules share them.
        key = (setting.devices_of, setting.replicas, setting.mode)
        if key not in task.cache.cuts:
            task.cache.cuts[key] = _balance(task, setting, memory)
        choices = task.cache.cuts[key]
    for cuts in choices:
        yield _candidate(task, setting, cuts, memory)


def _balance(task: Task, setting: Setting, memory: MemoryLimits) -> list[tuple[int, ...]]:
    """Where to cut: by compute alone, and with the hops."""
    paces = [
        task.pace(devices, setting.devices, setting.mode).passes for devices in setting.devices_of
    ]
    speeds = [setting.replicas_of(stage) / pace for stage, pace in enumerate(paces)]
    hops = [_hops(task, setting, stage) for stage in range(setting.num_stages)]
    ties = _split_ties(task, setting)

    kinds = [
        (speeds[stage], memory.kind(stage), id(hops[stage])) for stage in range(setting.num_stages)
    ]

    def extra(stage: int) -> Table:
        return ties if memory.is_free else memory.again_seconds(stage) / speeds[stage] + ties

    def with_hop(stage: int) -> Table:
        return extra(stage) + 2 * hops[stage]

    costs = [sum(task.compute_seconds[start:stop]) for start, stop in pairwise(task.places)]
    if len(costs) < setting.num_stages:
        return []
    choices = []
    for cost in (extra, with_hop) if any(map(any, hops)) else (extra,):
        with suppress(PlanError):
            choices.append(
                balance(costs, setting.num_stages, speeds=speeds, extra=cost, kinds=kinds)
            )
    return [tuple(task.places[number] for number in cuts) for cuts in dict.fromkeys(choices)]


def _hops(task: Task, setting: Setting, stage: int) -> Floats:
    """Seconds from a stage to the next if it ends at each place."""
    if stage == setting.num_stages - 1:
        return np.zeros(len(task.places))
    ends = setting.devices_of[stage], setting.devices_of[stage + 1]
    return task.hops(*ends, in_turns=bool(setting.replicas))


def _lightest(task: Task, setting: Setting, slack: float) -> Iterator[Candidate]:
    """The cuts that need the least memory in all, for ranks that share it."""
    memory = MemoryLimits(task, setting, slack)
    ties = _split_ties(task, setting)

    def weight(stage: int) -> Table:
        needed = np.minimum.reduce(memory.lightest(stage))
        allowed = np.isfinite(memory.again_seconds(stage) + ties)
        return np.where(allowed, setting.replicas_of(stage) * needed, inf)

    ends = lightest(len(task.places) - 1, setting.num_stages, weight)
    if ends:
        least = (
            memory.ways[int(np.argmin([table[bounds] for table in memory.lightest(stage)]))]
            for stage, bounds in enumerate(pairwise(ends))
        )
        cuts = tuple(task.places[number] for number in ends)
        yield Candidate(task, setting, cuts, tuple(least))


def _candidate(
    task: Task, setting: Setting, cuts: tuple[int, ...], memory: MemoryLimits
) -> Candidate:
    how = (memory.recompute(stage, *bounds) for stage, bounds in enumerate(pairwise(cuts)))
    return Candidate(task, setting, cuts, tuple(how))


def _split_ties(task: Task, setting: Setting) -> Table:
    """Infinite for stages that would part layers with tied weights, where that is not possible:
    without a flush, stages are never at the same update."""
    count = len(task.places)
    table = np.zeros((count, count))
    if setting.versions.asynchronous:
        starts, stops = np.array(task.places)[:, None], np.array(task.places)
        for _, _, first, last in task.ties:
            parted = ((first < starts) & (starts <= last)) | ((first < stops) & (stops <= last))
            table[parted] = inf
    return table
