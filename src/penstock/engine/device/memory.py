"""How much memory a device has and how much of it is taken, and what becomes of freed memory.

``python -m penstock.engine.device.memory`` tells how much memory each accelerator of this machine
has, for those who do not import torch themselves.

A training step frees and takes the same large blocks thousands of times. With its default settings
glibc returns them each time, and every first touch of a returned page is a fault: measured at up to
1.7 times the step time for small recurrent layers, about 1.05 for the demo's GPT.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.engine.device.accelerators import accelerators, is_on_host

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_NEVER = 2**31 - 1
_RETURNED = 2**20


def keep_freed_pages() -> bool:
    """Tell glibc to keep freed memory for reuse, until somebody says otherwise.

    Returns:
        Whether this system's allocator took the settings; elsewhere nothing happens.
    """
    return _set(_LARGEST_MMAP_THRESHOLD, _NEVER)


def return_freed_pages() -> bool:
    """Tell glibc to give large blocks back to the system as soon as they are freed: who has a
    budget to keep must not miss what the allocator keeps. Without a threshold of its own, glibc
    raises it to the largest block that was ever freed, and keeps a model's worth of blocks.

    Returns:
        Whether this system's allocator took the settings; elsewhere nothing happens.
    """
    return _set(_RETURNED, _RETURNED)


class KeptPages:
    """Freed memory that is kept for reuse as far as there is room for it: what is kept lies
    scattered, and may come to several times what was ever in use.

    Args:
        room_bytes: what the process may have more than when this is made, beside ``others``.
        others: tells how much is taken, now, that is no business of the allocator's.
    """

    def __init__(self, room_bytes: float, others: Callable[[], int]) -> None:
        self._others = others
        self._give_back()  # what is free already would count as taken
        self._most = _resident_bytes() - others() + room_bytes
        keep_freed_pages()

    def mind(self) -> None:
        """Give all that is free back to the system, if the process has too much."""
        if _resident_bytes() - self._others() > self._most:
            self._give_back()

    @staticmethod
    def _give_back() -> None:
        if _mallopt() is not None:
            ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """What this process has of the machine's memory; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _set(mmap_threshold: int, trim_threshold: int) -> bool:
    mallopt = _mallopt()
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, mmap_threshold), (_M_TRIM_THRESHOLD, trim_threshold))
    accepted = [mallopt(option, value) == 1 for option, value in settings]
    return all(accepted)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None
    return mallopt


class Gauge:
    """Tells how much memory of an accelerator is taken, and how much it has been at most."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def taken(self) -> int:
        """The bytes that are taken now."""
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        return torch.accelerator.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        """Begin anew with what is taken now."""
        torch.accelerator.reset_peak_memory_stats(self._device)


def gauge_of(device: torch.device) -> Gauge | None:
    """The gauge of a device; ``None`` where nobody counts, as on a CPU."""
    return None if is_on_host(device) else Gauge(device)


def total_bytes(device: torch.device) -> int:
    """The memory of an accelerator; 0 where torch cannot tell."""
    information = getattr(torch.get_device_module(device), "mem_get_info", None)
    return 0 if information is None else int(information(device)[1])


def device_memories() -> list[int]:
    """The bytes of memory of each accelerator that torch knows here; 0 where it cannot tell."""
    return [total_bytes(device) for device in accelerators()]


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, device_memories())) + "\n")
