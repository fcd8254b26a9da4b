"""Buffers: aligned memory into which stages come, used again and again.

Memory that is mapped anew costs a fault for each page when it is first touched; in the steady state
of training no buffer is new. What is free counts towards the budget, too, since the system does not
have it back; free buffers of other sizes go when room is needed.

On an accelerator a buffer is given back while streams still work on it, and taken again at once: it
remembers what is to happen before anybody writes to it.
"""

from __future__ import annotations

import mmap
import threading
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.base.errors import RunError
from penstock.base.units import format_bytes
from penstock.engine.device.accelerators import HOST, is_on_host
from penstock.engine.device.queue import moments_of_caller, taken_up
from penstock.engine.weights.tiers import whole_pages


class MemoryBuffer:
    """A piece of memory of whole pages.

    Args:
        num_bytes: at least one page.
        device: where it is.

    Attributes:
        num_bytes: its size.
        view: the memory, for reading and writing; empty on an accelerator.
        bytes: the same as a tensor.
        free_after: moments on an accelerator before which nobody may write to it.
    """

    def __init__(self, num_bytes: int, device: torch.device = HOST) -> None:
        self.num_bytes = num_bytes
        self.free_after: list[torch.Event] = []
        if is_on_host(device):
            memory = mmap.mmap(-1, num_bytes)
            self.view = memoryview(memory)
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self.view = memoryview(b"")
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            # The allocator gives memory that its own stream is not done with.
            self.free_after += moments_of_caller([device]).values()
        self._alone = self._num_holders()

    def claim(self) -> None:
        """Before this thread's current stream writes to it: let that come behind all that others
        still do here."""
        for moment in self.free_after:
            taken_up([self.bytes], moment)
        self.free_after.clear()

    def tensor(
        self, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        """The tensor that lies at an offset, which is one of its type's alignment."""
        end = self.num_bytes - (self.num_bytes - offset) % dtype.itemsize
        return self.bytes[offset:end].view(dtype).as_strided(size, stride)

    @property
    def start(self) -> int:
        """The address of its first byte."""
        return self.bytes.data_ptr()

    @property
    def is_held(self) -> bool:
        """Whether any tensor but its own still sees this memory."""
        return self._num_holders() > self._alone

    def _num_holders(self) -> int:
        storage = self.bytes.untyped_storage()
        count: int = torch._C._storage_Use_Count(storage._cdata)
        return count


class SpareBuffers:
    """Free buffers that ranks which take turns hand on to each other; any thread may ask.

    Args:
        limit_bytes: the most that it keeps.
    """

    def __init__(self, limit_bytes: float) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[MemoryBuffer]] = defaultdict(list)
        self._kept = 0

    def take(self, size: int) -> MemoryBuffer | None:
        """A buffer of exactly this size, if there is one."""
        with self._lock:
            if not self._free[size]:
                return None
            self._kept -= size
            return self._free[size].pop()

    def put(self, buffer: MemoryBuffer) -> None:
        """Take a buffer that nobody uses; what is beyond the limit goes back to the system."""
        with self._lock:
            if self._kept + buffer.num_bytes <= self._limit_bytes:
                self._kept += buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)


class BufferPool:
    """The buffers of one rank, within a budget.

    Args:
        budget_bytes: the most that all of them together may have, free ones included.
        device: where they are.

    Attributes:
        budget_bytes, device: as given.
        peak_bytes: the most that they have had.
        used_peak_bytes: the most that has been in use at once.
        spare: where free buffers may come from and go to, if other ranks have some.
        reclaim: waits for what is on its way out of buffers, and gives these back.
    """

    def __init__(self, budget_bytes: float, device: torch.device = HOST) -> None:
        self.budget_bytes = budget_bytes
        self.device = device
        self._free: dict[int, list[MemoryBuffer]] = defaultdict(list)
        self._mapped = self._used = 0
        self.peak_bytes = self.used_peak_bytes = 0
        self.spare: SpareBuffers | None = None
        self.reclaim: Callable[[], None] | None = None

    def take(self, num_bytes: int, whose: str) -> MemoryBuffer:
        """A buffer for so many bytes; what is in it is anything.

        Raises:
            RunError: the budget has no room for it.
        """
        size = max(whole_pages(num_bytes), whole_pages(1))
        self._wait_for_room(size)
        if self._free[size]:
            buffer = self._free[size].pop()
        else:
            self._make_room(size, whose)
            spare = None if self.spare is None else self.spare.take(size)
            buffer = spare or MemoryBuffer(size, self.device)
            self._mapped += size
        self._used += size
        self.peak_bytes = max(self.peak_bytes, self._mapped)
        self.used_peak_bytes = max(self.used_peak_bytes, self._used)
        return buffer

    def _wait_for_room(self, size: int) -> None:
        """A leaving group keeps its buffer until it is written, unless the room is needed sooner:
        gradients that no update has used are written and come back within one visit, where a
        rank keeps its only stage."""
        if self._used + size > self.budget_bytes and self.reclaim is not None:
            self.reclaim()

    def _make_room(self, size: int, whose: str) -> None:
        for other in sorted((size for size, free in self._free.items() if free), reverse=True):
            while self._mapped + size > self.budget_bytes and self._free[other]:
                self._free[other].pop()
                self._mapped -= other
        if self._mapped + size > self.budget_bytes:
            raise RunError(
                f"no room for {format_bytes(size)} of {whose}: of the "
                f"{format_bytes(self.budget_bytes)} for stages that come and go, "
                f"{format_bytes(self._used)} are in use; plan with more memory_bytes"
            )

    def count(self, num_bytes: int, whose: str = "") -> None:
        """Let memory that is no buffer count as used, or, if negative, as free again.

        Raises:
            RunError: the budget has no room for it.
        """
        if num_bytes > 0:
            self._wait_for_room(num_bytes)
            self._make_room(num_bytes, whose)
        self._mapped += num_bytes
        self._used += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._mapped)
        self.used_peak_bytes = max(self.used_peak_bytes, self._used)

    def give(self, buffer: MemoryBuffer) -> None:
        """Take a buffer back."""
        self._used -= buffer.num_bytes
        self._free[buffer.num_bytes].append(buffer)

    def drop(self, buffer: MemoryBuffer) -> None:
        """Let a buffer go for good: somebody may still see it, so it must not be used again."""
        self._used -= buffer.num_bytes
        self._mapped -= buffer.num_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes that all of them have now, free ones included, and what else is counted."""
        return self._mapped

    def lend(self) -> None:
        """Hand all free buffers on to whoever needs them; this rank stands still for a while."""
        if self.spare is None:
            return
        for free in self._free.values():
            for buffer in free:
                self._mapped -= buffer.num_bytes
                self.spare.put(buffer)
            free.clear()

    def clear(self) -> None:
        """Give all free memory back to the system."""
        self._mapped -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()
