"""How a model gets to the devices of its ranks: which queue each has, and what is moved when. Where
all ranks compute in main memory nothing is moved.

Stages that come and go are evicted as soon as they are built. Sizes are known before the first
step: weights are weighed as they leave, and the optimizer's state is weighed where tensors have
shapes and no values (``meta``); what cannot step there steps once with nothing, a stage at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.units import format_bytes
from penstock.core.schedule.residence import StageBytes, resident_bytes
from penstock.engine.device.accelerators import accelerator_kind, is_on_host
from penstock.engine.device.queue import DeviceQueue, moments_of_caller, taken_up
from penstock.engine.masters import gradient_dtype, take_gradient_dtype
from penstock.engine.model.optimizer_factory import Parameters, make_optimizer
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Values, place_buffers, place_parameters
from penstock.engine.run.rank.updater import StageParameters
from penstock.engine.run.recipe import Recipe
from penstock.engine.run.refusals import check_spillable
from penstock.engine.run.seating import RankSeat
from penstock.engine.stage.stage import Stage
from penstock.engine.weights.buffers import BufferPool, SwapGroup, state_tensors
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.residency import Residency
from penstock.planning.plans import Plan
from penstock.planning.plans.spilling import most_held, with_residence
from penstock.planning.plans.summing import stages_held

_ROUNDED = 1.01


@dataclass(frozen=True)
class SwapSetup:
    """All that ranks are given whose stages come and go.

    Attributes:
        values: where layers have their initial values from, right before these leave.
        devices: of the ranks of this process, by their numbers.
        seconds: how long a transfer may take.
    """

    plan: Plan
    layout: Layout
    recipe: Recipe
    values: Values
    devices: Mapping[int, torch.device]
    seconds: float


def evicted(setup: SwapSetup, rank: int, stages: Mapping[int, Stage]) -> Residency:
    """Move a rank's stages to its tier, one at a time, and make room for what will be kept there.

    Args:
        stages: the rank's.

    Raises:
        FileError: the tier has no room for weights or optimizer state.
        ModelError: a layer has no way to its values.
    """
    plan, recipe = setup.plan, setup.recipe
    assert plan.spill is not None
    pinned = setup.layout.weights.tied_ids
    weights = {
        index: [weight for weight in stage.parameters() if id(weight) not in pinned]
        for index, stage in stages.items()
    }
    device = setup.devices[rank]
    way = DataPath.between(plan.spill.tier, device, setup.seconds)
    residence = Residency(way, BufferPool(float("inf"), device), weights)
    try:
        first = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
        for index in stages:
            for layer in range(first[index], first[index + 1]):
                setup.values.draw(layer)
            residence.take_in(index)
            if plan.stages[index].recompute != "layers":
                stages[index].write_gradients_to(residence.slots(index, stages[index].modules))
        sizes = _reserved(setup, rank, stages, residence)
        check_budget(plan, recipe, rank, sizes)
        room = _room_beside_freed(plan, recipe, rank, sizes, residence)
    except BaseException:
        residence.close()
        raise
    schedule = with_residence(plan.placement, plan.spill, agrees=recipe.needs_agreement)
    residence.buffers.budget_bytes = max(resident_bytes(schedule.ranks[rank], sizes), default=0)
    buffers, limit = residence.buffers, plan.spill.memory_bytes
    buffers.slack_bytes = max(0.0, room) if limit else 0.0
    if limit:
        residence.room_bytes = limit - buffers.budget_bytes - buffers.slack_bytes
    return residence


def _reserved(
    setup: SwapSetup, rank: int, stages: Mapping[int, Stage], residence: Residency
) -> StageBytes:
    """Make room on the tier for what comes beside weights; how much memory all of it takes."""
    recipe, num_stages = setup.recipe, len(setup.plan.stages)
    holdings = setup.layout.holdings(rank, dict(stages))
    state = {
        index: state_bytes(recipe, holdings[index], residence.parameters(index), index)
        for index in stages
    }
    for index, num_bytes in state.items():
        residence.reserve_state(index, num_bytes)
    if recipe.needs_agreement:
        for index in stages:
            residence.reserve_gradients(index)
    return StageBytes(
        _by_stage(num_stages, {index: residence.weight_bytes(index) for index in stages}),
        _by_stage(num_stages, {index: residence.gradient_bytes(index) for index in stages}),
        _by_stage(num_stages, state),
    )


def _by_stage(num_stages: int, known: Mapping[int, int]) -> list[int]:
    return [known.get(stage, 0) for stage in range(num_stages)]


def check_budget(plan: Plan, recipe: Recipe, rank: int, sizes: StageBytes) -> None:
    """Raise ``InputError`` if a rank would hold more than its plan allows.

    Args:
        sizes: of all stages, as they were weighed.
    """
    assert plan.spill is not None
    agrees, limit = recipe.needs_agreement, plan.spill.memory_bytes
    held = most_held(plan.stages, plan.placement, plan.spill, sizes, rank, agrees=agrees)
    # Pages are whole; what the profile said of activations is not counted again here.
    if limit and held > limit * _ROUNDED:
        late = " with clipping, whose updates are late," if agrees else ""
        raise InputError(
            f"rank {rank} would hold {format_bytes(held)}{late} and the plan allows "
            f"{format_bytes(limit)}; plan again with this model and optimizer profiled, or with "
            "more memory_bytes"
        )


def _room_beside_freed(
    plan: Plan, recipe: Recipe, rank: int, sizes: StageBytes, residence: Residency
) -> float:
    """Bytes that a plan allows a rank beyond what it holds if freed memory of activations,
    gradients and optimizers is kept for what is like it, since new pages would cost a fault each;
    negative if it lacks them."""
    assert plan.spill is not None
    limit, agrees = plan.spill.memory_bytes, recipe.needs_agreement
    held = most_held(
        plan.stages, plan.placement, plan.spill, sizes, rank, agrees=agrees, keeps_freed=True
    )
    return limit - held - residence.most_made_bytes if limit else inf


def state_bytes(
    recipe: Recipe, holding: StageParameters, parameters: Sequence[nn.Parameter], stage: int
) -> int:
    """Bytes on the tier of what the optimizer will keep of a stage's parameters."""
    if recipe.optimizer is None or not holding.named:
        return 0
    for device in ("meta", "cpu"):
        # What cannot be weighed so is weighed behind the first update.
        with suppress(Exception):
            return _stepped_once(recipe, holding, parameters, stage, device)
    return 0


