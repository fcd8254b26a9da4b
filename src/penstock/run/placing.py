"""Moving modules to the device of the rank that runs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.tracing.layers import CapturedLayer


def place_parameters(module: nn.Module, device: torch.device) -> None:
    """Move the parameters of a module, and of those inside it. They stay the objects that they are,
    so that whoever holds them (an optimizer, a layer that is tied to another one) still does."""
    for parameter in module.parameters():
        move_parameter(parameter, device)
    for part in module.modules():
        if isinstance(part, CapturedLayer):
            part.compute_on(device)


def place_buffers(module: nn.Module, device: torch.device, moved: dict[int, Tensor]) -> None:
    """Move the buffers of a module, and of those inside it.

    Args:
        moved: by ids of buffers, what stands in their place; for all modules of a rank, so that a
            buffer of several is still one.
    """
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = there = buffer.to(device)
                    moved[id(there)] = there
                part._buffers[name] = moved[id(buffer)]


def move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter, and its gradient if it has one, memory on another device."""
    gradient = parameter.grad
    if parameter.device != device:
        parameter.grad = None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)
