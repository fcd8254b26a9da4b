"""``rehearse``: perform a plan with every rank a real process and only the compute a wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, get_args

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.values import expect, is_number, is_whole, one_of
from penstock.core.schedule import Kind, Op, Schedule
from penstock.core.schedule.check import check
from penstock.core.schedule.lower import add_agreement, add_communication, add_update, add_updates
from penstock.core.schedule.op import COMPUTE
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.versions import Flush
from penstock.planning.plans import Plan
from penstock.training.rehearsal import RehearsalTransport, UpdateMode, WaitsName
from penstock.training.rehearsal.conductor import RehearsalJob, perform
from penstock.training.rehearsal.result import (
    Rehearsal,
    RehearsedStream,
    compute_of,
    rehearsal_of,
    stream_of,
)

MOST_RANKS = 128
"""More processes than this would only show how this machine switches between them."""
_DEADLINE_SECONDS = 30.0
OP_SECONDS = 10e-3
"""The seconds of F, I and W of all of a rank's layers where nobody gives costs."""


@public()
def rehearse(  # noqa: PLR0913 - each has a default that most callers keep
    plan: Plan | Schedule,
    costs: Costs | None = None,
    *,
    steps: int = 5,
    scale: float = 1.0,
    message_bytes: int = 64 * 1024,
    transport: RehearsalTransport = "shared-memory",
    waits: WaitsName = "relative",
    updates: UpdateMode = "separate",
    minibatch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rehearsal:
    """Perform a plan on emulated devices: every rank is a real process with a real worker, which
    performs its lowered schedule and sends real messages; only its compute is a wait, as long as
    planned. Eight or sixteen ranks run on two cores.

    A schedule that never flushes is performed as one stream per step, with an update of each stage
    after each of its rounds; ``Rehearsal.steady_seconds`` is what a microbatch takes in its middle.

    Args:
        plan: a plan, or a schedule of compute ops. Of a plan that never flushes, a stream of eight
            microbatches per rank and four minibatches or more.
        costs: seconds of each op, as for ``simulate``; by default the plan's, or 10 ms each for F,
            I and W of all of a rank's layers. A planned hop is kept, by not using a message sooner;
            so is ``reduce``, by not updating sooner.
        steps: how often to perform it; the first one is warm-up if there are several.
        scale: multiplies all costs: 0.1 rehearses a slow plan in a tenth of its time.
        message_bytes: the size of an output and of a gradient.
        transport: ``"shared-memory"`` between processes, or ``"threads"`` of this one.
        waits: ``"relative"``, each op waits from when it starts; or ``"logical"``, until the
            prediction says that it ends, which hides all overhead and is for tests of order.
        updates: ``"separate"``: each stage updates when its gradients are complete; ``"agreed"``:
            when all ranks have told theirs, as clipping by the global norm wants it;
            ``"post-validated"``: at once, and ranks go from step to step without waiting for each
            other, so that ``Rehearsal.pace_seconds`` is what a step takes.
        minibatch: microbatches per update, for a schedule by the name of ``pipedream-2bw``; as many
            as it has stages by default.
        progress: called after each step with the steps done and their number.

    Returns:
        The predicted and the measured timeline, and what they say.

    Raises:
        InputError: an argument makes no sense, or the costs do not fit the schedule.
        ScheduleError: the schedule is incomplete or deadlocks.
        RunError: a rank failed or died.
    """
    _check_plan(plan)
    schedule = compute_of(plan)
    if costs is None:
        costs = plan.costs if isinstance(plan, Plan) else default_costs(schedule)
    expect(costs, Costs, "costs", "give a penstock.Costs")
    # Emulated stages make all gradients at once, so that no part can leave before the others, and
    # each pair of ranks has a link of its own.
    costs = replace(costs, exchanges=(), cards=(), hosts=())
    _check_arguments(steps, scale, message_bytes)
    one_of("transport", transport, get_args(RehearsalTransport))
    one_of("waits", waits, get_args(WaitsName))
    one_of("updates", updates, get_args(UpdateMode))
    _check_schedule(schedule, costs)
    stream = stream_of(plan, schedule, minibatch)
    if stream is not None and updates != "separate":
        raise InputError(
            f"updates is {updates!r}, but {schedule.name} never flushes, so there is no moment at "
            "which all ranks could agree; leave it out"
        )
    costs = costs.scaled(scale)
    lowered = performable(schedule, updates, stream)
    job = RehearsalJob(
        ops=str(flattened(lowered)),
        costs=costs.of_slices(schedule.num_slices),
        num_steps=steps,
        message_bytes=message_bytes,
        waits=waits,
        updates=updates,
        versions=Flush() if stream is None else stream.policy,
        deadline_seconds=_DEADLINE_SECONDS + 2 * simulate(lowered, costs).makespan,
    )
    done = []
    with closing(perform(job, transport)) as performed:
        for times in performed:
            done.append(times)
            if progress is not None:
                progress(len(done), steps)
    return rehearsal_of(lowered, costs, done, None if stream is None else stream.period)


def default_costs(schedule: Schedule) -> Costs:
    """F, I and W of all of a rank's layers take ``OP_SECONDS`` each."""
    return Costs().spread(schedule.num_stages / schedule.num_ranks).scaled(OP_SECONDS)


def performable(
    schedule: Schedule, updates: UpdateMode = "separate", stream: RehearsedStream | None = None
) -> Schedule:
    """A schedule as ranks perform it: its compute in its order, and all that this takes."""
    kept = COMPUTE | {Kind.RECOMPUTE}
    ranks = (tuple(op for op in ops if op.kind in kept) for ops in schedule.ranks)
    compute = schedule.with_ranks(ranks)
    if stream is not None:
        return add_communication(add_updates(compute, stream.rounds))
    updated = add_update(compute, together=updates == "agreed")
    if updates != "separate":
        updated = add_agreement(updated, late=updates == "post-validated")
    return add_communication(updated)


def flattened(schedule: Schedule) -> Schedule:
    """Each slice as a microbatch of its own, so that two numbers name all work. What slices need of
    each other within a stage, the order of their rank already gives."""
    num_slices = schedule.num_slices

    def flat(op: Op) -> Op:
        return op._replace(microbatch=op.microbatch * num_slices + op.slice, slice=0)

    return schedule.with_ranks([flat(op) for op in ops] for ops in schedule.ranks)


def _check_plan(plan: Any) -> None:
    expect(plan, Plan | Schedule, "the plan", "give a penstock.Plan or a penstock.Schedule")
    if isinstance(plan, Plan) and plan.spill is not None:
        raise InputError(
            "stages of this plan come from a tier and leave again, and emulated devices have none; "
            "simulate it, or rehearse it as if all stayed: take spill out of the plan"
        )
    if isinstance(plan, Plan) and plan.offload is not None:
        raise InputError(
            "activations of this plan wait in a tier, and emulated devices have none; simulate it, "
            "or rehearse it as if all stayed: plan.offloading(None)"
        )


def _check_arguments(steps: Any, scale: Any, message_bytes: Any) -> None:
    if not is_whole(steps) or steps < 1:
        raise InputError(f"steps is {steps!r}, but must be a whole number ≥ 1")
    if not is_number(scale) or not 0 < scale < float("inf"):
        raise InputError(f"scale is {scale!r}, but must be a number > 0; 1 is the planned pace")
    if not is_whole(message_bytes) or message_bytes < 1:
        raise InputError(f"message_bytes is {message_bytes!r}, but must be a whole number ≥ 1")


def _check_schedule(schedule: Schedule, costs: Costs) -> None:
    check(schedule)
    costs.check_stages(schedule.num_stages)
    if schedule.num_ranks > MOST_RANKS:
        raise InputError(
            f"the schedule has {schedule.num_ranks} ranks, and each is a process here; rehearse "
            f"with {MOST_RANKS} at most, and simulate what is larger"
        )
