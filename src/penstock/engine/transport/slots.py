"""Slots of shared memory: one holds one message, from when it is sent until it is no longer used.

The sender owns a slot and fills it; the receiver's tensors lie in it; when the last of them is
dropped, the slot is the sender's again. So there are as many slots as messages have been under way
or in use at once, and no more. A slot begins with a byte that says whose it is, which both
processes see: giving a slot back costs neither side a system call.

Marks like [3] are the steps of a hand-over, which ``shared_memory`` describes.

Their memory is segments without a name. These cannot outlive the processes that use them, however
they end, and are no files in ``/dev/shm``, which is 64 MB in a container unless somebody asked for
more.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import RunError
from penstock.engine.transport import packing
from penstock.engine.transport.base import Edge
from penstock.engine.transport.packing import BlockLayout, BlockPlace, BlockPrefix, Buffer

_REMEDIES = {
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this host: raise fs.file-max",
    errno.EFBIG: "it is larger than this process may make a file: raise the limit (ulimit -f)",
}
_MORE_MEMORY = "use smaller microbatches, or give the container or machine more memory"


def allocate(num_bytes: int, rank: int, purpose: str) -> tuple[mmap.mmap, int]:
    """A new segment, and the file descriptor by which another process can map it, to be closed.

    All of it is there at once: a lack of memory is an error here, not a SIGBUS later.

    Args:
        rank: who asks, for errors.
        purpose: what for, for errors.

    Raises:
        RunError: there is no such memory here, or not enough.
    """
    if not hasattr(os, "memfd_create"):
        raise RunError(
            f"rank {rank}: {sys.platform} has no memfd_create, which shared memory needs; "
            "use transport='process-group'"
        )
    try:
        descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return _map(descriptor, num_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise _refused(error, num_bytes, rank, purpose) from error


def attach(descriptor: int, num_bytes: int, rank: int, purpose: str) -> mmap.mmap:
    """Map another process's segment; the descriptor is closed.

    Raises:
        RunError: this process cannot map so much.
    """
    try:
        # Only what is really there may be mapped: touching anything behind it would be a SIGBUS.
        if not 0 < num_bytes <= os.fstat(descriptor).st_size:
            raise OSError(errno.EINVAL, "the segment is smaller than announced")
        return _map(descriptor, num_bytes)
    except OSError as error:
        raise _refused(error, num_bytes, rank, purpose) from error
    finally:
        os.close(descriptor)


def _map(descriptor: int, num_bytes: int) -> mmap.mmap:
    # Mapping all pages now takes a third of the time of one fault per page later.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, num_bytes, flags, trackfd=False)
    return mmap.mmap(descriptor, num_bytes, flags)


def _refused(error: OSError, num_bytes: int, rank: int, purpose: str) -> RunError:
    remedy = _REMEDIES.get(error.errno or 0, _MORE_MEMORY)
    return RunError(
        f"rank {rank} could not get {num_bytes:,} bytes of shared memory {purpose} "
        f"({error.strerror or error}); {remedy}, or use transport='process-group'"
    )


_BLOCK_START = 64
"""Where the block begins in a slot, in bytes; the state has a cache line of its own."""

_PAGE_BYTES = mmap.PAGESIZE
_IDLE_STEPS = 16
_MOST_LAYOUTS = 8
"""Of which a slot remembers where their tensors lie."""


class SlotState(IntEnum):
    """Whose a slot is."""

    FREE = 0
    """The sender may fill it."""
    WAITING = 1
    """Filled; the receiver has not asked for messages of this edge so far."""
    TAKEN = 2
    """The receiver has, and will free it."""


_FREE, _WAITING, _TAKEN = (int(state) for state in SlotState)  # members take longer to look up


class Slot:
    """The sender's end of a slot.

    Attributes:
        index: its number in the pool, by which the receiver knows it.
        capacity_bytes: the size of the largest block that fits.
        tag, number: those of the message that it held last.
    """

    def __init__(self, index: int, memory: mmap.mmap) -> None:
        self.index = index
        self.capacity_bytes = len(memory) - _BLOCK_START
        self._state = memoryview(memory)[:1]
        self._bytes = memoryview(memory)[_BLOCK_START:]
        # What is made in inference mode, in which one may evaluate, could not be written after it.
        with torch.inference_mode(False):
            self._block = torch.frombuffer(memory, dtype=torch.uint8, offset=_BLOCK_START)
        self._layout: BlockLayout | None = None
        self._note = b""
        self._places: list[Tensor | None] = []
        self._places_of: dict[BlockLayout, list[Tensor | None]] = {}
        self._idle_steps = 0
        self.tag = self.number = 0

    @property
    def state(self) -> int:
        """A ``SlotState``."""
        return self._state[0]

    @property
    def is_free(self) -> bool:
        """Whether it may be filled."""
        return self._state[0] == _FREE

    def fill(
        self, tag: int, number: int, layout: BlockLayout, tensors: list[Tensor], note: bytes = b""
    ) -> None:
        """Write a message, which the receiver must then be told of."""
        if layout is not self._layout:
            self._layout, self._places = layout, self._places_for(layout)
            packing.write_description(self._bytes, layout)
            packing.write_prefix(self._bytes, number, layout, note)
            self._note = note
        elif note != self._note:
            packing.write_prefix(self._bytes, number, layout, note)
            self._note = note
        # [3] The mark is written last: who sees it finds a whole message.
        packing.write_tensors(self._places, tensors)
        self._idle_steps, self.tag, self.number = 0, tag, number
        self._state[0] = _WAITING

    def _places_for(self, layout: BlockLayout) -> list[Tensor | None]:
        """Where the tensors of a layout lie: finding that out takes as long as all else that a
        message does, and where ranks have several edges to each other, layouts take turns."""
        if layout not in self._places_of:
            if len(self._places_of) == _MOST_LAYOUTS:
                self._places_of.clear()
            with torch.inference_mode(False):
                self._places_of[layout] = packing.places(self._block, layout)
        return self._places_of[layout]

    def take_back(self) -> None:
        """The receiver could not be told of the message."""
        self._state[0] = _FREE

    def end_step(self) -> bool:
        """Whether it has not been needed for many steps."""
        self._idle_steps += 1
        return self._idle_steps > _IDLE_STEPS and self.is_free


class SlotPool:
    """All slots for messages from this rank to one other."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """That all slots hold together."""
        return sum(slot.capacity_bytes for slot in self._slots)

    def free(self, num_bytes: int) -> Slot | None:
        """The smallest free slot for a block of a size."""
        for slot in self._slots:
            if slot.capacity_bytes >= num_bytes and slot._state[0] == _FREE:
                return slot
        return None

    def make(self, memory: mmap.mmap) -> Slot:
        """A slot with a new index, to be added when the receiver knows of it."""
        self._num_made += 1
        return Slot(self._num_made, memory)

    def add(self, slot: Slot) -> None:
        """Use a slot from now on."""
        self._slots.append(slot)
        self._slots.sort(key=lambda slot: slot.capacity_bytes)

    def largest_free(self) -> Slot | None:
        """The largest slot that is free."""
        free = (slot for slot in reversed(self._slots) if slot.is_free)
        return next(free, None)

    def num_waiting(self, tag: int, lowest: int) -> int:
        """Messages of an edge for which the receiver has not asked so far.

        Those below the ``lowest`` number are discarded and do not count, lest they be in the way of
        others before the receiver has seen them.
        """
        return sum(
            slot.tag == tag and slot.number >= lowest and slot.state == SlotState.WAITING
            for slot in self._slots
        )

    def end_step(self) -> list[Slot]:
        """The slots that have not been needed for many steps."""
        return [slot for slot in self._slots if slot.end_step()]

    def remove(self, slot: Slot) -> None:
        """Take a free slot out; its memory goes with it."""
        self._slots.remove(slot)


def segment_size(num_bytes: int) -> int:
    """Bytes of a segment for a block: a little more, since the next one may be a little larger."""
    needed = num_bytes + _BLOCK_START
    step = max(_PAGE_BYTES, 1 << max(0, needed.bit_length() - 4))
    return -(-needed // step) * step


class RemoteSlot:
    """The receiver's end of a slot.

    Attributes:
        block: what the sender has written.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._state = memoryview(memory)[:1]
        self._bytes = memoryview(memory)[_BLOCK_START:]
        self.block: Buffer = np.frombuffer(memory, dtype=np.uint8)[_BLOCK_START:]

    def prefix(self, edge: Edge) -> BlockPrefix:
        """The beginning of the message in it, which came over an edge.

        Raises:
            RunError: there is none.
        """
        return packing.read_prefix(edge, self._bytes)

    def take(self) -> None:
        """Let the sender send more on the message's edge."""
        self._state[0] = _TAKEN  # [6]

    def give_back(self) -> None:
        """Nothing in it will be used."""
        self._state[0] = _FREE

    def note(self) -> bytes:
        """The note of the message in it."""
        return packing.read_note(self._bytes)

    def lend(self, places: Sequence[BlockPlace]) -> list[Tensor]:
        """The tensors of one message; when the last of them is dropped the slot is given back."""
        if len(places) == 1 and places[0].array_type is not None:
            # The loan itself as an array of the tensor's shape: half the time of the other way.
            loan = places[0].array(_Loan, self.block)
            loan.state, loan.process = self._state, os.getpid()
            return [torch.from_numpy(loan)]
        loan = self.block.view(_Loan)
        loan.state, loan.process = self._state, os.getpid()
        return [place.read_end(loan) for place in places]


class _Loan(np.ndarray[Any, Any]):
    """Memory of one message, which the tensors made of it keep alive.

    Attributes:
        state: the slot's.
        process: the one that it was lent to.
    """

    # A finalizer of ``weakref`` does the same in half as much time again, for every message.
    state: memoryview
    process: int = 0  # as in views of it, which are no loans

    def __del__(self) -> None:
        # [7] A forked child drops its copies of the tensors, but its parent still uses them.
        if os.getpid() == self.process:
            self.state[0] = _FREE
