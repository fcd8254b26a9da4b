"""A value as one block of bytes, and back.

::

    | kind | number | header size | header (pickled) | pad | tensor | pad | tensor | …

A block carries its own description, so shapes and dtypes may change with every message and no dry
run is needed. Mostly they do not change: both ends remember the last layout of an edge, so that
only a new one is pickled and unpickled. Tensors start at multiples of 64 bytes, so that the
receiver can use the block itself as their memory.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock import tree

PREFIX = struct.Struct("<qqq")
_ALIGNMENT = 64
_LONGEST_TEXT_BYTES = 2048

Bytes = npt.NDArray[np.uint8]


class BlockKind(IntEnum):
    """What a block holds."""

    VALUE = 0
    GROW = 1
    """No value: the next block is larger, of the size given in place of the number."""
    FAILURE = 2
    """No value: the sender has failed, the header says why."""
    CLOSED = 3
    """No value: the sender has left for good, the header says why."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a header."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Layout:
    """How a value lies in a block: everything but the bytes of its tensors.

    Attributes:
        header: the value with a slot for each tensor, pickled.
        structure, leaves: the same, taken apart.
        offsets: bytes from the block's start to each tensor.
        num_bytes: of the whole block.
        signature: equal for values of equal layout; ``None`` if that takes pickling to tell.
    """

    header: bytes
    structure: tree.Structure
    leaves: Sequence[Any]
    offsets: Sequence[int]
    num_bytes: int
    signature: Any = field(default=None)

    @classmethod
    def read(cls, header: bytes, signature: Any = None) -> Layout:
        """The layout that a header tells."""
        leaves, structure = tree.flatten(pickle.loads(header))
        offset, offsets = _aligned(PREFIX.size + len(header)), []
        for slot in leaves:
            if isinstance(slot, _Slot):
                offsets.append(offset)
                offset += _aligned(slot.num_bytes)
        return cls(header, structure, leaves, offsets, offset, signature)


def describe(value: Any, last: Layout | None = None) -> tuple[Layout, list[Tensor]]:
    """The layout of a value, which is ``last`` if nothing has changed; and its tensors."""
    found: list[Tensor] = []
    signature = _signature(value, found)
    if signature is not None and last is not None and last.signature == signature:
        return last, [tensor.detach() for tensor in found]
    skeleton = tree.replace(Tensor, lambda tensor: _Slot(tuple(tensor.shape), tensor.dtype), value)
    layout = Layout.read(pickle.dumps(skeleton), signature)
    return layout, [tensor.detach() for tensor in tree.tensors(value)]


def _signature(value: Any, found: list[Tensor]) -> Any:
    """Something cheap that is equal only for values of equal layout, or ``None``.

    ``found`` takes the tensors in order. What is equal and yet not the same (``1`` and ``True``,
    ``0.0`` and ``-0.0``) must not look alike, so only a few types are dealt with.
    """
    if isinstance(value, Tensor):
        found.append(value)
        return value.shape, value.dtype
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return kind, value
    if kind is dict and all(type(key) is str for key in value):
        parts, keys = value.values(), tuple(value)
    elif kind in (tuple, list):
        parts, keys = value, ()
    else:
        return None
    inner = [_signature(part, found) for part in parts]
    return None if None in inner else (kind, keys, inner)


def pack(number: int, layout: Layout, tensors: list[Tensor]) -> Tensor:
    """A block with a value, as a tensor of bytes."""
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    write_header(memory_of(block), number, layout)
    write_tensors(places(block, layout), tensors)
    return block


def write_header(memory: memoryview, number: int, layout: Layout) -> None:
    """Write all of a block but its tensors."""
    data = PREFIX.pack(BlockKind.VALUE, number, len(layout.header)) + layout.header
    memory[: len(data)] = data


def places(block: Tensor, layout: Layout) -> list[Tensor | None]:
    """Where in a block each tensor belongs; ``None`` for an empty one."""
    slots = [slot for slot in layout.leaves if isinstance(slot, _Slot)]
    return [
        block[offset : offset + slot.num_bytes].view(slot.dtype).view(slot.shape)
        if slot.num_bytes
        else None
        for slot, offset in zip(slots, layout.offsets, strict=True)
    ]


def write_tensors(places: list[Tensor | None], tensors: list[Tensor]) -> None:
    """Copy tensors to their places."""
    for place, tensor in zip(places, tensors, strict=True):
        if place is not None:
            place.copy_(tensor)


def pack_notice(kind: BlockKind, number: int = 0, text: str = "") -> Tensor:
    """A block without a value."""
    data = short(text)
    block = torch.empty(PREFIX.size + len(data), dtype=torch.uint8)
    memory_of(block)[:] = PREFIX.pack(kind, number, len(data)) + data
    return block


def short(text: str) -> bytes:
    """A text, cut to what fits in a notice: at most 2048 bytes of UTF-8."""
    # Cut between two letters; and a text that cannot be encoded must not hide the failure it tells.
    data = text.encode(errors="replace")[:_LONGEST_TEXT_BYTES]
    return data.decode(errors="ignore").encode()


def read_prefix(memory: memoryview) -> tuple[BlockKind, int, bytes]:
    """(kind, number, header) of a block."""
    kind, number, size = PREFIX.unpack_from(memory)
    return BlockKind(kind), number, bytes(memory[PREFIX.size : PREFIX.size + size])


def recognise(header: bytes, last: Layout | None) -> Layout:
    """The layout that a header tells, which is ``last`` if it is the same."""
    return last if last is not None and last.header == header else Layout.read(header)


def unpack(block: Bytes, layout: Layout) -> Any:
    """The value in a block; its tensors use the block as their memory and keep it alive.

    Every tensor counts its own versions: overwriting one must not make autograd think that another
    one was, which two views of one tensor would.
    """
    offsets = iter(layout.offsets)
    leaves = [
        _tensor(block, leaf, next(offsets)) if isinstance(leaf, _Slot) else leaf
        for leaf in layout.leaves
    ]
    return tree.unflatten(leaves, layout.structure)


def _tensor(block: Bytes, slot: _Slot, offset: int) -> Tensor:
    count = math.prod(slot.shape)
    if not count:
        return torch.empty(slot.shape, dtype=slot.dtype)
    flat = torch.frombuffer(block, dtype=slot.dtype, count=count, offset=offset)
    return flat.view(slot.shape)


def memory_of(block: Tensor) -> memoryview:
    """The bytes of a block, to read and write."""
    return memoryview(block.numpy())  # type: ignore[arg-type]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