def _stepped_once(
    recipe: Recipe,
    holding: StageParameters,
    parameters: Sequence[nn.Parameter],
    stage: int,
    device: str,
) -> int:
    assert recipe.optimizer is not None
    own = {id(parameter) for parameter in parameters}
    named = [
        (name, nn.Parameter(torch.zeros_like(weight, device=device), weight.requires_grad))
        for name, weight in holding.named.items()
    ]
    travels = [
        copy
        for (_, copy), weight in zip(named, holding.named.values(), strict=True)
        if id(weight) in own
    ]
    place = holding.place
    optimizer = make_optimizer(
        recipe.optimizer,
        Parameters(named, place.stage, place.num_stages, holding.delay),
        f"stage {stage}",
    )
    for (_, copy), weight in zip(named, holding.named.values(), strict=True):
        take_gradient_dtype(weight, copy)  # what follows makes room for the gradients
        kind = gradient_dtype(copy)
        copy.grad = torch.zeros_like(copy, dtype=kind) if copy.requires_grad else None
    with torch.no_grad():
        optimizer.step()
    tensors: list[Tensor] = state_tensors(optimizer, travels)
    return SwapGroup("", tensors, stage).num_bytes


def queues_of(devices: Mapping[int, torch.device]) -> dict[int, DeviceQueue]:
    """The work of each rank, or member of one, on its device; none if none here needs to know about
    devices.

    Args:
        devices: by the numbers of seats.
    """
    if all(map(is_on_host, devices.values())):
        return {}
    return {rank: DeviceQueue.on(device) for rank, device in devices.items()}


