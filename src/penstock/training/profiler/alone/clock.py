"""Clocks: the time of a host, and the time of an accelerator that works behind the host's back."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.queue import timed_event


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
