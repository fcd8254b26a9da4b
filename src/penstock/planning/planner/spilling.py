"""Plans for models that no memory holds: stages come from a tier, and leave again.

With many stages on each rank, only two or three of them are in memory at once: the one that works,
the one that comes next, and what of the last is still being written. More stages need less memory
and move the same bytes. Of all numbers of stages, the smallest few that fit are simulated; a second
forward is weighed against activations, and bringing stages in ahead against the room it takes. As
many of the last stages as there is room for run forward once: what they keep is the first to go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from msgspec.structs import replace

from penstock.base.errors import InputError, PlanError
from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.core.cluster import Tier
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.request import MOST_WHOLE, Constraints, Options
from penstock.planning.planner.task import Task
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.prediction import Prediction
from penstock.planning.plans.spilling import Spill, bytes_of_spilled_ranks, traffic
from penstock.planning.plans.stage_plan import RecomputeWay, StagePlan
from penstock.planning.plans.table import Alternative

_FAMILY = "spilled"
_MOST_COUNTS = 32
_SIMULATED = 3
"""So many of the smallest numbers of stages that fit are simulated for each way; more of them move
the same, and leave more room."""


class How(NamedTuple):
    """How stages come and go.

    Attributes:
        recompute: what runs forward twice.
        ahead: stages that are brought in while another one works.
        options: (name, value) pairs that the schedule's family is given.
        num_once: how many of the last stages run forward once, whatever the others do.
    """

    recompute: RecomputeWay
    ahead: int
    options: Options
    num_once: int = 0

    @classmethod
    def of(cls, recompute: RecomputeWay, ahead: int, options: Options) -> How:
        """With as few stages that run forward once as the way has: where whole stages run twice,
        the last one turns round at once, so that there is nothing to keep."""
        return cls(recompute, ahead, options, int(recompute == "stage"))

    def recomputes(self, num_stages: int) -> tuple[RecomputeWay, ...]:
        """What runs forward twice of each stage."""
        none: RecomputeWay = "none"
        return (self.recompute,) * (num_stages - self.num_once) + (none,) * self.num_once


@dataclass(frozen=True)
class Spilled:
    """A candidate whose stages come and go."""

    candidate: Candidate
    spill: Spill
    limits: tuple[float, ...]
    how: How

    def running_once(self, num_stages: int) -> Spilled:
        """The same where so many of the last stages run forward once."""
        how, own = self.how._replace(num_once=num_stages), self.candidate
        recomputes = how.recomputes(len(own.recomputes))
        candidate = Candidate(own.task, own.setting, own.cuts, recomputes)
        return Spilled(candidate, self.spill, self.limits, how)

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """As the candidate's, but weights that several stages use stay: their gradients and their
        state as well."""
        task, stages = self.candidate.task, list(self.candidate.stages)
        for tie in task.layers.ties:
            holders = [
                index
                for index, (start, stop) in enumerate(pairwise(self.candidate.cuts))
                if tie.is_parted(start, stop)
            ]
            if holders:
                first = stages[holders[0]]
                share = first.optimizer_bytes / max(1, first.parameter_bytes)
                kept = ceil(tie.num_bytes * (2 + share)) - 2 * tie.num_bytes
                stages[holders[0]] = replace(first, sum_bytes=first.sum_bytes + kept)
        return tuple(stages)

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted memory of each rank."""
        return bytes_of_spilled_ranks(self.stages, self.candidate.schedule, self.spill)

    @cached_property
    def excess(self) -> float:
        """Bytes by which the rank that misses its limit most does; ≤ 0 if all fit, whether
        gradients will be clipped or not: a plan is for both."""
        return self._beyond(keeps_freed=False)

    def _beyond(self, *, keeps_freed: bool) -> float:
        held = partial(
            bytes_of_spilled_ranks,
            self.stages,
            self.candidate.schedule,
            self.spill,
            keeps_freed=keeps_freed,
        )
        worst = map(max, held(), held(agrees=True))
        return max(most - limit for most, limit in zip(worst, self.limits, strict=True))

    @property
    def keeps_freed(self) -> bool:
        """Whether it fits if freed memory is kept for later, clipped or not."""
        return self._beyond(keeps_freed=True) <= 0

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction for the stages, transfers included."""
        of_candidate = self.candidate.prediction
        return Prediction(
            self.stages,
            of_candidate.num_microbatches,
            of_candidate.versions,
            of_candidate.replicas,
            of_candidate.placement,
            of_candidate.build,
            self.spill,
            slacks=of_candidate.slacks,
        )

    @property
    def seconds(self) -> float:
        """The predicted step."""
        return self.prediction.step_seconds


def spilled_plan(tasks: Sequence[Task], constraints: Constraints, tiers: Sequence[Tier]) -> Plan:
    """The fastest plan whose stages come from one of these tiers and fit.

    Raises:
        PlanError: none does; says which layer is too large alone, and the least budget.
    """
    best: Spilled | None = None
    nearest: Spilled | None = None
    for task in tasks:
        if task.groups is not None or task.num_microbatches > MOST_WHOLE:
            continue
        for tier in tiers:
            for spilled in _promising(task, constraints, tier):
                if spilled.excess > 0:
                    if nearest is None or spilled.excess < nearest.excess:
                        nearest = spilled
                elif best is None or spilled.seconds < best.seconds:
                    best = spilled
    if best is not None:
        return _plan(best)
    raise PlanError(_too_little(nearest))


def _promising(task: Task, constraints: Constraints, tier: Tier) -> Iterator[Spilled]:
    """Candidates of each way that fit, ahead if there is room for that; of a way in which none
    does, the one with most stages."""
    chooses = constraints.recompute == "where-needed"
    for num_ranks in sorted({1, len(task.cluster.devices)}):
        for ahead in (1, 0):
            fitting = False
            for recompute in _ways(constraints):
                how = How.of(recompute, ahead, constraints.options)
                for spilled in _fitting(task, tier, num_ranks, how):
                    fitting = fitting or spilled.excess <= 0
                    yield _running_once(spilled) if chooses and spilled.excess <= 0 else spilled
            if fitting:
                break


def _fitting(task: Task, tier: Tier, num_ranks: int, how: How) -> Iterator[Spilled]:
    """The candidates with the fewest stages that fit, and the one with most, which leaves most room
    for activations; if none does, the one with most."""
    number, last = 0, None
    asked = dict(how.options).get("stages_per_rank")
    counts = [asked] if asked else _counts(task.num_layers // num_ranks)
    for count in counts:
        if not asked and _is_hopeless(task, num_ranks, count):
            continue
        if number >= _SIMULATED and count < counts[-1]:
            continue
        last = _spilled(task, tier, num_ranks, count, how)
        if last is not None and last.excess <= 0:
            yield last
            number += 1
    if not number and last is not None:
        yield last


def _running_once(spilled: Spilled) -> Spilled:
    """A candidate that fits, with as few stages whose forwards run twice as leaves room."""
    low, high = spilled.how.num_once, len(spilled.candidate.stages)
    if spilled.how.recompute == "none":
        return spilled
    while low < high:
        middle = (low + high + 1) // 2
        other = spilled.running_once(middle)
        if other.keeps_freed:
            spilled, low = other, middle
        else:
            high = middle - 1
    return spilled


def _is_hopeless(task: Task, num_ranks: int, count: int) -> bool:
    """Whether so many stages per rank need not be built, since one of them alone is too large; the
    most that there can be are, for what is then told."""
    most = task.num_layers // num_ranks
    cuts = _even_cuts(task, num_ranks * count)
    largest = max(task.layers.trained_bytes(start, stop) for start, stop in pairwise(cuts))
    return count < most and largest > max(_limits(task, num_ranks))


def _ways(constraints: Constraints) -> tuple[RecomputeWay, ...]:
    if constraints.recompute == "where-needed":
        return ("none", "stage")
    return ("none",) if constraints.recompute == "never" else (constraints.recompute,)


def _counts(most: int) -> list[int]:
    """Numbers of stages per rank that are tried: all, or the first ones and then ever fewer."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count = max(count + 1, ceil(count * 1.15)) if most > _MOST_COUNTS else count + 1
    return [*counts, most] if most else []