def draw_all(
    layers: tuple[NamedLayer, ...],
    plan: Plan,
    devices: Mapping[int, torch.device],
    queues: Mapping[int, DeviceQueue],
    values: Values,
) -> None:
    """Give the layers of this process that are to be drawn their values, each on the way to its
    device: those on ``meta`` or, with ``init="per-layer"``, all.

    Args:
        layers: of the whole model.
        devices: of the ranks of this process, by their numbers.
        queues: their work, if any of them is an accelerator; none if layers are to stay in main
            memory, from where the members of groups take their parts.
        values: where they have them from.

    Raises:
        ModelError: a layer has no way to its values.
    """
    first = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    places = [
        (index, rank)
        for rank in devices
        for stage in stages_held(plan, rank)
        for index in range(first[stage], first[stage + 1])
    ]
    # In the model's order, since what is tied has the values of its first layer.
    for index, rank in sorted(places):
        if values.draw(index) and queues:
            module = layers[index].module
            with building(queues[rank]):
                place_parameters(module, devices[rank])
                place_buffers(module.modules(), devices[rank])


def place(
    setup: SwapSetup, stages: Mapping[RankSeat, dict[int, Stage]], queues: Mapping[int, DeviceQueue]
) -> dict[int, Residency]:
    """Move stages to their ranks' devices; where they come and go, to tiers.

    Args:
        stages: by the seat of who performs them.
        queues: by the numbers of seats.

    Returns:
        Of each rank of this process whose stages come and go, which are in memory.
    """
    if setup.plan.spill is None:
        place_all(setup.layout, stages, queues)
        return {}
    check_spillable(setup.plan, setup.recipe, setup.layout)
    if not queues:
        place_all(setup.layout, stages, queues)
    residences = {}
    for seat, own in stages.items():
        with building(queues.get(seat.number)):
            residences[seat.rank] = evicted(setup, seat.rank, own)
    if queues:  # what is left: buffers, and what is tied
        place_all(setup.layout, stages, queues)
    # The allocator is that of all of them.
    room_bytes = sum(residence.room_bytes for residence in residences.values())
    for residence in residences.values():
        residence.room_bytes = room_bytes
    return residences


def place_all(
    layout: Layout,
    stages: Mapping[RankSeat, Mapping[int, Stage]],
    queues: Mapping[int, DeviceQueue],
) -> None:
    """Move stages to their ranks' devices.

    What is written by one rank and read by another has been found by then: afterwards, ranks with
    the same buffer have copies of it.

    Args:
        stages: by the seat of who performs them.
        queues: by the numbers of seats.

    Raises:
        InputError: all ranks compute on the CPU, and the model is elsewhere.
    """
    if not queues:
        if accelerator_kind() is not None:
            _check_on_host(stage for own in stages.values() for stage in own.values())
        return
    for seat, own in stages.items():
        with building(queues[seat.number]):
            layout.place(seat.rank, own, seat.coordinate)
    for seat in stages:
        with building(queues[seat.number]):
            layout.place_copies(seat.rank, seat.coordinate)


def _check_on_host(stages: Iterable[Stage]) -> None:
    for stage in stages:
        for name, tensor in stage.state_dict().items():
            if not is_on_host(tensor.device):
                raise InputError(
                    f"{name!r} is on {tensor.device}, but the plan's ranks compute on the CPU: say "
                    f"where, as in devices='{tensor.device}', plan for accelerators, as in "
                    "Cluster.local(kind='gpu'), or move the model: model.cpu()"
                )


@contextmanager
def building(queue: DeviceQueue | None) -> Iterator[None]:
    """A context in which what is allocated belongs to a rank's own stream, which will free it when
    it makes something new in its place; the caller may use it afterwards."""
    if queue is None:
        yield
        return
    queue.begin(moments_of_caller([queue.device]))
    with queue.entered():
        yield
    taken_up((), queue.moment())


def local_rank() -> int:
    """Which of this host's processes this is, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))
