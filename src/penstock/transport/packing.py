"""A value as one block of bytes, and back.

::

    | kind | microbatch | header size | header (pickled) | pad | tensor | pad | tensor | …

A block carries its own description, so shapes and dtypes may change with every message and no dry
run is needed. Tensors start at multiples of 64 bytes, so that the receiver can use the block itself
as their memory.
"""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from penstock import tree

PREFIX = struct.Struct("<qqq")
_ALIGNMENT = 64


class BlockKind(IntEnum):
    """What a block holds."""

    VALUE = 0
    GROW = 1
    """No value: the next block is larger, of the size given in place of the microbatch."""
    FAILURE = 2
    """No value: the sender has failed, the header says why."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a header."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def describe(value: Any) -> tuple[bytes, list[Tensor]]:
    """The header of a value, which is the value with a slot for each tensor; and its tensors."""
    skeleton = tree.replace(Tensor, lambda tensor: _Slot(tuple(tensor.shape), tensor.dtype), value)
    return pickle.dumps(skeleton), [tensor.detach() for tensor in tree.tensors(value)]


def block_size(header: bytes, tensors: list[Tensor]) -> int:
    """Bytes that ``pack`` needs."""
    return _aligned(PREFIX.size + len(header)) + sum(_aligned(_num_bytes(t)) for t in tensors)


def pack(microbatch: int, header: bytes, tensors: list[Tensor]) -> Tensor:
    """A block with a value, as a tensor of bytes."""
    block = torch.empty(block_size(header, tensors), dtype=torch.uint8)
    _write(block, 0, PREFIX.pack(BlockKind.VALUE, microbatch, len(header)) + header)
    offset = _aligned(PREFIX.size + len(header))
    for tensor in tensors:
        size = _num_bytes(tensor)
        if size:
            target = block[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
        offset += _aligned(size)
    return block


def pack_notice(kind: BlockKind, number: int = 0, text: str = "") -> Tensor:
    """A block without a value."""
    # Cut between two letters; and a text that cannot be encoded must not hide the failure it tells.
    data = text.encode(errors="replace")[:2048].decode(errors="ignore").encode()
    block = torch.empty(PREFIX.size + len(data), dtype=torch.uint8)
    _write(block, 0, PREFIX.pack(kind, number, len(data)) + data)
    return block


def read_prefix(block: Tensor) -> tuple[BlockKind, int, bytes]:
    """(kind, microbatch or number, header) of a block."""
    memory = _memory(block)
    kind, number, size = PREFIX.unpack_from(memory)
    return BlockKind(kind), number, bytes(memory[PREFIX.size : PREFIX.size + size])


def unpack(block: Tensor, header: bytes) -> Any:
    """The value in a block; its tensors are views of the block."""
    offset = _aligned(PREFIX.size + len(header))

    def tensor_in(slot: _Slot) -> Tensor:
        nonlocal offset
        size = math.prod(slot.shape) * slot.dtype.itemsize
        if not size:
            return torch.empty(slot.shape, dtype=slot.dtype)
        data = block[offset : offset + size]
        offset += _aligned(size)
        return data.view(slot.dtype).view(slot.shape)

    return tree.replace(_Slot, tensor_in, pickle.loads(header))


def _write(block: Tensor, offset: int, data: bytes) -> None:
    _memory(block)[offset : offset + len(data)] = data


def _memory(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
