"""What this machine has: cores, memory, and the GPUs that NVIDIA's driver knows of."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple, get_args

from penstock.cluster.checks import MOST_DEVICES
from penstock.cluster.parts import Device, DeviceKind
from penstock.errors import InputError
from penstock.values import one_of, whole

_ANSWER_SECONDS = 10.0
_MIB = 2**20


class Gpu(NamedTuple):
    """What the driver says of one GPU."""

    number: str
    uuid: str
    memory_bytes: int


def devices(num_devices: int | None, kind: DeviceKind) -> tuple[tuple[Device, ...], int]:
    """As ``Cluster.local``: the devices, and the memory that they share (0 for GPUs)."""
    if num_devices is not None:
        num_devices = whole("num_devices", num_devices, 1, MOST_DEVICES)
    one_of("kind", kind, get_args(DeviceKind))
    if kind == "gpu":
        return _gpus(num_devices), 0
    count = usable_cores() if num_devices is None else num_devices
    cores = tuple(Device(name=f"cpu{index}", kind="cpu") for index in range(count))
    return cores, host_memory_bytes()


def _gpus(num_devices: int | None) -> tuple[Device, ...]:
    visible = gpus()
    if len(visible) < (num_devices or 1):
        raise InputError(
            f"{num_devices or 1} GPUs are asked for, but nvidia-smi shows {len(visible)} here; "
            'take fewer, or kind="cpu"'
        )
    return tuple(
        Device(name=f"gpu{index}", memory_bytes=gpu.memory_bytes, kind="gpu")
        for index, gpu in enumerate(visible[:num_devices])
    )


def gpus() -> list[Gpu]:
    """The GPUs that this process may use; none where NVIDIA's driver is not, or does not answer.

    ``CUDA_VISIBLE_DEVICES`` is obeyed; its numbers are taken in the order of ``nvidia-smi``, which
    is CUDA's under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # An answer takes the driver up to a second; who hides all GPUs need not wait for it.
    if program is None or visible == "":
        return []
    import subprocess  # takes long to load, for machines without GPUs

    query = ["--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    there = [gpu for line in answer.stdout.splitlines() if (gpu := _gpu(line)) is not None]
    return there if visible is None else _chosen(there, visible)


def _gpu(line: str) -> Gpu | None:
    """One line of the answer; ``None`` for a warning, or a device without a memory of its own."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3 or not cells[2].isdigit():
        return None
    return Gpu(cells[0], cells[1], int(cells[2]) * _MIB)


def _chosen(there: list[Gpu], visible: str) -> list[Gpu]:
    """As CUDA reads the list: what comes after the first name that means nothing is not seen."""
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        match = next(
            (gpu for gpu in there if name == gpu.number or (name and gpu.uuid.startswith(name))),
            None,
        )
        if match is None:
            break
        chosen.append(match)
    return chosen


def usable_cores() -> int:
    """Cores that this process may keep busy: those it may run on, or what its container is granted
    of them, whichever is less."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # there is no such limit
        return cores


def host_memory_bytes() -> int:
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


def host_identity() -> str:
    """Equal for processes under one kernel that see one network, the host's name first."""
    parts = [os.uname().nodename if hasattr(os, "uname") else "host"]
    # Without /proc, the name has to do.
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return " ".join(parts)
