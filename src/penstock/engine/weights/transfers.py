"""Transfers between a rank's tier and its buffers, and tensors that are read from a tier meanwhile.

A checkpoint of stages that come and go is taken from the tier on which they lie anyway, without
coming into memory (``Shelved``). What lies there is to stay as it is until it is read, although
updates go on, so its extents are *held*: a group whose extent is held writes to another one. That
costs room on the tier, and no memory but a buffer of a mebibyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from penstock.base.errors import DeadlineError, ModelError
from penstock.core.schedule.residence import PAGE
from penstock.core.timing.spans import TransferKind
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.queue import taken_up
from penstock.engine.weights.buffers import BufferPool, MemoryBuffer, SwapGroup
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.movers import Moved
from penstock.engine.weights.tiers import Extent

NOW = -1
"""Before all places of ops: somebody is waiting for it."""


class Transfers:
    """Brings groups of tensors in and lets them go: one read and one write at a time, beside
    compute. Marks like [2] are those of ``residency``.

    On an accelerator the host does not wait: where this says "wait", the current stream of the
    thread that calls does, once the host has done its part of the transfer.

    Args:
        path: how bytes get to the rank's tier and back.
        buffers: memory for what comes.

    Attributes:
        path, buffers: as given.
    """

    def __init__(self, path: DataPath, buffers: BufferPool) -> None:
        self.path = path
        self.buffers = buffers
        buffers.reclaim = self.finish
        self._moved: list[tuple[TransferKind, int, int, float, float]] = []
        self._notes = is_on_host(buffers.device)
        self._stalls = False
        self._leaving: list[tuple[SwapGroup, MemoryBuffer]] = []
        self._held: list[Extent] = []
        """Extents that groups have left since somebody read there; free once nobody does."""

    def begin(self, group: SwapGroup, needed_at: int = NOW) -> None:
        """Take a buffer for a group and begin to fill it, unless it is here or coming.

        Args:
            needed_at: the place, among the rank's ops, of the first one that needs it: what is
                needed first comes first.
        """
        if group.buffer is not None or not group.places:
            return
        assert group.extent is not None
        buffer = group.buffer = self.buffers.take(group.num_bytes, group.whose)
        moved = self.path.read(group.extent, buffer, group.writing, needed_at)
        group.arriving = self.noted("read", group, moved)

    def noted(self, kind: TransferKind, group: SwapGroup, moved: Moved) -> Moved:
        """Note a transfer when it is done."""
        if not self._notes:
            return moved
        own, stretches = (kind, group.stage, group.microbatch), moved.stretches
        moved.add_done_callback(
            lambda _: self._moved.extend([(*own, *stretch) for stretch in stretches])
        )
        return moved

    def take_moved(self) -> list[tuple[TransferKind, int, int, float, float]]:
        """Transfers that have ended since this was asked last, as ``Harvest.moved`` has it; of main
        memory only, since an accelerator copies when it likes."""
        moved, self._moved = self._moved, []
        return moved

    def arrive(self, group: SwapGroup) -> bool:
        """Wait until a group that was begun is here, and point its tensors there. [3]

        Returns:
            Whether nobody had waited for that before.

        Raises:
            FileError: it could not be read, or is not what was written.
            DeadlineError: it does not come.
        """
        if group.arriving is not None:
            assert group.buffer is not None
            moment = self._await(group.arriving, group, "have not come from")
            taken_up([group.buffer.bytes], moment)
            group.arriving = None
            group.point()
            return True
        if group.is_parked:
            group.point()
        return False

    def _await(self, moved: Moved, group: SwapGroup, failing: str) -> torch.Event | None:
        """Wait for the host's part of a transfer; gives the moment of the rest, if there is any."""
        try:
            # Who did not answer once is not waited for again while all is taken down.
            return moved.result(0 if self._stalls else self.path.seconds)
        except FutureTimeoutError:
            self._stalls = True
            raise DeadlineError(
                f"the {group.whose} {failing} {self.path.space} within {self.path.seconds:g} s; "
                "raise deadline_seconds, or take a faster tier"
            ) from None

    def written(self, group: SwapGroup) -> None:
        """Wait until the tier has what was written of a group: its buffer may change now.

        Raises:
            FileError: it could not be written.
            DeadlineError: it takes too long.
        """
        taken_up([], self._written(group))

    def _written(self, group: SwapGroup) -> torch.Event | None:
        if group.writing is None:
            return None
        return self._await(group.writing, group, "were not written to")

    def write(self, group: SwapGroup, buffer: MemoryBuffer) -> None:
        """Begin to write a group; to another extent, if somebody still reads what lies in its own.

        Raises:
            FileError: the tier has no room for another one.
        """
        assert group.extent is not None
        if group.extent.is_held:
            held, group.extent = group.extent, self._other_extent(group.extent)
            self._held.append(held)
        group.writing = self.noted("write", group, self.path.write(group.extent, buffer))

    def _other_extent(self, extent: Extent) -> Extent:
        for other in self._held:
            if not other.is_held and other.num_bytes == extent.num_bytes:
                self._held.remove(other)
                other.whose = extent.whose
                return other
        return self.path.space.reserve(extent.whose, extent.num_bytes)

    def let_go(self, group: SwapGroup, *, writes: bool, keeps: bool) -> None:
        """Take a group's values away. [6]

        Args:
            writes: whether they have changed, and are to be written first.
            keeps: whether the buffer keeps them all the same, because they are needed next: between
                steps nobody may think that what has left could be changed.
        """
        buffer = group.buffer
        if buffer is None:
            return
        if group.arriving is not None:
            self.arrive(group)
        if writes:
            self.write(group, buffer)
        group.blank()
        if keeps:
            group.is_parked = True
            return
        group.buffer = None
        group.is_parked = False
        if writes:
            self._leaving.append((group, buffer))
            return
        self.give(buffer, group, self._written(group))  # what was kept here may be on its way

    def give(
        self, buffer: MemoryBuffer, group: SwapGroup, written: torch.Event | None = None
    ) -> None:
        """Let a buffer be used again that a group has left; on an accelerator, behind what has been
        asked for there.

        Args:
            written: when the tier has what was in it.

        Raises:
            ModelError: something still sees weights there.
        """
        if not buffer.is_held:
            buffer.free_after += self.path.moments()
            if written is not None:
                buffer.free_after.append(written)
            self.buffers.give(buffer)
            return
        self.buffers.drop(buffer)  # [8]
        if group.has_parameters:
            raise ModelError(
                f"something still sees the {group.whose} when they leave memory: a layer hands on "
                "a view of a parameter, or keeps one; let it hand on a copy (parameter.clone()), "
                "or put it into one stage with those that read it"
            )

    def finish(self) -> None:
        """Wait until what has left is written, and take its buffers back.

        Raises:
            FileError: it could not be written.
            DeadlineError: it takes too long.
        """
        leaving, self._leaving = self._leaving, []
        for group, buffer in leaving:
            try:
                written = self._written(group)
            except BaseException:
                self.buffers.drop(buffer)
                raise
            self.give(buffer, group, written)

    def take_back(self) -> bool:
        """As ``finish``, for what is written by now; gives whether anything is not."""
        leaving, self._leaving = self._leaving, []
        under_way = [
            (group, buffer)
            for group, buffer in leaving
            if group.writing is not None and not group.writing.done()
        ]
        self._leaving = [pair for pair in leaving if pair not in under_way]
        self.finish()
        self._leaving = under_way
        return bool(under_way)

    def close(self) -> None:
        """End what transfers, behind what it was given."""
        self.buffers.reclaim = None
        self.path.close()


