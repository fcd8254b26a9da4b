"""How much memory a device has, and how much of it is taken."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.engine.device.accelerators import is_on_host


class Gauge(Protocol):
    """Tells how much memory of a device is taken, and how much it has been at most."""

    def taken(self) -> int:
        """The bytes that are taken now."""
        ...

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        ...

    def forget_peak(self) -> None:
        """Begin anew with what is taken now."""
        ...


class AcceleratorGauge:
    """Asks torch's allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def taken(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


def gauge_of(device: torch.device) -> Gauge | None:
    """The gauge of a device; ``None`` where nobody counts, as on a CPU."""
    return None if is_on_host(device) else AcceleratorGauge(device)


def total_bytes(device: torch.device) -> int:
    """The memory of an accelerator; 0 where torch cannot tell."""
    information = getattr(torch.get_device_module(device), "mem_get_info", None)
    return 0 if information is None else int(information(device)[1])
