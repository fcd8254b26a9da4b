"""The device and the software of a measurement, and leaving the model as it was."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import nn

from penstock.base.errors import InputError
from penstock.engine.device.accelerators import accelerator_name, generators_kept, is_on_host
from penstock.engine.model import tree
from penstock.engine.model.replay import put_back, saved_buffers


def device_of(model: nn.Module, inputs: Any) -> torch.device:
    """The device that a model and its inputs are on.

    Raises:
        InputError: the model and its inputs are on several, or on the meta device.
    """
    tensors = chain(model.parameters(), model.buffers(), tree.tensors(inputs))
    devices = {tensor.device for tensor in tensors}
    if "meta" in {device.type for device in devices}:
        raise InputError(
            "the model or its inputs are on the meta device, which computes nothing, so there is "
            'nothing to measure; give values to both: model.to_empty(device="cpu") is enough, and '
            "inputs of torch.randn or torch.randint"
        )
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(
            f"the model and its inputs are on several devices ({names}); move both to one of them"
        )
    return devices.pop()


def name_of(device: torch.device) -> str:
    """The name of a device, for people."""
    return f"{platform.machine()} CPU" if device.type == "cpu" else accelerator_name(device)


def software(device: torch.device) -> dict[str, str]:
    """Versions of the software that measures on a device."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if not is_on_host(device):
        versions[device.type] = str(getattr(torch.version, device.type, "unknown"))
    return {**versions, "penstock": version("penstock")}


@contextmanager
def undisturbed(model: nn.Module, num_threads: int, device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers, random state and threads afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = saved_buffers(model.modules())
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with (
            generators_kept([device]),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        put_back(buffers)