_BUFFER = 1 << 20


@dataclass(frozen=True)
class Shelved:
    """A tensor as it lies on a tier. What it lies in must be held until it is read.

    Attributes:
        path: to the tier.
        extent: where it lies, with others.
        written: the last write of the extent.
        offset: where its first element is in the extent.
        dtype, shape, strides: as of the tensor.
    """

    path: DataPath
    extent: Extent
    written: Moved | None
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of its indices."""
        return torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous()

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes in the order in which they lie there; each piece is valid until the next.

        Raises:
            FileError: it could not be written or read, or is not what was written.
        """
        staging = MemoryBuffer(_BUFFER)
        start, stop = self.offset, self.offset + self.nbytes
        while start < stop:
            page = start // PAGE * PAGE
            length = min(_BUFFER, self.extent.num_bytes - page)
            self.path.peek(self.extent, page, staging.view[:length], self.written)
            end = min(stop, page + length)
            yield staging.view[start - page : end - page]
            start = end

    def tensor(self) -> Tensor:
        """All of it, in main memory, dense and in the order of its indices."""
        whole = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        size = self.nbytes // self.dtype.itemsize
        memory = whole.as_strided((size,), (1,)).view(torch.uint8).numpy().data
        done = 0
        for piece in self.pieces():
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return whole.contiguous()


def shelved(
    path: DataPath, groups: Iterable[SwapGroup], tensors: Mapping[str, Tensor]
) -> dict[str, Shelved]:
    """Of some tensors, those that lie in groups that are in memory, as they lie on the tier; their
    extents are held from now on.

    Args:
        path: to the tier.
        tensors: by name, with the memory of the groups or of anybody else.
    """
    by_address = {group.buffer.start: group for group in groups if group.buffer is not None}
    on_tier = {}
    for name, tensor in tensors.items():
        group = by_address.get(tensor.untyped_storage().data_ptr())
        if group is None or group.extent is None or group.buffer is None:
            continue
        group.extent.is_held = True
        offset = tensor.data_ptr() - group.buffer.start
        on_tier[name] = Shelved(
            path,
            group.extent,
            group.writing,
            offset,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
    return on_tier
