"""How a model settles on the devices of its ranks: which queue each has, and what is moved when.

Where all ranks compute in main memory nothing is moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

import torch

from penstock.base.errors import InputError
from penstock.engine.device.accelerators import accelerator_kind, is_on_host
from penstock.engine.device.queue import DeviceQueue, moments_of_caller, taken_up
from penstock.engine.model.spine import NamedLayer
from penstock.engine.run.layout import Layout
from penstock.engine.run.materialising import Values
from penstock.engine.run.placing import place_buffers, place_parameters
from penstock.engine.run.seating import Seat
from penstock.engine.stage.stage import Stage
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import stages_held


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


def place_all(
    layout: Layout, stages: Mapping[Seat, Mapping[int, Stage]], queues: Mapping[int, DeviceQueue]
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
            layout.place_twins(seat.rank, seat.coordinate)


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
