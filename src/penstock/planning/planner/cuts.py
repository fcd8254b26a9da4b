"""The best cuts for a setting, exactly, within the memory of every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise, product
from math import comb, inf

import numpy as np

from penstock.base.errors import PlanError
from penstock.planning.partition.chain import (
    ROUNDING,
    Extra,
    Floats,
    Ints,
    Table,
    balance,
)
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.limits import least_excess
from penstock.planning.planner.memory_limits import MemoryLimits
from penstock.planning.planner.recomputing import FEW_RECOMPUTED, recomputing
from penstock.planning.planner.request import RecomputeRule
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.sharing import sharing
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay

_MOST_MOVES = 60
_FEW_WAYS = 20
"""To cut a model, all of which are looked at."""

_SQUEEZES: dict[RecomputeRule, tuple[RecomputeWay, ...]] = {
    "where-needed": ("none", "stage"),
    "never": ("none",),
    "stage": ("stage",),
    "layers": ("layers",),
}


def candidates(
    task: Task, setting: Setting, slack: float = 0.0, most_seconds: float = inf
) -> list[Candidate]:
    """The best cuts for ``setting``: by compute alone, and with the hops added.

    No single number says how far a hop delays a step (that depends on the schedule), so both are
    made and the simulator decides. A stage that has no room for its activations runs forward twice
    if the setting allows it, which counts as compute.

    Args:
        slack: bytes by which limits may be exceeded.
        most_seconds: that a minibatch may take; what must take longer may be left out.

    Returns:
        Only what fits. Where every rank has one stage and a memory of its own, something is found
        if there is anything.
    """
    if setting.num_stages > task.num_layers or least_excess(task) > slack:
        return []
    memory = MemoryLimits(task, setting, slack)
    is_shared = bool(task.topology.shared_memories)
    if setting.is_single and not is_shared:
        chosen = list(_balanced(task, setting, memory, most_seconds))
    else:
        chosen = _of_shared_memory(task, setting, memory, slack, most_seconds)
    fitting = [candidate for candidate in chosen if candidate.excess.num_bytes <= slack]
    if fitting or (setting.is_single and not is_shared):
        return fitting
    others = [] if setting.is_single else _as_needed(_squeezed(task, setting, slack), slack)
    if slack and has_few_cuts(task, setting.num_stages):  # else who races looks at them
        others += (with_cuts(task, setting, cuts) for _, cuts in ways_to_cut(task, setting))
    return [candidate for candidate in others if candidate.excess.num_bytes <= slack]


def _of_shared_memory(
    task: Task, setting: Setting, memory: MemoryLimits, slack: float, most_seconds: float
) -> list[Candidate]:
    """The candidates where several stages of a rank share its memory, or ranks share one: cut
    without regard to it, cut for even shares of it, and cut so that all together need little
    enough; with no more recomputing than they need together."""
    chosen = []
    is_shared = bool(task.topology.shared_memories)
    most = FEW_RECOMPUTED if is_shared else 1
    for candidate in _balanced(task, setting, MemoryLimits(task, setting, slack, shared=False)):
        chosen += recomputing(task, setting, candidate.cuts, slack, most)
        if not chosen or chosen[-1].recomputes != candidate.recomputes:
            chosen += _as_needed(_balanced(task, setting, memory, most_seconds), slack)
            if is_shared:
                shared = (
                    candidate
                    for beside in _beside(task, setting, _all_hops(task, setting))
                    for candidate in sharing(task, setting, memory, beside, slack)
                )
                chosen += _as_needed(shared, slack, most)
    return list(
        {(candidate.cuts, candidate.recomputes): candidate for candidate in chosen}.values()
    )


def _as_needed(wasteful: Iterable[Candidate], slack: float, most: int = 1) -> list[Candidate]:
    """Candidates in whose place others with the same cuts do as well that recompute less.

    Args:
        most: as for ``recomputing``.
    """
    return [
        candidate
        for own in wasteful
        for candidate in recomputing(own.task, own.setting, own.cuts, slack, most) or [own]
    ]


def has_few_cuts(task: Task, num_stages: int) -> bool:
    """Whether there are so few ways to cut the model that all are looked at."""
    gaps = task.num_layers - 1
    return gaps <= _FEW_WAYS and comb(gaps, num_stages - 1) <= _FEW_WAYS


def ways_to_cut(task: Task, setting: Setting) -> list[tuple[float, tuple[int, ...]]]:
    """(seconds that a minibatch takes at least, cuts) of all ways to cut a model, the most
    promising first."""
    if setting.versions.asynchronous and task.layers.ties:
        return []
    paces = [task.num_microbatches / speed for speed in setting.speeds(task)]
    passes = list(accumulate(task.layers.compute_seconds, initial=0.0))
    ways = []
    for inner in combinations(range(1, task.num_layers), setting.num_stages - 1):
        cuts = (0, *inner, task.num_layers)
        busy = [
            pace * (passes[stop] - passes[start])
            for pace, (start, stop) in zip(paces, pairwise(cuts), strict=True)
        ]
        of_ranks = (sum(busy[stage] for stage in own) for own in setting.schedule.stages_of)
        ways.append((max(of_ranks), cuts))
    return sorted(ways)


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


def with_layers_moved(
    candidate: Candidate, sources: Collection[int] | None = None
) -> list[Candidate]:
    """The candidates with one layer of this one on the other side of a cut, as far as they fit.

    Args:
        sources: the stages that a layer may leave; all by default.
    """
    task, setting = candidate.task, candidate.setting
    moved = (with_cuts(task, setting, cuts) for _, cuts in _moves(candidate.cuts, sources))
    return [candidate for candidate in moved if candidate.fits]


def _moves(
    cuts: tuple[int, ...], sources: Collection[int] | None = None
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(which cut has moved, the cuts)."""
    for index, step in product(range(1, len(cuts) - 1), (-1, 1)):
        leaves = index - 1 if step < 0 else index
        if sources is not None and leaves not in sources:
            continue
        if cuts[index - 1] < cuts[index] + step < cuts[index + 1]:
            yield index, (*cuts[:index], cuts[index] + step, *cuts[index + 1 :])


