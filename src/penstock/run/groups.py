"""A member of a group: what of a pipeline can be shared, and the worker of one who does."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.errors import InputError
from penstock.model.spine import NamedLayer
from penstock.plans import Plan
from penstock.run.layout import Layout
from penstock.run.members import tensors_of
from penstock.run.rank.updater import Updater
from penstock.run.rank.worker import Worker
from penstock.run.recipe import Recipe
from penstock.run.seating import MeshTransport, Seat
from penstock.stage.stage import Stage
from penstock.tensor.group import Group
from penstock.transport import Transport


def check_shareable(plan: Plan, recipe: Recipe, *, on_host: bool) -> None:
    """Raise ``InputError`` for what groups cannot do yet.

    Args:
        on_host: whether all ranks compute in main memory.
    """
    refusals = {
        "post_validate": (recipe.post_validate, "leave it out"),
        "batch_norm='minibatch'": (recipe.batch_norm == "minibatch", "leave it out"),
        "a loss without an optimizer": (
            recipe.loss is not None and recipe.optimizer is None,
            "gradients would be parts of the model's; give optimizer=…",
        ),
        "slices of sequences": (plan.placement.num_slices > 1, "plan without slices"),
        "ranks on accelerators": (not on_host, "give devices='cpu'"),
    }
    for what, (wanted, remedy) in refusals.items():
        if wanted:
            raise InputError(
                f"{what}: not with {plan.num_tensor_ranks} tensor ranks; {remedy}, or plan with "
                "tensor_ranks=1"
            )


def check_processes(plan: Plan, count: int) -> None:
    """Raise ``InputError`` unless a job has a process for each seat of a plan."""
    if plan.num_seats == count:
        return
    groups = ""
    if plan.num_tensor_ranks > 1:
        groups = f" of {', '.join(map(str, plan.group_sizes))} tensor ranks"
    raise InputError(
        f"the plan has {plan.num_ranks} ranks{groups}, but the job has {count} processes; "
        f"start it with torchrun --nproc-per-node={plan.num_seats}, or plan for "
        f"{count} ranks (stages = ranks × stages per rank of the schedule)"
    )


def begin_equal(layers: Iterable[NamedLayer], group: Group) -> None:
    """Give layers the values that a group's first member has, where each member has built the
    model for itself."""
    pairs = (pair for layer in layers for pair in tensors_of(layer.module))
    with torch.no_grad():
        for tensor in {id(tensor): tensor for _, tensor in pairs}.values():
            tensor.copy_(group.of_first(tensor.detach()))


def member(
    layout: Layout, seat: Seat, channels: Transport, recipe: Recipe, *, equal: bool = False
) -> tuple[Worker, dict[int, Stage]]:
    """The worker of one member of a rank that a group performs, and its stages.

    Args:
        equal: give it the values of the first member before.
    """
    group = seat.group(channels)
    if equal and group is not None:
        begin_equal(layout.layers_of(seat.rank), group)
    assert layout.sharings is not None
    transport = MeshTransport(channels, seat, group, layout.sharings.along(layout.skips))
    stages = layout.stages(seat.rank, group)
    updater = Updater(
        seat.rank,
        layout.num_ranks,
        layout.holdings(seat.rank, stages),
        transport,
        recipe,
        layout.shared(seat.rank, stages),
        group,
    )
    worker = Worker(
        seat.rank,
        stages,
        transport,
        recipe,
        updater,
        layout.skips,
        layout.stores(stages, updater.optimizers),
        layout.shared_state(stages),
    )
    return worker, stages
