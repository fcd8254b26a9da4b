"""Data paths: how the bytes of a buffer get to a tier and back, wherever the buffer is.

A data path begins a transfer and returns at once. In main memory a thread reads and another one
writes. An accelerator copies by itself, on streams of its own, from and to pinned memory: to main
memory as a tier without any thread, to a disk by way of pinned memory, which the two threads fill
and empty.

What is needed first is read first, also if something else was asked for before: the next stage
often is, before this stage's optimizer state. Copies of an accelerator cannot be stopped once they
are asked for; there, what is more urgent comes beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from penstock.core.cluster.parts import Tier
from penstock.core.schedule.residence import PAGE
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.queue import taken_up
from penstock.engine.weights.buffers import MemoryBuffer, SwapGroup, TensorPlace
from penstock.engine.weights.movers import (
    IOThread,
    Moved,
    SideStreams,
    Transfer,
    at_once,
    pinned_bytes,
)
from penstock.engine.weights.tiers import Extent, PinnedSpace, Store, TierSpace, opened


class DataPath(ABC):
    """How the buffers of one rank get to its tier and back.

    Args:
        space: the tier in use.
        seconds: how long a transfer may take.

    Attributes:
        space, seconds: as given.
    """

    def __init__(self, space: TierSpace, seconds: float) -> None:
        self.space = space
        self.seconds = seconds

    @abstractmethod
    def put(self, extent: Extent, buffer: MemoryBuffer) -> None:
        """Write a buffer of main memory, and wait for that.

        Raises:
            FileError: it could not be written.
        """

    @abstractmethod
    def read(
        self, extent: Extent, buffer: MemoryBuffer, before: Moved | None, needed_at: int = 0
    ) -> Moved:
        """Begin to fill a buffer.

        Args:
            before: the last write of the extent, behind which it is read.
            needed_at: what is needed at a lower number comes first.
        """

    @abstractmethod
    def write(self, extent: Extent, buffer: MemoryBuffer) -> Moved:
        """Begin to write a buffer, behind all that this thread's current stream has been asked
        for."""

    @abstractmethod
    def gather(self, group: SwapGroup) -> Moved:
        """Begin to write tensors that lie anywhere, behind all that this thread's current stream
        has been asked for. Their memory is the group's until that is done, but in main memory it
        comes back one by one.

        Args:
            group: of bytes, with its extent.
        """

    @abstractmethod
    def peek(self, extent: Extent, start: int, memory: memoryview, written: Moved | None) -> None:
        """Read some pages of an extent into main memory, and wait for them; from any thread.

        Args:
            start: the first of the pages, in bytes from the beginning of the extent.
            written: the last write of the extent, behind which they are read.

        Raises:
            FileError: it could not be written or read, or is not what was written.
        """

    @abstractmethod
    def moments(self) -> list[torch.Event]:
        """When a buffer that nobody writes any more may be filled anew: now, on this thread's
        current stream; none where ops happen when they are called."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, behind what they were given, and let copies end."""

    @staticmethod
    def between(tier: Tier, device: torch.device, seconds: float) -> DataPath:
        """The data_path between a tier and the memory of a device.

        Raises:
            FileError: nothing can be kept in the tier.
        """
        if is_on_host(device):
            return HostDataPath(opened(tier), seconds)
        if tier.kind == "host":
            return PinnedDataPath(PinnedSpace(), seconds, SideStreams(device))
        return StagedDataPath(opened(tier), seconds, SideStreams(device))


class _ThreadedDataPath(DataPath):
    """To a tier that the host reads and writes, in a thread each."""

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__(store, seconds)
        self._store = store
        self._reader = IOThread("penstock-fetching")
        self._writer = IOThread("penstock-writing")

    def put(self, extent: Extent, buffer: MemoryBuffer) -> None:
        self._store.write(extent, buffer.view)

    def peek(self, extent: Extent, start: int, memory: memoryview, written: Moved | None) -> None:
        if written is not None:
            written.result()
        self._store.peek(extent, start, memory)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class HostDataPath(_ThreadedDataPath):
    """Between main memory and a tier."""

    def read(
        self, extent: Extent, buffer: MemoryBuffer, before: Moved | None, needed_at: int = 0
    ) -> Moved:
        reading = self._store.reading(extent, buffer.view)
        return self._reader.begin(reading, needed_at, before)

    def write(self, extent: Extent, buffer: MemoryBuffer) -> Moved:
        return self._writer.begin(self._store.writing(extent, buffer.view))

    def gather(self, group: SwapGroup) -> Moved:
        extent = _extent_of(group)
        buffer = MemoryBuffer(extent.num_bytes)
        for place, target in _targets(group, buffer.bytes):
            target.copy_(place.tensor)
            place.tensor.data = place.tensor.new_empty(0)
        return self.write(extent, buffer)

    def moments(self) -> list[torch.Event]:
        return []


