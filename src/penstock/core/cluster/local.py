"""This machine: its cores, its memory, and its accelerators.

NVIDIA's driver is asked about its GPUs, which takes it less than a second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple, get_args

from penstock.base.errors import InputError
from penstock.base.lazily import provider_of
from penstock.base.values import one_of, whole
from penstock.core.cluster.parts import MOST_DEVICES, Device, DeviceKind

_DRIVER_SECONDS = 10.0
_MIB = 2**20


class Gpu(NamedTuple):
    """A GPU, as the driver tells of it."""

    number: str
    uuid: str
    memory_bytes: int


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
            [program, *query], capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    there = [gpu for line in answer.stdout.splitlines() if (gpu := _gpu(line)) is not None]
    return there if visible is None else _chosen(there, visible)


def gpus_of(kind: str) -> list[Gpu]:
    """The same, if torch's accelerators of this kind are the driver's; else none."""
    return gpus() if kind == "cuda" else []


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


_ANSWER_SECONDS = 120.0


def devices(num_devices: int | None, kind: DeviceKind) -> tuple[tuple[Device, ...], int]:
    """As ``Cluster.local``: the devices, and the memory that they share (0 for accelerators)."""
    if num_devices is not None:
        num_devices = whole("num_devices", num_devices, 1, MOST_DEVICES)
    one_of("kind", kind, get_args(DeviceKind))
    if kind == "gpu":
        return _accelerators(num_devices), 0
    count = usable_cores() if num_devices is None else num_devices
    cores = tuple(Device(name=f"cpu{index}", kind="cpu") for index in range(count))
    return cores, host_memory_bytes()


def _accelerators(num_devices: int | None) -> tuple[Device, ...]:
    memories, known_to = _memories()
    wanted = num_devices or 1
    if len(memories) < wanted:
        plural = "s are" if wanted > 1 else " is"
        raise InputError(
            f"{wanted} accelerator{plural} asked for, but {known_to} of {len(memories)} here; take "
            'fewer, or kind="cpu"'
        )
    return tuple(
        Device(name=f"gpu{index}", memory_bytes=memory_bytes, kind="gpu")
        for index, memory_bytes in enumerate(memories[:num_devices])
    )


def _memories() -> tuple[list[int], str]:
    """The bytes of memory of each accelerator, and who knows of them, for people.

    Where torch is loaded, these are the ones on which it would let ranks compute: a driver may know
    of others, and another process not of what this one has told torch of.
    """
    here = accelerators_of_loaded_torch()
    if here is None:
        memories = [gpu.memory_bytes for gpu in gpus()] or memories_known_to_torch()
        return memories, "the driver's program and torch know"
    kind, count = here
    # In this order: who asks a device for its memory himself takes some of it.
    memories = [gpu.memory_bytes for gpu in gpus_of(kind)] if count else []
    if len(memories) != count:
        memories = memories_known_to_torch()
    if len(memories) != count:
        memories = memories_of_loaded_torch(kind, count)
    return memories, "torch knows"


def accelerators_of_loaded_torch() -> tuple[str, int] | None:
    """The kind of accelerator that torch knows in this process, and how many there are; ``None``
    where nobody has loaded torch."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "accelerator"):
        return None
    if not torch.accelerator.is_available():
        return "", 0
    accelerator = torch.accelerator.current_accelerator()
    # The module of a kind can often tell without beginning to use the devices.
    return (
        ("", 0)
        if accelerator is None
        else (accelerator.type, torch.get_device_module(accelerator).device_count())
    )


def memories_of_loaded_torch(kind: str, count: int) -> list[int]:
    """The same of the accelerators of this process, which another one may not know."""
    module: Any = sys.modules["torch"].get_device_module(kind)
    information = getattr(module, "mem_get_info", lambda _: (0, 0))
    return [int(information(index)[1]) for index in range(count)]


def memories_known_to_torch() -> list[int]:
    """The bytes of memory of each accelerator that torch knows, of whatever kind; 0 where torch
    cannot tell. Planning never imports torch, so a process of its own does, which takes seconds."""
    import subprocess  # takes long to load, for machines without accelerators

    command = [sys.executable, "-m", provider_of("device_memories")]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    # Whatever comes before is what others say while torch is loaded.
    last_line = answer.stdout.rstrip().rpartition("\n")[2]
    return [int(memory_bytes) for memory_bytes in last_line.split()]


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