def _squeezed(task: Task, setting: Setting, slack: float) -> Iterator[Candidate]:
    """Where ranks have several stages, no table tells what fits: from even cuts, layers move to
    where most is free until everything does, or nothing helps any more."""
    free = replace(setting, recompute="never")
    start = next(iter(_balanced(task, free, MemoryLimits(task, free, inf))), None)
    if start is None:
        return
    for how in _SQUEEZES[setting.recompute]:
        best = replace(start, setting=setting, recomputes=(how,) * setting.num_stages)
        for _ in range(_MOST_MOVES):
            if best.excess.num_bytes <= slack:
                yield best
                return
            moved = [*_lightened(best)]
            nearest = min(moved, key=lambda candidate: candidate.excess.num_bytes, default=best)
            if nearest.excess.num_bytes >= best.excess.num_bytes:
                break
            best = nearest


def _lightened(candidate: Candidate) -> Iterator[Candidate]:
    """The candidates with one layer of this one on the other side of a cut, which may miss the
    limit by less that this one misses most; of ranks that move nothing, nothing is counted again.
    """
    setting, rank = candidate.setting, candidate.excess.rank
    ranks_of = setting.ranks_of
    for index, cuts in _moves(candidate.cuts, None if rank is None else setting.stages_on(rank)):
        moved = replace(candidate, cuts=cuts)
        if setting.schedule.num_slices == 1:
            changed = {
                setting.first_of(own) for stage in (index - 1, index) for own in ranks_of[stage]
            }
            of_changed = {own: moved.tensor_bytes_on(own) for own in changed}
            vars(moved)["tensor_bytes"] = {**candidate.tensor_bytes, **of_changed}
        yield moved


def with_cuts(task: Task, setting: Setting, cuts: tuple[int, ...]) -> Candidate:
    """Given cuts, with as much recomputing as they need; they may not fit even so."""
    if not setting.is_single or task.topology.shared_memories:
        for candidate in recomputing(task, setting, cuts):
            return candidate
    return _candidate(task, setting, cuts, MemoryLimits(task, setting))


def _balanced(
    task: Task, setting: Setting, memory: MemoryLimits, most_seconds: float = inf
) -> Iterator[Candidate]:
    for cuts in _balance(task, setting, memory, most_seconds):
        yield _candidate(task, setting, cuts, memory)


