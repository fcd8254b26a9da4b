"""This machine: its cores, its memory and its accelerators, and how fast its tiers are.

NVIDIA's driver is asked about its GPUs, which takes it less than a second.

A tier is as fast as training finds it that brings stages from there: while it is read, it is
written as well, pages are summed, and compute takes cores and memory from all of that. A tier that
has the machine for itself is faster, and plans by that speed promise steps that are too short.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from penstock.base.errors import FileError, InputError
from penstock.base.lazily import provider_of
from penstock.base.values import one_of, whole
from penstock.core.cluster.parts import MOST_DEVICES, Device, DeviceKind, Tier

_DRIVER_SECONDS = 10.0
_MIB = 2**20


class _Gpu(NamedTuple):
    """A GPU, as the driver tells of it."""

    number: str
    uuid: str
    memory_bytes: int


def gpus() -> list[_Gpu]:
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


def _gpu(line: str) -> _Gpu | None:
    """One line of the answer; ``None`` for a warning, or a device without a memory of its own."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3 or not cells[2].isdigit():
        return None
    return _Gpu(cells[0], cells[1], int(cells[2]) * _MIB)


def _chosen(there: list[_Gpu], visible: str) -> list[_Gpu]:
    """As CUDA reads the list: what comes after the first name that means nothing is not seen."""
    chosen: list[_Gpu] = []
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
    memories = [gpu.memory_bytes for gpu in gpus()] if count and kind == "cuda" else []
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


_SAMPLE_BYTES = 32 << 20
_PIECE_BYTES = 8 << 20
_WIDTH = 512
"""Of the matrices that are multiplied meanwhile: three of them, 3 MiB in all."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 20
_LEAST_SECONDS = 0.2
_COPIED_BYTES_PER_SECOND = 5e9
"""Of main memory as the tier of an accelerator, which copies by itself: what nobody measures."""
_Move = Callable[[int], object]
"""Moves the piece that begins at some byte of the sample."""


def measured_tier(tier: Tier, *, computes_on_host: bool = True) -> Tier:
    """A tier with its speeds; those that are written down stay.

    Args:
        tier: of a disk, a sample is written to its folder and read back, past the page cache where
            the file system can; of main memory, it is copied. It takes a fraction of a second on a
            fast disk.
        computes_on_host: whether ranks compute on this machine's cores, which then multiply
            matrices meanwhile; accelerators take nothing from a transfer.

    Raises:
        FileError: nothing can be written there.
    """
    if tier.read_bytes_per_second and tier.write_bytes_per_second:
        return tier
    read = write = _COPIED_BYTES_PER_SECOND
    beside = _computing() if computes_on_host else nullcontext()
    if tier.kind == "disk":
        read, write = _disk(tier.folder or tempfile.gettempdir(), beside)
    elif computes_on_host:
        read, write = _host(beside)
    return replace(
        tier,
        read_bytes_per_second=tier.read_bytes_per_second or read,
        write_bytes_per_second=tier.write_bytes_per_second or write,
    )


def _host(beside: AbstractContextManager[None]) -> tuple[float, float]:
    import numpy as np

    there = np.ones(_SAMPLE_BYTES, np.uint8)
    pieces = [np.ones(_PIECE_BYTES, np.uint8) for _ in range(2)]

    def read(offset: int) -> None:
        np.copyto(pieces[0], there[offset : offset + _PIECE_BYTES])
        _sum(pieces[0].data)

    def write(offset: int) -> None:
        _sum(pieces[1].data)
        np.copyto(there[offset : offset + _PIECE_BYTES], pieces[1])

    return _timed(read, write, beside)


def _disk(folder: str, beside: AbstractContextManager[None]) -> tuple[float, float]:
    try:
        file, name = tempfile.mkstemp(prefix=".penstock-", dir=folder)
    except OSError as error:
        raise FileError(
            f"cannot measure the tier in {folder}: {error.strerror}; make the folder, name another "
            "one, or write its speeds down"
        ) from None
    os.close(file)
    try:
        handle = _direct(name)
        try:
            return _speeds_of(handle, beside)
        finally:
            os.close(handle)
    except OSError as error:
        raise FileError(f"cannot measure the tier in {folder}: {error.strerror}") from None
    finally:
        os.unlink(name)


def _direct(name: str) -> int:
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            return os.open(name, os.O_RDWR | os.O_DIRECT)
    return os.open(name, os.O_RDWR)


def _speeds_of(handle: int, beside: AbstractContextManager[None]) -> tuple[float, float]:
    pieces = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(2)]
    for piece in pieces:
        piece[:] = os.urandom(4096) * (_PIECE_BYTES // 4096)

    def read(offset: int) -> None:
        os.preadv(handle, [pieces[0]], offset)
        _sum(memoryview(pieces[0]))

    def write(offset: int) -> None:
        _sum(memoryview(pieces[1]))
        os.pwritev(handle, [pieces[1]], offset)
        if offset + _PIECE_BYTES == _SAMPLE_BYTES:
            os.fdatasync(handle)

    for offset in range(0, _SAMPLE_BYTES, _PIECE_BYTES):  # what is there to be read
        write(offset)
    return _timed(read, write, beside)


def _sum(memory: memoryview) -> None:
    """Add up every page, as what guards tiers does in the thread of the transfer."""
    import numpy as np

    np.add.reduce(np.frombuffer(memory, np.uint64).reshape(-1, 512), axis=1)


def _timed(read: _Move, write: _Move, beside: AbstractContextManager[None]) -> tuple[float, float]:
    """Bytes per second of reading and of writing, both at once and beside something else."""
    threads = [_TransferThread(read), _TransferThread(write)]
    with beside:
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        while not all(thread.num_rounds >= _LEAST_ROUNDS for thread in threads) or (
            time.perf_counter() - begin < _LEAST_SECONDS
        ):
            if not all(thread.is_alive() for thread in threads):
                break
            time.sleep(0.005)
        for thread in threads:
            thread.ends = True
        for thread in threads:
            thread.join()
    for thread in threads:
        if thread.error is not None:
            raise thread.error
    return threads[0].speed, threads[1].speed


class _TransferThread(threading.Thread):
    """Moves the sample again and again until it is told to end.

    Attributes:
        ends: set it, and the thread ends behind its round.
        num_rounds: how often it has moved all of it.
        error: what the system said, if it could not.
    """

    def __init__(self, move: _Move) -> None:
        super().__init__(daemon=True)
        self._move = move
        self._seconds = 0.0
        self.ends = False
        self.num_rounds = 0
        self.error: OSError | None = None

    def run(self) -> None:
        """Move, and note how long that takes."""
        try:
            while self.num_rounds == 0 or (not self.ends and self.num_rounds < _MOST_ROUNDS):
                begin = time.perf_counter()
                for offset in range(0, _SAMPLE_BYTES, _PIECE_BYTES):
                    self._move(offset)
                self._seconds += time.perf_counter() - begin
                self.num_rounds += 1
        except OSError as error:
            self.error = error

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.num_rounds * _SAMPLE_BYTES / max(self._seconds, 1e-9)


@contextmanager
def _computing() -> Iterator[None]:
    """Multiply matrices meanwhile, on all cores that numpy takes."""
    import numpy as np

    left, right, product = (np.ones((_WIDTH, _WIDTH), np.float32) for _ in range(3))
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            np.matmul(left, right, out=product)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
