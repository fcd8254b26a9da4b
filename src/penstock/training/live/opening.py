"""``stream``: the way into a live stream, as ``Pipeline`` is into training on minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from msgspec.structs import replace
from torch import nn

from penstock.base.arguments import public
from penstock.base.errors import InputError
from penstock.base.values import expect, one_of
from penstock.core.versions import Rates, Sideways
from penstock.engine.device.accelerators import Devices
from penstock.engine.model.optimizer_factory import OptimizerFactory, SchedulerFactory
from penstock.engine.run.assembly import Running
from penstock.engine.run.building import build
from penstock.engine.run.drive.driver import Deadlines
from penstock.engine.run.drive.joining import TransportName
from penstock.engine.run.recipe import Loss, Recipe
from penstock.planning.plans import Plan
from penstock.planning.plans.stage_plan import sharing_ranks
from penstock.training.live.streams import Stream


@public()
def stream(  # noqa: PLR0913 - everything that a user may want to say
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    lr_scheduler: SchedulerFactory | None = None,
    clip_stage_norm: float | None = None,
    rates: Rates | None = None,
    stop_at_nan: bool = True,
    replay: bool = False,
    devices: Devices | None = None,
    transport: TransportName = "auto",
    seed: int | None = None,
    deadline_seconds: float = 300.0,
    startup_seconds: float | None = None,
    message_types: Sequence[type] = (),
    record: bool = True,
) -> Stream:
    """Learn from frames as they come, on the devices of a plan.

    A frame is one minibatch of one microbatch. With ``partime`` (Meloni et al., arXiv 2210.09147)
    every stage runs the forward of the newest frame, then a backward through it with the gradient
    of the frame 2(p−1−s) before, then steps: one version of the weights and one graph per stage,
    however many stages there are. Other schedules that update after every microbatch work as well,
    such as ``pipedream`` with weight stashing.

    Args:
        model: an ``nn.Sequential``, or a module with a ``spine``; trained in place.
        plan: made for it, with an asynchronous schedule that updates per microbatch.
        loss: from (output, target) of one frame to a scalar tensor; without one, the stream only
            predicts.
        optimizer: makes an optimizer of the parameters that it is given, once per stage.
        lr_scheduler: makes a learning-rate scheduler of an optimizer; stepped after every update.
        clip_stage_norm: the most that the norm of one stage's gradients may be.
        rates: of ``partime``: ``"divided"`` divides a stage's learning rates by the age of its
            gradients, max(1, 2(p−1−s)) frames, or training easily blows up; ``"given"`` leaves them
            as they are. By default as the plan says.
        stop_at_nan: raise a ``StageError`` that names the frame if a loss is not finite, if a
            gradient has become so on its way back, or, with ``partime``, what a stage makes of a
            frame through which older gradients would come; before anything is learned through it.
            Never on an accelerator, where every frame would have to be waited for.
        replay: replay each stage's passes instead of running its layers: on CPUs as functions that
            torch's Inductor compiles in the first frame, which takes seconds to minutes, on
            accelerators as graphs that torch captures there. Results are those of eager mode to
            rounding; what would change from frame to frame is refused, as for ``Pipeline(…,
            compile=True)``. Frames that are only predicted run eagerly.
        devices, transport, seed, deadline_seconds, startup_seconds, message_types, record: as for
            ``Pipeline``.

    Raises:
        ModelError: the model cannot be cut, or the plan is for another one.
        InputError: a plan that updates otherwise, or contradictory arguments.
        PeerError, DeadlineError: under ``torchrun``, another process failed or did not come.
    """
    expect(plan, Plan, "the plan", "make one with penstock.plan, or Plan.load a file")
    plan = _with_rates(plan, rates)
    _check(plan)
    deadlines = Deadlines.of(deadline_seconds, startup_seconds)

    def described(_: nn.Module) -> tuple[Recipe, Running]:
        recipe = Recipe(
            loss=loss,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            clip_stage_norm=clip_stage_norm,
            stop_at_nan=stop_at_nan,
            versions=plan.versions,
            live=True,
        )
        running = Running(
            transport=transport,
            seed=torch.initial_seed() if seed is None else seed,
            deadlines=deadlines,
            record=record,
            results="every rank",
            devices=devices,
            replay=replay,
            message_types=message_types,
            compare_data=False,
        )
        return recipe, running

    return Stream(build(model, plan, transport, deadlines, described))


def _check(plan: Plan) -> None:
    """Raise ``InputError`` for a plan that cannot follow a live stream."""
    policy = plan.versions
    if not policy.asynchronous or policy.updates != "microbatch":
        raise InputError(
            f"a live stream needs a plan that updates after every frame; this one has the schedule "
            f"{plan.schedule} with {policy.name}: plan with schedule='partime', or with "
            "schedule='pipedream' and versions.Stash()"
        )
    if plan.num_tensor_ranks > 1:
        kind = sharing_ranks(plan.stages)
        raise InputError(
            f"the plan has stages of {plan.num_tensor_ranks} {kind} ranks, which share minibatches "
            f"and no live stream: plan with {kind}_ranks=1"
        )
    if max(plan.replicas) > 1:
        raise InputError(
            f"the plan has {'-'.join(map(str, plan.replicas))} replicas; in a live stream every "
            "stage sees every frame: plan with replicas=1"
        )


def _with_rates(plan: Plan, rates: Rates | None) -> Plan:
    if rates is None:
        return plan
    one_of("rates", rates, get_args(Rates))
    if not isinstance(plan.versions, Sideways):
        if rates == "given":
            return plan
        raise InputError(
            f"rates='divided' is for partime; {plan.versions.name} applies gradients otherwise"
        )
    return replace(plan, versions=Sideways(rates=rates))
