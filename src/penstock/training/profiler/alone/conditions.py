"""The conditions of a measurement: one microbatch as a sample, the device with its clock, the
software; and leaving the model as it was.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import is_whole
from penstock.engine.device.accelerators import accelerator_name, generators_kept, is_on_host
from penstock.engine.device.queue import timed_event
from penstock.engine.model import microbatches, tree
from penstock.engine.model.replay import put_back, saved_buffers
from penstock.engine.run.recipe import Loss


@dataclass(frozen=True)
class Sample:
    """The inputs of one microbatch, and what the loss takes beside the output.

    Raises:
        InputError: a loss without targets or targets without a loss, or inputs without rows.
    """

    inputs: Any
    targets: Any
    loss: Loss | None

    def __post_init__(self) -> None:
        if (self.loss is None) != (self.targets is None):
            lacks = "loss" if self.loss is None else "targets"
            raise InputError(
                f"give loss and targets together, or neither: {lacks}=… is missing, as in "
                "profile(model, inputs, loss=cross_entropy, targets=targets), with the inputs and "
                "the targets of one microbatch"
            )
        rows = microbatches.num_rows(self.inputs, "inputs")
        others = {len(tensor) if tensor.dim() else 1 for tensor in tree.tensors(self.targets)}
        if len(others) == 1 and rows not in others:  # else a loss may know what they are
            raise InputError(
                f"inputs have {rows} rows, but targets have {others.pop()}; give those of the same "
                "microbatch"
            )

    @cached_property
    def num_rows(self) -> int:
        """The number of rows of the microbatch."""
        return microbatches.num_rows(self.inputs, "inputs")

    def of_sizes(self, sizes: Iterable[int]) -> list[Sample]:
        """Samples of the first rows, smaller than this one, in ascending order.

        Raises:
            InputError: there are not so many.
        """
        given = {size: self.of(size) for size in sizes}
        return [given[size] for size in sorted(given) if size != self.num_rows]

    def of(self, size: int) -> Sample:
        """A sample of the first ``size`` rows.

        Raises:
            InputError: there are not so many.
        """
        if not is_whole(size) or not 1 <= size <= self.num_rows:
            raise InputError(
                f"sizes: {size!r} rows cannot be taken from a sample of {self.num_rows}; give a "
                "larger sample, or smaller sizes"
            )
        taken = [
            tree.replace(Tensor, lambda tensor: tensor[:size], value)
            for value in (self.inputs, self.targets)
        ]
        return replace(self, inputs=taken[0], targets=taken[1])


class Clock(Protocol):
    """Takes stamps, and tells afterwards how far they are apart.

    Attributes:
        tick_seconds: the least that it can tell apart.
    """

    tick_seconds: float

    def now(self) -> Any:
        """A stamp of this moment."""
        ...

    def settle(self) -> None:
        """Wait until everything that was stamped has happened."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """The seconds between two stamps; call ``settle`` first."""
        ...


class WallClock:
    """The clock of a CPU, which has done its work when a call returns."""

    def __init__(self) -> None:
        self.tick_seconds = time.get_clock_info("perf_counter").resolution

    def now(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class AcceleratorClock:
    """The clock of an accelerator: events in its queue, read when the queue has run empty.

    Waiting after each layer instead would add the time of a launch to each of them.

    Args:
        device: whose current stream the work is queued in.
    """

    tick_seconds = 0.5e-6  # as the best documented of them says of its events

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        return timed_event(torch.accelerator.current_stream(self._device))

    def settle(self) -> None:
        torch.accelerator.synchronize(self._device)

    def seconds(self, start: torch.Event, stop: torch.Event) -> float:
        return float(start.elapsed_time(stop)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock by which a device's work is timed."""
    return WallClock() if is_on_host(device) else AcceleratorClock(device)


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
