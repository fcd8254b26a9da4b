"""Checks before ranks are built: what a plan's ranks cannot do with a recipe, a model or a job."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.base.units import count_of
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.layout import Layout
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.seating import RankSeat
from penstock.planning.plans import Plan
from penstock.planning.plans.stage_plan import sharing_ranks
from penstock.planning.plans.summing import all_group_sizes, num_processes, server_ranks


def check_updates(plan: Plan, recipe: Recipe, *, one_process: bool) -> None:
    """Raise ``InputError`` for updates that who makes them in a plan cannot make so.

    Args:
        one_process: whether all ranks are threads, of which each makes all updates of its stages,
            unless there are parameter servers.
    """
    reducer = plan.summing.reducer
    if reducer == "fully-sharded":
        _check_full_sharding(plan, recipe, one_process=one_process)
    shares = reducer in {"parameter-server", "fully-sharded"} or (
        reducer == "sharded" and not one_process
    )
    if recipe.post_validate and shares:
        raise InputError(
            f"post_validate undoes updates, and with the reducer {reducer!r} others have made a "
            "part of them; leave it out, or take another reducer"
        )
    if plan.divides_experts:
        _check_experts(recipe, one_process=one_process)
    if not plan.summing.stale:
        return
    _check_recipe(recipe, "there is nothing to be late", "take stale=0")
    limits = (recipe.clip_norm, recipe.clip_stage_norm, recipe.loss_scale)
    if any(limit is not None for limit in limits):
        raise InputError(
            "clip_norm, clip_stage_norm and a grad_scaler need all gradients of one minibatch at "
            "one update, and with stale updates they come in several; leave them out, or take "
            "stale=0"
        )


def _check_recipe(recipe: Recipe, gradients: str, remedy: str, post_validate: str = "") -> None:
    """Raise ``InputError`` for a recipe without an optimizer and, where anything is said of it, for
    one with ``post_validate``.

    Args:
        gradients: what would become of those that no optimizer takes.
    """
    if recipe.loss is not None and recipe.optimizer is None:
        raise InputError(f"without an optimizer, {gradients}; give optimizer=…, or {remedy}")
    if recipe.post_validate and post_validate:
        raise InputError(f"post_validate {post_validate}; leave it out, or {remedy}")


def _check_full_sharding(plan: Plan, recipe: Recipe, *, one_process: bool) -> None:
    if recipe.count_memory and plan.summing.gathered_for == "use":
        raise InputError(
            "count_memory does not tell activations from weights that come and go with each use; "
            "leave it out, or take gathered_for='step'"
        )
    if one_process:
        raise InputError(
            "the reducer 'fully-sharded' gathers weights by torch's process groups, and all ranks "
            "are threads of one process here; start the job with torchrun, or take another reducer"
        )
    _check_recipe(recipe, "gradients would be rows of the model's", "take the reducer 'owners'")


def _check_experts(recipe: Recipe, *, one_process: bool) -> None:
    if one_process:
        raise InputError(
            "expert_ranks send tokens by torch's process groups, and all ranks are threads of one "
            "process here; start the job with torchrun, or take expert_ranks=1"
        )
    _check_recipe(
        recipe,
        "gradients of experts would be those that are here",
        "take expert_ranks=1",
        "lets a forward go on without its values, and other copies would wait for its tokens",
    )


def check_experts_here(device: str) -> None:
    """Raise ``InputError`` for a process that computes where nobody has tried to divide experts."""
    if device != "cpu":
        raise InputError(
            f"expert_ranks run on CPUs so far, and this rank computes on {device}; give "
            "devices='cpu', or take expert_ranks=1"
        )


def check_sharding(tied: Sequence[str], device: str) -> None:
    """Raise for a process that cannot have rows of its stages' weights.

    Args:
        tied: names of the weights that several stages use.
        device: the kind that it computes on.

    Raises:
        ModelError: weights are tied between stages, each of which would gather its own.
        InputError: it computes on an accelerator, where nobody has tried this.
    """
    if tied:
        raise ModelError(
            f"{tied[0]!r} is tied between stages, and the reducer 'fully-sharded' keeps rows of "
            "weights of one stage; untie it, put its layers into one, or take the reducer 'sharded'"
        )
    if device != "cpu":
        raise InputError(
            f"the reducer 'fully-sharded' runs on CPUs so far, and this rank computes on {device}; "
            "give devices='cpu', or take the reducer 'sharded'"
        )


def check_trains(layers: Sequence[NamedLayer], recipe: Recipe) -> None:
    """Raise ``InputError`` if there is an optimizer, and every parameter of a model is frozen."""
    if recipe.optimizer is None or recipe.loss is None:
        return
    wants = [parameter.requires_grad for layer in layers for parameter in layer.module.parameters()]
    if wants and not any(wants):
        raise InputError(
            "no parameter of the model needs a gradient (requires_grad is False everywhere), so "
            "the optimizer would train nothing; unfreeze some layers before the Pipeline is built, "
            "or leave optimizer out and evaluate"
        )


def check_stage_norms(layout: Layout, recipe: Recipe) -> None:
    """Raise ``InputError`` where a parameter server would clip a stage by the norm of a part of its
    gradients."""
    withheld = layout.weights.withheld
    if recipe.clip_stage_norm is not None and withheld:
        names = ", ".join(map(repr, withheld[:3])) + ", …" * (len(withheld) > 3)
        raise InputError(
            f"clip_stage_norm needs all gradients of a stage, and a parameter server does not have "
            f"those of {names}, which stages share or tensor ranks have terms of; take clip_norm, "
            "or another reducer"
        )


def check_shareable(plan: Plan, recipe: Recipe) -> None:
    """Raise ``InputError`` for what groups cannot do."""
    kind = sharing_ranks(plan.stages)
    _check_recipe(
        recipe,
        f"gradients would be parts of the model's on {kind} ranks",
        f"plan with {kind}_ranks=1",
        "lets a forward that fails on weights which may not stand go on without its values, and "
        f"others of the {plan.num_tensor_ranks} {kind} ranks would wait for them",
    )


def seats_of(plan: Plan) -> list[RankSeat]:
    """Where all members of all ranks of a plan sit, and behind them its parameter servers."""
    return RankSeat.all_of(all_group_sizes(plan))


def check_processes(plan: Plan, count: int) -> None:
    """Raise ``InputError`` unless a job has a process for each seat of a plan, and for each of its
    parameter servers."""
    needed = num_processes(plan)
    if needed == count:
        return
    groups, sizes = "", all_group_sizes(plan)
    if plan.num_tensor_ranks > 1:
        groups = f" of {', '.join(map(str, plan.group_sizes))} {sharing_ranks(plan.stages)} ranks"
    if servers := server_ranks(plan):
        groups += f" and {count_of(len(servers), 'parameter server')}"
        members = [sizes[rank] for rank in servers]
        if max(members) > 1:
            groups += f" of {', '.join(map(str, members))}"
    raise InputError(
        f"the plan has {plan.num_ranks} ranks{groups}, but the job has {count} processes; "
        f"start it with torchrun --nproc-per-node={needed}, or plan for "
        f"{count} ranks (stages = ranks × stages per rank of the schedule)"
    )


def check_kinds(seats: Sequence[RankSeat], kinds: Sequence[str]) -> None:
    """Raise ``InputError`` unless the members of each group compute on one kind of device: others
    draw other random numbers, so that members would drop out different values.

    Args:
        seats: of the whole plan, in their order.
        kinds: of the device of each.
    """
    for seat, kind in zip(seats, kinds, strict=True):
        first = kinds[seat.first(seat.rank)]
        if kind != first:
            raise InputError(
                f"the tensor ranks of rank {seat.rank} compute on {first} and {kind}, which draw "
                "different random numbers; give devices=… of one kind to each group"
            )


def check_spillable(plan: Plan, recipe: Recipe, layout: Layout) -> None:
    """Raise ``InputError`` or ``ModelError`` if the stages of a plan cannot come and go."""
    remedy = 'leave spill out (spill="never" when planning)'
    _check_recipe(
        recipe,
        "gradients of stages that leave memory could not be read in .grad",
        remedy,
        "keeps a copy of weights and optimizer state, which stages that leave memory have no room "
        "for",
    )
    for module in layout.modules:
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"{type(module).__name__} has sparse=True, and gradients whose size nobody knows "
                f"before cannot leave memory; take sparse=False, or {remedy}"
            )
    weights = layout.weights
    if weights.tied and plan.schedule != "spilled":
        raise ModelError(
            f"{weights.tied[0]!r} is tied between stages that come and go, which may update in any "
            f'order in {plan.schedule}; take schedule="spilled", or {remedy}'
        )
    if weights.shared_stages:
        raise ModelError(
            f"stages {', '.join(map(str, sorted(weights.shared_stages)))} share weights with other "
            f"ranks, so their sums would need them in memory; put them on one rank, or {remedy}"
        )


def warn_of_hosts(plan: Plan, first_seats: Sequence[int], hosts: Sequence[str]) -> None:
    """Warn if ranks are on different hosts that share one by the plan: it counts what they exchange
    as staying inside, and lets them sum first.

    Args:
        first_seats: the number of each rank's first process.
        hosts: that of every process.
    """
    first_of: dict[int, int] = {}
    for rank, host in enumerate(plan.hosts):
        other = first_of.setdefault(host, rank)
        ours, theirs = hosts[first_seats[rank]], hosts[first_seats[other]]
        if ours != theirs:
            warnings.warn(
                f"by the plan, ranks {other} and {rank} share a host, and they run on "
                f"{theirs.split()[0]} and {ours.split()[0]}: start ranks in the order of the "
                "plan's devices, or plan with what `penstock measure-cluster` finds here",
                RuntimeWarning,
                stacklevel=2,
            )
            return