def _balance(
    task: Task, setting: Setting, memory: MemoryLimits, most_seconds: float = inf
) -> list[tuple[int, ...]]:
    """Where to cut: by compute alone, and with the hops."""
    costs = [sum(task.layers.compute_seconds[start:stop]) for start, stop in pairwise(task.places)]
    longest = _longest(setting, memory)
    if len(costs) < setting.num_stages or (
        longest and (not longest[-1] or sum(longest) < len(costs))
    ):
        return []
    speeds, hops = setting.speeds(task), _all_hops(task, setting)
    *inner, last = range(setting.num_stages)
    kinds = [(speeds[stage], memory.kind(stage), id(hops[stage])) for stage in inner]
    kinds.append((speeds[last], memory.kind(last), id(None)))
    # Without limits, cuts depend on speeds and links alone: many schedules share them.
    may_part = not (setting.versions.asynchronous and task.layers.ties)
    are_shared, key = memory.is_free and may_part, tuple(kinds)
    if are_shared and key in task.cache.cuts:
        return task.cache.cuts[key]

    cut = partial(balance, costs, setting.num_stages, speeds=speeds, longest=longest, kinds=kinds)
    choices = []
    most = () if are_shared else _most_by_start(task, setting, most_seconds)
    with suppress(PlanError):  # what fits nowhere does so with hops neither
        extras = [_with_again(memory, speeds, beside) for beside in _beside(task, setting, hops)]
        for extra, limit in zip(extras, (most, ()), strict=False):
            choices.append(cut(extra=extra, most=limit))
    best = [tuple(task.places[number] for number in cuts) for cuts in dict.fromkeys(choices)]
    if are_shared:
        task.cache.cuts[key] = best
    return best


def _beside(task: Task, setting: Setting, hops: Sequence[Floats]) -> list[Extra]:
    """What stages take besides the seconds of their layers: without hops, and with them, if there
    are any. Infinite for layers that may not be a stage."""

    def parting(stage: int, starts: Ints, stops: Ints) -> Table:
        return np.zeros(starts.shape) + _split_ties(task, setting, starts)

    def with_hop(stage: int, starts: Ints, stops: Ints) -> Table:
        return parting(stage, starts, stops) + 2 * hops[stage]

    return [parting, with_hop] if any(map(any, hops)) else [parting]


def _with_again(memory: MemoryLimits, speeds: Sequence[float], beside: Extra) -> Extra:
    """The same, and what stages take longer that must run forward twice."""

    def extra(stage: int, starts: Ints, stops: Ints) -> Table:
        again = memory.again_seconds(stage, len(starts)) / speeds[stage]
        return again + beside(stage, starts, stops)

    return beside if memory.is_free else extra


def _most_by_start(task: Task, setting: Setting, most_seconds: float) -> Sequence[float]:
    """Seconds per microbatch that a stage may take where a minibatch may take so long, by the place
    where the stage begins: whoever has it works on all microbatches, or takes its turn. Where ranks
    have one stage each and drain, the first microbatch comes through all layers before it, and of
    whole backwards the last gradient goes back through them. (Hops may pass meanwhile.)"""
    if most_seconds == inf:
        return ()
    outside = np.zeros(len(task.places))
    if setting.is_exact and not setting.versions.asynchronous:
        ways = ("forward_seconds", "backward_input_seconds")[: 2 - setting.schedule.splits_backward]
        passes = np.sum([task.layers.sums[way] for way in ways], axis=0)[list(task.places)]
        outside = min(task.least_paces(setting.devices, setting.mode)) * passes
    most = (most_seconds * (1 + ROUNDING) - outside[:-1]) / task.num_microbatches
    return list(most.tolist())


def _longest(setting: Setting, memory: MemoryLimits) -> list[int]:
    """The most that each stage can have, up to the first that can have nothing; empty where memory
    has no limits."""
    longest: list[int] = []
    for stage in range(0 if memory.is_free else setting.num_stages):
        longest.append(memory.longest(stage))
        if not longest[-1]:
            break
    return longest


def _all_hops(task: Task, setting: Setting) -> list[Floats]:
    """Seconds from each stage to the next if it ends at each place; none behind the last one."""
    hops = [
        task.hops(ends, following, in_turns=bool(setting.replicas))
        for ends, following in pairwise(setting.devices_of)
    ]
    return [*hops, np.zeros(len(task.places))]


def _candidate(
    task: Task, setting: Setting, cuts: tuple[int, ...], memory: MemoryLimits
) -> Candidate:
    how = (memory.recompute(stage, *bounds) for stage, bounds in enumerate(pairwise(cuts)))
    return Candidate(task, setting, cuts, tuple(how))


def _split_ties(task: Task, setting: Setting, starts: Ints) -> Table | float:
    """Infinite for stages that would part layers with tied weights, where that is not possible:
    without a flush, stages are never at the same update.

    Args:
        starts: of all stages, as ``starts_of`` has them.
    """
    if not setting.versions.asynchronous or not task.layers.ties:
        return 0.0
    places = np.array(task.places)
    begins, ends, table = places[starts], places, np.zeros(starts.shape)
    for tie in task.layers.ties:
        first, last = tie.first, tie.last
        table[(first < begins) & (begins <= last) | (first < ends) & (ends <= last)] = inf
    return table