class PinnedDataPath(DataPath):
    """Between an accelerator and main memory: copies on two streams, which wait for what they need
    by themselves. The host never sees the bytes, and waits for nothing."""

    def __init__(self, memory: PinnedSpace, seconds: float, streams: SideStreams) -> None:
        super().__init__(memory, seconds)
        self._memory = memory
        self._streams = streams
        self._needed_at = 0

    def put(self, extent: Extent, buffer: MemoryBuffer) -> None:
        self._memory.written_bytes += extent.num_bytes
        self._memory.part(extent).copy_(buffer.bytes)

    def read(
        self, extent: Extent, buffer: MemoryBuffer, before: Moved | None, needed_at: int = 0
    ) -> Moved:
        behind = [*buffer.free_after, None if before is None else before.result()]
        buffer.free_after.clear()
        self._memory.read_bytes += extent.num_bytes
        overtakes, self._needed_at = needed_at < self._needed_at, needed_at
        part = self._memory.part(extent)
        return _done(self._streams.bring(buffer.bytes, part, behind, overtakes=overtakes))

    def write(self, extent: Extent, buffer: MemoryBuffer) -> Moved:
        self._memory.written_bytes += extent.num_bytes
        behind = [self._streams.now()]
        return _done(self._streams.take_out(self._memory.part(extent), buffer.bytes, behind))

    def gather(self, group: SwapGroup) -> Moved:
        extent = _extent_of(group)
        self._memory.written_bytes += extent.num_bytes
        targets = _targets(group, self._memory.part(extent))
        return _done(self._streams.take_all_out([(to, place.tensor) for place, to in targets]))

    def peek(self, extent: Extent, start: int, memory: memoryview, written: Moved | None) -> None:
        moment = None if written is None else written.result()
        if moment is not None:
            moment.synchronize()
        memory[:] = self._memory.part(extent).numpy().data[start : start + len(memory)]

    def moments(self) -> list[torch.Event]:
        return [self._streams.now()]

    def close(self) -> None:
        self._streams.settle()


class StagedDataPath(_ThreadedDataPath):
    """Between an accelerator and a disk, by way of pinned memory: some for pieces of what comes,
    and some for what goes, as large as the largest of it."""

    def __init__(self, store: Store, seconds: float, streams: SideStreams) -> None:
        super().__init__(store, seconds)
        self._streams = streams
        self._coming, self._going = pinned_bytes(0), pinned_bytes(0)

    def read(
        self, extent: Extent, buffer: MemoryBuffer, before: Moved | None, needed_at: int = 0
    ) -> Moved:
        behind = [*buffer.free_after]
        buffer.free_after.clear()
        return self._reader.begin(self._read(extent, buffer, behind), needed_at, before)

    def _read(self, extent: Extent, buffer: MemoryBuffer, behind: list[torch.Event]) -> Transfer:
        moment = None
        for start, stop in self._store.pieces(extent):
            self._coming = _at_least(self._coming, stop - start)
            staging = self._coming[: stop - start]
            self._store.read_piece(extent, start, staging.numpy().data)
            moment = self._streams.bring(buffer.bytes[start:stop], staging, behind)
            moment.synchronize()  # what comes next needs the staging
            yield
        return moment

    def write(self, extent: Extent, buffer: MemoryBuffer) -> Moved:
        moment = self._streams.now()
        return self._writer.begin(at_once(partial(self._write, extent, buffer, moment)))

    def gather(self, group: SwapGroup) -> Moved:
        gathers = partial(self._gather, group, self._streams.now())
        return self._writer.begin(at_once(gathers))

    def _gather(self, group: SwapGroup, moment: torch.Event) -> torch.Event:
        extent = _extent_of(group)
        staging = self._buffer_for(extent)
        pairs = [(target, place.tensor) for place, target in _targets(group, staging)]
        taken_up([], moment)  # this thread's current stream, which nobody else uses
        copied = self._streams.take_all_out(pairs)
        copied.synchronize()
        self._store.write(extent, staging.numpy().data)
        return copied

    def _buffer_for(self, extent: Extent) -> Tensor:
        self._going = _at_least(self._going, extent.num_bytes)
        return self._going[: extent.num_bytes]

    def _write(self, extent: Extent, buffer: MemoryBuffer, moment: torch.Event) -> torch.Event:
        staging = self._buffer_for(extent)
        copied = self._streams.take_out(staging, buffer.bytes, [moment])
        copied.synchronize()
        self._store.write(extent, staging.numpy().data)
        return copied

    def moments(self) -> list[torch.Event]:
        return [self._streams.now()]


def _extent_of(group: SwapGroup) -> Extent:
    assert group.extent is not None
    return group.extent


def _targets(group: SwapGroup, memory: Tensor) -> Iterator[tuple[TensorPlace, Tensor]]:
    """Where each tensor of a group of bytes lies in memory for all of it."""
    for place in group.places:
        yield place, memory[place.offset : place.offset + place.tensor.numel()]


def _done(moment: torch.Event) -> Moved:
    moved = Moved()
    moved.set_result(moment)
    return moved


def _at_least(staging: Tensor, num_bytes: int) -> Tensor:
    """A pinned staging for so many bytes, as direct transfers want it: the given one if it is large
    enough."""
    if len(staging) >= num_bytes:
        return staging
    memory = pinned_bytes(num_bytes + PAGE)
    return memory[-memory.data_ptr() % PAGE :][:num_bytes]
