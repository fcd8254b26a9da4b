"""Moving modules to the device of the rank that runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from penstock.engine.device.crossing import give_memory, moved
from penstock.engine.tracing.layers import CapturedLayer


def place_parameters(module: nn.Module, device: torch.device) -> None:
    """Move the parameters of a module, and of those inside it. They stay the objects that they are,
    so that whoever holds them (an optimizer, a layer that is tied to another one) still does."""
    for parameter in module.parameters():
        move_parameter(parameter, device)
    for part in module.modules():
        if isinstance(part, CapturedLayer):
            part.compute_on(device)


def place_buffers(
    modules: Iterable[nn.Module], device: torch.device, but: Collection[int] = ()
) -> None:
    """Move the buffers of modules, not of those inside them.

    Args:
        modules: all of a rank, so that a buffer of several is still one.
        but: the ids of buffers that stay where they are.
    """
    placed: dict[int, Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in but:
                if id(buffer) not in placed:
                    placed[id(buffer)] = there = moved(buffer, device)
                    placed[id(there)] = there
                module._buffers[name] = placed[id(buffer)]


def move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter, and its gradient if it has one, memory on another device."""
    gradient = parameter.grad
    if parameter.device != device:
        parameter.grad = None
        give_memory(parameter, moved(parameter.data, device))
        parameter.grad = None if gradient is None else moved(gradient, device)