def _spilled(task: Task, tier: Tier, num_ranks: int, count: int, how: How) -> Spilled | None:
    options = {**dict(how.options), "stages_per_rank": count}
    offer = Offer(
        _FAMILY, tuple(range(num_ranks)), options=tuple(options.items()), recompute="never"
    )
    try:
        setting = offer.setting(task)
    except (InputError, PlanError):
        return None
    num_stages = setting.num_stages
    cuts = _even_cuts(task, num_stages)
    candidate = Candidate(task, setting, cuts, how.recomputes(num_stages))
    limits = _limits(task, num_ranks)
    least = min(limits)
    spill = Spill(
        tier=tier,
        memory_bytes=int(least) if least < inf else 0,
        ahead=how.ahead,
        moved_bytes_per_second=task.graph.moved_bytes_per_second,
        new_bytes_per_second=task.graph.new_bytes_per_second,
    )
    return Spilled(candidate, spill, limits, how)


def _limits(task: Task, num_ranks: int) -> tuple[float, ...]:
    """The bytes that each rank may use: its own limit, and its share of what its host has."""
    limits = list(task.devices.tensor_limits[:num_ranks])
    for host, shared in task.topology.shared_memories:
        own = [rank for rank in range(num_ranks) if rank in host]
        for rank in own:
            limits[rank] = min(limits[rank], shared / len(own))
    return tuple(limits)


