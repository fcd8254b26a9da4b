"""The accelerators of this process, whichever kind they are.

Only ``torch.accelerator`` and the module that torch has for a kind of device are asked, so
``cuda``, ``xpu``, ``npu`` and ``mps`` need no line of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch

# Of names that begin alike the longer one stands first.
_PEAK_FLOPS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
)


@cache  # it is asked with every minibatch
def accelerator_kind() -> str | None:
    """The kind of this process's accelerators, for example ``"cuda"``; ``None`` without any."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def accelerators() -> tuple[torch.device, ...]:
    """All accelerators of this process, in their order; empty without any."""
    kind = accelerator_kind()
    if kind is None:
        return ()
    return tuple(torch.device(kind, index) for index in range(torch.accelerator.device_count()))


def accelerator_name(device: torch.device) -> str:
    """What an accelerator is called, for people; its place where torch does not know."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name_of is None else str(name_of(device))


def peak_flops(device: torch.device) -> float | None:
    """The floating-point operations per second of a device by its maker's sheet, in matrices of 16
    bits without sparsity; ``None`` where that is not known."""
    if is_on_host(device):
        return None
    name = accelerator_name(device)
    return next((peak for part, peak in _PEAK_FLOPS if part in name), None)


def device_kinds() -> tuple[str, ...]:
    """The kinds of device that tensors of this process may be on."""
    kind = accelerator_kind()
    return ("cpu",) if kind is None else ("cpu", kind)


@cache
def can_pin() -> bool:
    """Whether this process's kind of accelerator has pinned memory; without, copies are slower."""
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def is_on_host(device: torch.device) -> bool:
    """Whether what happens there has happened when the call returns."""
    return device.type in ("cpu", "meta")


def generators_kept(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """A context after which the CPU's default generator, and those of some devices, are in the
    state that they were in before."""
    kind = accelerator_kind() or "cuda"
    numbers = sorted({device.index or 0 for device in devices if device.type == kind})
    return torch.random.fork_rng(devices=numbers, device_type=kind)


@contextmanager
def lent_generator(generator: torch.Generator) -> Iterator[None]:
    """A context in which the default generator of a device is in the state of another one of the
    same device, which moves on instead of it."""
    device = generator.device
    default = torch if device.type == "cpu" else torch.get_device_module(device)
    which = () if device.type == "cpu" else (device,)
    before = default.get_rng_state(*which)
    default.set_rng_state(generator.get_state(), *which)
    try:
        yield
    finally:
        generator.set_state(default.get_rng_state(*which))
        default.set_rng_state(before, *which)
