"""Activations of one rank that leave memory between a forward and its backward.

The life of what a microbatch keeps at a stage; the numbers stand at the lines below:

1. While the forward runs, autograd is given a handle for each tensor that it saves.
2. When the stash leaves, the memory behind the handles is written to the tier, each piece once
   however many tensors look at it. Weights and buffers stay.
3. What the stage holds itself, the leaves in which its graph ends, gives up its values as well:
   a backward needs no more than their shape.
4. The memory is free once it is written, which the next leave or fetch waits for.
5. The backward waits until the stash is back, in one buffer, and the handles look there.

Nothing is kept for the next microbatch, whose sizes may be others: what has come back is given to
the system behind its backward, or to the allocator of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.device.activation_meter import KeptMemory, Saved
from penstock.engine.device.crossing import PLAIN_TENSORS, span
from penstock.engine.weights.buffers import BufferPool, SwapGroup, nothing_like
from penstock.engine.weights.data_paths import DataPath
from penstock.engine.weights.tiers import Extent
from penstock.engine.weights.transfers import Transfers

Key = tuple[int, int]
"""(stage, unit): whose activations."""
Keep = Callable[[Key, Iterable[Tensor]], "KeptMemory | None"]
"""Counts memory as long as what it gives is held."""
_ALIGNED = 64


class _SavedPlace(NamedTuple):
    """Where a saved tensor lies: in which piece of a group, and how far behind its beginning."""

    group: SwapGroup
    piece: int
    distance: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The tensor, in the buffer in which the group is now."""
        buffer = self.group.buffer
        assert buffer is not None and self.group.arriving is None  # the backward has waited
        offset = self.group.places[self.piece].offset + self.distance
        return buffer.tensor(offset, self.dtype, self.size, self.stride)


class Handle:
    """Held by autograd in the place of a tensor that may leave."""

    __slots__ = ("place", "saved")

    def __init__(self, saved: Saved) -> None:
        self.saved: Saved | None = saved
        self.place: _SavedPlace | None = None

    def unpack(self) -> Tensor:
        """The tensor, wherever it is."""
        if self.place is not None:
            return self.place.tensor()
        assert self.saved is not None
        return self.saved.unpack()


@dataclass
class _ActivationStash:
    """The activations that a microbatch keeps at a stage.

    Attributes:
        handles: of what autograd has saved, until it leaves.
        group: what has left.
        counted: counts its memory where that is not autograd's.
    """

    handles: list[Handle] = field(default_factory=list)
    group: SwapGroup | None = None
    counted: KeptMemory | None = None


