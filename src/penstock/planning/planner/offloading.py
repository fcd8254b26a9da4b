"""Whether activations leave memory, where otherwise forwards would run twice.

Both save the same memory: what a microbatch keeps between its forward and its backward. Running the
forward again costs compute, always; letting activations wait in a tier costs nothing as long as the
transfers hide behind compute, and more and more beyond that. So a plan that recomputes is held
against the same plan with activations that leave, and the faster one that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from msgspec.structs import replace

from penstock.base.units import count_of, format_bytes, format_seconds
from penstock.core.cluster import Tier
from penstock.core.schedule.memory import Sizes, peaks
from penstock.planning.planner.request import MOST_WHOLE, Constraints
from penstock.planning.planner.spilling import run_twice
from penstock.planning.planner.task import Task
from penstock.planning.plans.memory_parts import allocated
from penstock.planning.plans.plan import Plan
from penstock.planning.plans.spilling import Offload, bytes_of_spilled_ranks, moved_activations
from penstock.planning.plans.stage_plan import StagePlan
from penstock.planning.plans.table import Alternative


def weighed(plan: Plan, task: Task, constraints: Constraints) -> Plan:
    """A plan, or the same with activations that leave instead of forwards that run twice, whichever
    is faster; its reason says what the other one would take. Where ranks are CPUs, activations
    stay: a GPT of 152 M parameters took 14.3 s a step with them on a disk, 13.1 s with forwards
    twice, and predictions know nothing of what copies cost the cores that compute.

    Args:
        plan: one that fits.
        task: whose cluster has the tiers in which activations may wait.
        constraints: what is asked for; nothing is changed where it leaves no choice.
    """
    if constraints.spill == "never" or constraints.recompute != "where-needed":
        return plan
    tiers, limits = task.cluster.tiers, _limits(plan, task)
    again = tuple(index for index, stage in enumerate(plan.stages) if stage.recompute != "none")
    if not again or not tiers or plan.versions.asynchronous or plan.num_tensor_ranks > 1:
        return plan
    too_many = plan.num_microbatches > MOST_WHOLE
    tiers = () if too_many else tiers
    fitting = [other for tier in tiers for other in _fitting(plan, tier, again, limits)]
    if not fitting:
        why = "would take more memory than there is"
        if too_many:
            why = f"are simulated op by op, of {MOST_WHOLE:,} microbatches at most"
        return _with_reason(plan, f"activations that wait in a tier instead {why}")
    best = min(fitting, key=lambda other: other.step_seconds)
    if best.step_seconds >= plan.step_seconds:
        assert best.offload is not None
        return _with_reason(
            plan,
            f"activations that wait in {best.offload.tier} instead would take "
            f"{format_seconds(best.step_seconds)} a step",
        )
    if not all(plan.on_accelerator):
        assert best.offload is not None
        return _with_reason(
            plan,
            f"activations that wait in {best.offload.tier} instead would take "
            f"{format_seconds(best.step_seconds)} a step if copies cost nothing; on CPUs they take "
            "time of the cores that compute, so only plan.offloading(…) lets them leave",
        )
    return _told(best, plan)


def _limits(plan: Plan, task: Task) -> list[float]:
    """Bytes that each rank of a plan may use."""
    if len(plan.devices) != plan.num_ranks:
        return [min(task.devices.limits)] * plan.num_ranks
    everywhere = task.memory_bytes or inf
    return [min(device.memory_bytes or inf, everywhere) for device in plan.devices]


def _held(plan: Plan) -> Sequence[int]:
    """Bytes of each rank; where stages come and go, whether gradients will be clipped or not."""
    if plan.spill is None:
        return plan.rank_bytes
    clipped = bytes_of_spilled_ranks(plan.stages, plan.placement, plan.spill, agrees=True)
    return [*map(max, plan.rank_bytes, allocated(clipped, plan.prediction.slacks))]


def _fitting(
    plan: Plan, tier: Tier, again: tuple[int, ...], limits: Sequence[float]
) -> Iterator[Plan]:
    """The plan with activations that leave, fetched ahead if there is room for that."""
    for ahead in (1, 0):
        other = plan.offloading(Offload(tier=tier, stages=again, ahead=ahead))
        if all(held <= limit for held, limit in zip(_held(other), limits, strict=True)):
            yield other
            return


def _with_reason(plan: Plan, more: str) -> Plan:
    return replace(plan, reason=f"{plan.reason}; {more}" if plan.reason else more)


def _told(best: Plan, before: Plan) -> Plan:
    """The plan with activations that leave, and why."""
    assert best.offload is not None
    moved = moved_activations(best.build_schedule(), best.stages)
    count, tier = count_of(len(best.offload.stages), "stage"), best.offload.tier
    rows = tuple(
        replace(
            row,
            step_seconds=best.step_seconds,
            bubble=best.prediction.bubble,
            memory_bytes=max(best.rank_bytes),
        )
        if row.label == "this plan"
        else row
        for row in best.alternatives
    )
    twice = Alternative(
        label="forwards run twice",
        description="the same stages, and nothing leaves",
        step_seconds=before.step_seconds,
        bubble=before.prediction.bubble,
        memory_bytes=max(before.rank_bytes),
    )
    said = best.reason.replace(f"; {run_twice(before.stages)}", "")  # nothing better was known
    offloaded = replace(best, stages=_with_peaks(best), alternatives=(*rows, twice), reason=said)
    return _with_reason(
        offloaded,
        f"activations of {count} wait in {tier} between forward and backward, "
        f"{format_bytes(moved)} out and in for each minibatch, since running these forwards twice "
        f"would take {format_seconds(before.step_seconds)} a step",
    )


def _with_peaks(plan: Plan) -> tuple[StagePlan, ...]:
    """The stages with the most microbatches of each that are in memory at once."""
    schedule, count = plan.build_schedule(), len(plan.stages)
    return tuple(
        replace(
            stage,
            peak_activations=max(
                peaks(schedule.rank_ops, Sizes([float(other == index) for other in range(count)]))
            ),
        )
        for index, stage in enumerate(plan.stages)
    )
