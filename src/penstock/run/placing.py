"""Moving a model to the devices of its ranks, stage by stage: it never lies on one as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.model.spine import NamedLayer
from penstock.schedule import Schedule


def place_model(
    layers: Sequence[NamedLayer],
    sizes: Iterable[int],
    placement: Schedule,
    devices: Mapping[int, torch.device],
) -> None:
    """Move the model's own parameters and buffers to the devices of the ranks that hold them.

    Parameters stay the objects that they are, so that whoever holds them (an optimizer, a layer
    that is tied to another one) still does. What several ranks hold goes to the first one's device;
    the others have twins.

    Args:
        layers: of the model.
        sizes: how many layers each stage has.
        placement: which rank has which stage.
        devices: of the ranks of this process, by their numbers.
    """
    remaining = iter(layers)
    stages = [[next(remaining).module for _ in range(size)] for size in sizes]
    moved: dict[int, Tensor] = {}
    for rank, device in sorted(devices.items()):
        for stage in placement.stages_of[rank]:
            for layer in stages[stage]:
                for module in layer.modules():
                    move_module(module, device, moved)


def move_module(module: nn.Module, device: torch.device, moved: dict[int, Tensor]) -> None:
    """Move what a module, without those inside it, holds; what was moved before stays there.

    Args:
        moved: by ids of parameters and buffers, what stands in their place.
    """
    for parameter in module._parameters.values():
        if parameter is not None and id(parameter) not in moved:
            moved[id(parameter)] = parameter
            move_parameter(parameter, device)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            there = moved.get(id(buffer))
            if there is None:
                there = moved[id(buffer)] = buffer.to(device)
                moved[id(there)] = there
            module._buffers[name] = there


def move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter, and its gradient if it has one, memory on another device."""
    gradient = parameter.grad
    if parameter.device != device:
        parameter.grad = None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)