class Offloading:
    """Lets activations of one rank leave, and brings them back.

    Args:
        path: to the rank's tier and back.
        device: where the rank computes.
        keep: counts the memory that they take.

    Attributes:
        buffers: memory for what leaves and comes.
        transfers: what is on its way.
    """

    def __init__(self, path: DataPath, device: torch.device, keep: Keep) -> None:
        self.buffers = BufferPool(inf, device)
        self.transfers = Transfers(path, self.buffers)
        self._keep = keep
        self._stashes: dict[Key, _ActivationStash] = {}
        self._leaving: list[SwapGroup] = []
        self._extents: list[Extent] = []

    def around(self, key: Key) -> Callable[[Saved], Handle]:
        """For a forward: from what autograd would save to what it saves. [1]"""
        handles = self._stashes.setdefault(key, _ActivationStash()).handles

        def handle(saved: Saved) -> Handle:
            handles.append(Handle(saved))
            return handles[-1]

        return handle

    def leave(self, key: Key, held: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        """Let a stash go, and begin to write it.

        Args:
            held: what the stage keeps besides.
            own: weights and buffers, which stay.

        Raises:
            FileError: the tier has no room, or what left before could not be written.
        """
        self._finish()
        stash = self._stashes[key]
        handles, stash.handles = stash.handles, []
        stay = {tensor.untyped_storage().data_ptr() for tensor in own if _has_memory(tensor)}
        pieces = _MemoryStretches(handles, self.buffers.device, stay)
        if not pieces.tensors:
            return
        # [2]
        stage, unit = key
        group = stash.group = SwapGroup(
            f"activations of microbatch {unit} of stage {stage}", pieces.tensors, stage, unit
        )
        group.extent = self._extent(group)
        group.num_bytes = group.extent.num_bytes
        stash.counted = self._keep(key, group.tensors)
        pieces.hand_over(group)
        _give_up(held, pieces.addresses, handles)
        del pieces
        group.writing = self.transfers.noted("write", group, self.transfers.path.gather(group))
        self._leaving.append(group)

    def _finish(self) -> None:
        leaving, self._leaving = self._leaving, []
        for group in leaving:
            self.transfers.written(group)  # [4]
            group.drop()
        for stash in self._stashes.values():
            if stash.group in leaving:
                stash.counted = None

    def _extent(self, group: SwapGroup) -> Extent:
        """Room on the tier: some that is free, if it is not twice as large as need be."""
        for extent in sorted(self._extents, key=lambda extent: extent.num_bytes):
            if group.num_bytes <= extent.num_bytes <= 2 * group.num_bytes:
                self._extents.remove(extent)
                extent.whose = group.whose
                return extent
        return self.transfers.path.space.reserve(group.whose, group.num_bytes)

    def fetch(self, key: Key) -> None:
        """Begin to bring a stash back.

        Raises:
            FileError: what has left could not be written.
        """
        self._finish()
        stash = self._stashes[key]
        if stash.group is not None:
            self.transfers.begin(stash.group)
            assert stash.group.buffer is not None
            stash.counted = self._keep(key, [stash.group.buffer.bytes])

    def arrive(self, key: Key) -> bool:
        """Wait until a stash is back. [5]

        Returns:
            Whether it was not known to be here before.

        Raises:
            FileError: it could not be read, or is not what was written.
            DeadlineError: it does not come.
        """
        group = self._stashes[key].group
        return group is not None and self.transfers.arrive(group)

    def release(self, key: Key) -> None:
        """The backward is done: nobody needs the stash any more."""
        self._drop(self._stashes.pop(key))

    def forget(self) -> None:
        """The minibatch has ended, well or not: drop what is left of it."""
        with suppress(Exception):  # what failed has been told
            self._finish()
        for stash in self._stashes.values():
            with suppress(Exception):
                if stash.group is not None:
                    self.transfers.arrive(stash.group)
            self._drop(stash)
        self._stashes.clear()

    def _drop(self, stash: _ActivationStash) -> None:
        group, stash.counted = stash.group, None
        if group is None:
            return
        group.drop()
        if group.buffer is not None:
            self.buffers.drop(group.buffer)
            group.buffer = group.arriving = None
        assert group.extent is not None
        self._extents.append(group.extent)

    def close(self) -> None:
        """End the transfers, and give back the tier and the memory."""
        self.forget()
        self.transfers.close()
        self.buffers.clear()
        self.transfers.path.space.close()


class _MemoryStretches:
    """The memory behind saved tensors, each stretch once.

    Args:
        handles: of the tensors; those that cannot leave are passed over.
        device: where the rank computes; what lies elsewhere stays.
        stay: addresses of what stays.

    Attributes:
        tensors: the bytes of each stretch.
        addresses: of the storages behind them.
    """

    def __init__(
        self, handles: Iterable[Handle], device: torch.device, stay: Collection[int]
    ) -> None:
        self._moving: dict[int, list[tuple[Handle, Tensor]]] = {}
        for handle in handles:
            tensor = _movable(handle, device)
            if tensor is not None:
                address = tensor.untyped_storage().data_ptr()
                if address not in stay:
                    self._moving.setdefault(address, []).append((handle, tensor))
        self.addresses = set(self._moving)
        self._starts = [
            min(map(_first_byte, seen)) // _ALIGNED * _ALIGNED
            for seen in ([tensor for _, tensor in pairs] for pairs in self._moving.values())
        ]
        self.tensors = [
            _bytes_of(pairs[0][1], start, max(_last_byte(tensor) for _, tensor in pairs))
            for pairs, start in zip(self._moving.values(), self._starts, strict=True)
        ]

    def hand_over(self, group: SwapGroup) -> None:
        """Let the handles look into a group of these tensors, and hold their own no more."""
        for piece, (pairs, start) in enumerate(
            zip(self._moving.values(), self._starts, strict=True)
        ):
            for handle, tensor in pairs:
                distance = _first_byte(tensor) - start
                shape = tensor.dtype, tensor.size(), tensor.stride()
                handle.place = _SavedPlace(group, piece, distance, *shape)
                handle.saved = None
        self._moving.clear()


def _movable(handle: Handle, device: torch.device) -> Tensor | None:
    """The tensor of a handle, if it may leave."""
    saved = handle.saved
    if saved is None or not saved.is_intact:  # who overwrites it is told by the backward
        return None
    tensor = saved.tensor
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not plain or tensor.device != device or not tensor.numel():
        return None
    return None if tensor.is_conj() or tensor.is_neg() else tensor.detach()


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _last_byte(tensor: Tensor) -> int:
    """The end of its last element."""
    return _first_byte(tensor) + span(tensor) * tensor.itemsize


def _bytes_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def _give_up(held: Iterable[Tensor], left: Collection[int], handles: Iterable[Handle]) -> None:
    """Let leaves of a graph have no values. [3]

    Args:
        held: what the stage keeps of a microbatch.
        left: addresses of the memory that leaves.
        handles: of all that autograd has saved.
    """
    needed = {
        handle.saved.tensor.untyped_storage().data_ptr()
        for handle in handles
        if handle.saved is not None and _has_memory(handle.saved.tensor)
    }
    for tensor in held:
        if not tensor.requires_grad or not tensor.is_leaf or not _has_memory(tensor):
            continue
        # Their gradients get strides by theirs: those of dense ones need no more than the shape.
        address = tensor.untyped_storage().data_ptr()
        if tensor.is_contiguous() and (address in left or address not in needed):
            tensor.data = nothing_like(tensor)