def _layer_bytes(task: Task) -> list[int]:
    """The bytes that travel with each layer: weights, gradients, optimizer state."""
    return [layer.trained_bytes for layer in task.graph.layers]


def _least_bytes(task: Task) -> int:
    """Bytes that a rank holds at some moment wherever stages are: a layer, and a microbatch in
    it."""
    pairs = zip(_layer_bytes(task), task.graph.layers, strict=True)
    return max(size + layer.activation_bytes for size, layer in pairs)


def _even_cuts(task: Task, num_stages: int) -> tuple[int, ...]:
    """Where stages begin so that the largest is as small as can be; and the number of layers."""
    # Layers without weights are somewhere, too.
    sizes = [1 + size for size in _layer_bytes(task)]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_packed(sizes, middle)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    starts = _packed(sizes, low)
    while len(starts) < num_stages:
        bounds = [*starts, len(sizes)]
        start, stop = max(
            ((a, b) for a, b in pairwise(bounds) if b - a > 1),
            key=lambda pair: sum(sizes[pair[0] : pair[1]]),
        )
        cut = min(
            range(start + 1, stop),
            key=lambda place: max(sum(sizes[start:place]), sum(sizes[place:stop])),
        )
        starts = sorted([*starts, cut])
    return (*starts, len(sizes))


def _packed(sizes: Sequence[int], most: int) -> list[int]:
    """Where parts begin, each with as much as goes into it."""
    starts, held = [0], 0
    for place, size in enumerate(sizes):
        if held + size > most:
            starts.append(place)
            held = 0
        held += size
    return starts


def _plan(best: Spilled) -> Plan:
    task, stages = best.candidate.task, best.stages
    whole = sum(stage.busy_seconds for stage in best.candidate.stages) * task.num_microbatches
    if any(stage.recompute != "none" for stage in stages):
        whole = sum(stage.compute_seconds for stage in stages) * task.num_microbatches
    in_memory = whole + sum(stage.update_seconds for stage in stages)
    rows = (
        Alternative(
            label="this plan",
            description=f"{count_of(len(stages), 'stage')} that come and go",
            step_seconds=best.seconds,
            bubble=best.prediction.bubble,
            memory_bytes=max(best.prediction.rank_bytes),
            moved_bytes=sum(_traffic(best)),
            remark="chosen",
        ),
        Alternative(
            label="single device",
            description="everything in memory",
            step_seconds=in_memory,
            memory_bytes=_in_memory_bytes(task),
            remark="" if _in_memory_bytes(task) <= min(best.limits) else "does not fit",
        ),
    )
    plan = best.candidate.to_plan(_reason(best, in_memory), rows)
    return replace(plan, stages=stages, spill=best.spill)


