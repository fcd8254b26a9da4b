"""Where a model can be spread: ``Device``, ``Link``, ``Cluster``."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import InputError
from penstock.values import Value


class Device(Value, frozen=True, kw_only=True):
    """One place that runs a rank's ops, one at a time.

    Attributes:
        name: for people, for example ``cpu0``.
        memory_bytes: what a rank may use here; 0 means not limited.
        speed: relative to the machine the profile was measured on (2.0 is twice as fast).
    """

    name: str
    memory_bytes: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise InputError(f"device {self.name!r}: memory_bytes is {self.memory_bytes} < 0")
        if not self.speed > 0:
            raise InputError(f"device {self.name!r}: speed is {self.speed}, but must be > 0")


class Link(Value, frozen=True, kw_only=True):
    """How neighbouring devices are joined.

    Attributes:
        latency_seconds: time before the first byte arrives.
        bytes_per_second: bandwidth after that; 0 means so high that it does not count (for
            example threads that share memory).
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.bytes_per_second < 0:
            raise InputError("a link's latency and bandwidth must be ≥ 0")

    def seconds(self, num_bytes: float) -> float:
        """Time from sending ``num_bytes`` until they have arrived."""
        transfer = num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return self.latency_seconds + transfer


class Cluster(Value, frozen=True, kw_only=True):
    """Devices in a row, every neighbouring pair joined by the same kind of link.

    Attributes:
        devices: rank i of a plan runs on device i.
        link: between any two of them.
        memory_bytes: memory the devices share (cores of one host), or 0 when each has its own.
    """

    devices: tuple[Device, ...]
    link: Link = Link()
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("a Cluster needs at least one device")
        if self.memory_bytes < 0:
            raise InputError(f"cluster memory_bytes is {self.memory_bytes}, but must be ≥ 0")

    @classmethod
    def local(cls, num_devices: int | None = None) -> Cluster:
        """The CPU cores of this machine that this process may use, sharing its memory.

        Args:
            num_devices: use this many workers instead of one per core.

        Raises:
            InputError: ``num_devices`` is below 1.
        """
        count = _usable_cores() if num_devices is None else num_devices
        if count < 1:
            raise InputError(f"num_devices is {count}, but must be ≥ 1")
        devices = tuple(Device(name=f"cpu{index}") for index in range(count))
        return cls(devices=devices, memory_bytes=_memory_bytes())


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    """This host's memory or the container's limit, whichever is less; 0 where neither is told."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return physical
    return min(physical, limit)
