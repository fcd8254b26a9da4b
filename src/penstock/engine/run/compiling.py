"""Whether a plan's stages can run as compiled passes, and letting them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from penstock.base.errors import InputError
from penstock.base.telling import tell
from penstock.engine.device import captured_graphs
from penstock.engine.run.assembly import Running
from penstock.engine.run.recipe import Recipe
from penstock.engine.stage.backends import check_compiler, replaying_on
from penstock.engine.stage.stage import Stage
from penstock.planning.plans import Plan
from penstock.planning.plans.stage_plan import sharing_ranks


def compile_stages(
    plan: Plan,
    recipe: Recipe,
    running: Running,
    stages: Iterable[Mapping[int, Stage]],
    devices: Collection[torch.device],
) -> None:
    """Let the stages of this process run as compiled passes, if that is wanted.

    Args:
        stages: those of each seat here, by number.
        devices: on which they compute.

    Raises:
        InputError: something else that is wanted needs the layers themselves in every pass, or
            there is no compiler.
        ModelError: layers have hooks, which no pass would call.
    """
    if running.compile is None and not running.replay:
        return
    _check(plan, recipe, "replay=True" if running.replay else "compile=…")
    backend = running.compile or replaying_on(devices)
    check_compiler(backend, devices)
    if backend == "cudagraphs":
        tell(captured_graphs.UNTRIED)
    for own in stages:
        for stage in own.values():
            stage.compile(backend)


def _check(plan: Plan, recipe: Recipe, argument: str) -> None:
    refusals = {
        f"{sharing_ranks(plan.stages)} ranks, which exchange parts of values inside of layers": (
            plan.num_tensor_ranks > 1
        ),
        "the reducer 'fully-sharded', which gathers weights layer by layer": (
            plan.summing.reducer == "fully-sharded"
        ),
        "expert ranks, which exchange tokens inside of layers": plan.divides_experts,
        "slices, of which each has another past": plan.placement.num_slices > 1,
        "activations that are offloaded between passes": plan.offload is not None,
        "batch_norm='minibatch', which follows layers from outside": (
            recipe.batch_norm == "minibatch"
        ),
    }
    for other, is_wanted in refusals.items():
        if is_wanted:
            raise InputError(f"{argument} and {other}, do not go together; leave one of them out")