def _in_memory_bytes(task: Task) -> int:
    """Of one device that has all layers, with as many microbatches in flight as one."""
    return task.layers.state_bytes + task.layers.activation_bytes(0, task.num_layers)


def _traffic(best: Spilled) -> tuple[int, int]:
    ranks = best.candidate.setting.schedule.stages_of
    own = [[best.stages[stage] for stage in stages] for stages in ranks]
    totals = [traffic(stages, best.candidate.task.num_microbatches) for stages in own]
    return sum(read for read, _ in totals), sum(written for _, written in totals)


def run_twice(stages: Sequence[StagePlan]) -> str:
    """Said of plans with forwards that run twice, as long as nothing better is known."""
    count = sum(stage.recompute != "none" for stage in stages)
    which = f" of the first {count_of(count, 'stage')}" if count < len(stages) - 1 else ""
    return f"forwards{which} run twice, since their activations would not fit or take longer"


def _reason(best: Spilled, in_memory_seconds: float) -> str:
    task, tier = best.candidate.task, best.spill.tier
    read, written = _traffic(best)
    need, limit = format_bytes(_in_memory_bytes(task)), format_bytes(min(best.limits))
    limited = f" and a rank may use {limit}" if min(best.limits) < inf else ""
    parts = [
        f"the model needs {need} in memory{limited}: {count_of(len(best.stages), 'stage')} come "
        f"from {tier} and leave again, {format_bytes(read)} in and {format_bytes(written)} out for "
        "each minibatch, however many rows it has"
    ]
    if best.spill.ahead == 0:
        parts.append("there is no room to bring a stage in ahead")
    if any(stage.recompute != "none" for stage in best.stages):
        parts.append(run_twice(best.stages))
    seconds = max(tier.read_seconds(read), tier.write_seconds(written))
    rows = task.num_microbatches * task.graph.microbatch_size
    if seconds and rows and in_memory_seconds:
        free = ceil(rows * seconds / in_memory_seconds)
        parts.append(
            f"transfers take {format_seconds(seconds)}, which hides behind compute from about "
            f"{count_of(free, 'row')} a minibatch on (this one has {rows:,})"
        )
    return "; ".join(parts)


def _too_little(nearest: Spilled | None) -> str:
    if nearest is None:
        return (
            "no plan fits in memory, and none whose stages come and go can be built, for which a "
            f"minibatch has {MOST_WHOLE:,} microbatches at most"
        )
    task = nearest.candidate.task
    sizes, whole = _layer_bytes(task), task.layers.trained_bytes(0, task.num_layers)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    least = min(nearest.limits)
    name, needs = task.graph.layers[largest].name, format_bytes(sizes[largest])
    return (
        f"no plan fits in memory, also with {count_of(len(nearest.stages), 'stage')} that come "
        f"from {nearest.spill.tier} and leave again: layer {name!r} alone needs {needs} for "
        f"weights, gradients and optimizer state ({sizes[largest] / whole:.0%} of the "
        f"model's); the least budget is {format_bytes(nearest.excess + least)} on a rank, so "
        "allow that, split that layer, or take smaller microbatches"
    )


def offered(tasks: Sequence[Task], constraints: Constraints) -> str:
    """The plan that a tier would make possible where nothing fits, for an error; empty if none."""
    if all(_least_bytes(task) > max(_limits(task, 1)) for task in tasks):
        return ""
    try:
        plan = spilled_plan(tasks, constraints, [Tier()])
    except PlanError:
        return ""
    return (
        f"; or give the cluster a tier, as in Cluster.local(tiers=[Tier(folder=…)]) or --tier "
        f"FOLDER, and {count_of(len(plan.stages), 'stage')} that come and go fit "
        f"({format_bytes(max(plan.rank_bytes))} on a rank)"
    )
