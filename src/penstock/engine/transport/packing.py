"""A value as one block of bytes, and back.

::

    | kind | number | note | description size | description | pad | tensor | pad | tensor | …

A block carries its own description (``wire``), so shapes and dtypes may change with every message
and no dry run is needed. Mostly they do not change: both ends remember the last layout of an edge,
so that only a new one is encoded and decoded. Tensors start at multiples of 64 bytes, so that the
receiver can use the block itself as their memory. Of what a block says, nothing is believed: who
reads it checks that its tensors lie within it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.base.errors import RunError
from penstock.engine.transport import wire
from penstock.engine.transport.base import NOTE_BYTES, Edge, Noted
from penstock.engine.transport.wire import Codec, Garbled

PREFIX = struct.Struct(f"<qq{NOTE_BYTES}sq")
_ALIGNMENT = 64
_LONGEST_TEXT_BYTES = 2048
_SIGNED = frozenset({tuple, list, dict})
_IN_SIGNATURES = frozenset({type(None), bool, int, str})
_NO_NOTE = bytes(NOTE_BYTES)
_NOTE_START = struct.calcsize("<qq")
_NOTE_PLACE = slice(_NOTE_START, _NOTE_START + NOTE_BYTES)

_MOST_ARRAY_DIMENSIONS = 32
_ARRAY_TYPES = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8,
        torch.bool, torch.complex64,
    )
}  # fmt: skip

Buffer = npt.NDArray[np.uint8]
A = TypeVar("A", bound=npt.NDArray[Any])
Read = Callable[[Sequence["BlockPlace"]], list[Tensor]]
"""Gives the tensors that lie at some places of a block."""


class BlockKind(IntEnum):
    """The kinds of blocks."""

    VALUE = 0
    GROW = 1
    """No value: the next block is larger, of the size given in place of the number."""
    FAILURE = 2
    """No value: the sender has failed, the text says why."""
    CLOSED = 3
    """No value: the sender has left for good, the text says why."""


class BlockPrefix(NamedTuple):
    """The beginning of a block; ``text`` is a notice's, or the description of a value."""

    kind: BlockKind
    number: int
    note: bytes
    text: bytes


class BlockPlace(NamedTuple):
    """Where a tensor lies in a block.

    Attributes:
        offset: bytes from the block's start.
        num_values: how many numbers it has.
        num_bytes: how much memory they take.
        shape, strides: in numbers; without strides, its dimensions lie in their order.
        dtype: the tensor's.
        array_type: the same in numpy; ``None`` if it has none, or the tensor cannot be an array.
        array_strides: strides in bytes; ``None`` if there are none.
    """

    offset: int
    num_values: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    array_type: np.dtype[Any] | None
    array_strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, slot: wire.TensorNode, offset: int) -> Self:
        """Where a tensor lies that is described so."""
        dtype = wire.DTYPES[slot.dtype]
        count = math.prod(slot.shape)
        is_array = count and len(slot.shape) <= _MOST_ARRAY_DIMENSIONS
        array_type = _ARRAY_TYPES.get(dtype) if is_array else None
        strides = tuple(stride * dtype.itemsize for stride in slot.strides) or None
        own = offset, count, slot.num_bytes, slot.shape, slot.strides
        return cls(*own, dtype, array_type, strides)

    def write_end(self, block: Tensor) -> Tensor | None:
        """The tensor in a block that is being written; ``None`` if it is empty."""
        if not self.num_values:
            return None
        return self._shaped(block[self.offset : self.offset + self.num_bytes].view(self.dtype))

    def read_end(self, block: Buffer) -> Tensor:
        """The tensor in a block that has come."""
        if not self.num_values:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(block, dtype=self.dtype, count=self.num_values, offset=self.offset)
        return self._shaped(flat)

    def array(self, kind: type[A], block: Buffer) -> A:
        """The tensor in a block that has come, as an array of a class."""
        assert self.array_type is not None
        return kind(self.shape, self.array_type, block, self.offset, self.array_strides)

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides) if self.strides else flat.view(self.shape)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """How a value lies in a block: everything but the bytes of its tensors.

    Attributes:
        description: as it travels.
        node: the same, read.
        places: where its tensors lie.
        num_bytes: the size of the whole block.
        signature: equal for values of equal layout; ``None`` if that takes describing to tell.
        number: tells it from the other layouts of the same sender; 0 at the receiver.
        is_list: whether the value is a list of tensors.
        wanting: which of its tensors want a gradient.
    """

    description: bytes
    node: wire.Node
    places: Sequence[BlockPlace]
    num_bytes: int
    signature: Any = field(default=None)
    number: int = 0
    is_list: bool = False
    wanting: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, description: bytes, codec: Codec, signature: Any = None, number: int = 0
    ) -> BlockLayout:
        """The layout that a description tells.

        Raises:
            Garbled: it is no description.
        """
        node, slots = codec.read(description)
        offset, places = _aligned(PREFIX.size + len(description)), []
        for slot in slots:
            place = BlockPlace.of(slot, offset)
            places.append(place)
            offset += _aligned(place.num_bytes)
        is_list = (
            isinstance(node, wire.SeriesNode)
            and node.kind == "list"
            and all(isinstance(part, wire.TensorNode) for part in node.parts)
        )
        wanting = tuple(index for index, slot in enumerate(slots) if slot.requires_grad)
        return cls(description, node, places, offset, signature, number, is_list, wanting)


class Packer:
    """Turns the values of one rank's channels into blocks, and blocks into values."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sent: dict[Edge, BlockLayout] = {}
        self._received: dict[Edge, BlockLayout] = {}
        self._num_layouts = 0

    def describe(self, edge: Edge, value: Any) -> tuple[BlockLayout, list[Tensor]]:
        """The layout of a value, which is the edge's last one if nothing has changed; and its
        tensors.

        Raises:
            RunError: it holds something that cannot be sent.
        """
        tensors: list[Tensor] = []
        if type(value) is Tensor:  # as outputs of stages are, nearly all
            tensors.append(value)
            signature = _tensor_signature(value)
        else:
            signature = _signature(value, tensors)
        last = self._sent.get(edge)
        if signature is None or last is None or last.signature != signature:
            try:
                description, tensors = self._codec.describe(value)
            except wire.Unsendable as error:
                raise RunError(
                    f"rank {edge.source} cannot send this value to rank {edge.target}: {error}"
                ) from None
            self._num_layouts += 1
            last = BlockLayout.read(description, self._codec, signature, self._num_layouts)
            self._sent[edge] = last
        # Most are detached already.
        return last, [tensor.detach() for tensor in tensors] if last.wanting else tensors

    def recognise(self, edge: Edge, description: bytes) -> BlockLayout:
        """The layout that a description tells, which is the edge's last one if it is the same.

        Raises:
            RunError: it is no description.
        """
        last = self._received.get(edge)
        if last is None or last.description != description:
            try:
                last = self._received[edge] = BlockLayout.read(description, self._codec)
            except Garbled as error:
                refuse(edge, error)
        return last

    def unpack(
        self,
        edge: Edge,
        block: Buffer,
        layout: BlockLayout,
        note: bytes = b"",
        read: Read | None = None,
    ) -> Any:
        """The value in a block, ``Noted`` if there is a note with it; its tensors use the block as
        their memory and keep it alive.

        Every tensor counts its own versions: overwriting one must not make autograd think that
        another one was, which two views of one tensor would.

        Args:
            read: gives the tensors, if more is to keep the block alive than an array does.

        Raises:
            RunError: the block is shorter than its description says, or a class that the user has
                named cannot be made of what has come.
        """
        if layout.num_bytes > len(block):
            refuse(edge, f"its tensors take {layout.num_bytes} bytes, but it has {len(block)}")
        try:
            places = layout.places
            tensors = read(places) if read else [place.read_end(block) for place in places]
            for index in layout.wanting:
                tensors[index].requires_grad_()
            value: Any = tensors
            if type(layout.node) is wire.TensorNode:  # as outputs of stages are, nearly all
                (value,) = tensors
            elif not layout.is_list:  # as gradients are
                value = self._codec.build(layout.node, iter(tensors))
        except Exception as error:  # whatever the constructor of a user's class raises
            refuse(edge, error)
        return Noted(value, note) if note else value


def _signature(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    """Something cheap that is equal only for values of equal description, or ``None``.

    What is equal and yet not the same (``1`` and ``True``, ``0.0`` and ``-0.0``) must not look
    alike, so only a few types are dealt with.

    ``tensors`` takes its tensors in order; ``depth`` is how deep in a value this is.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return _tensor_signature(value)
    if kind is list and len(value) == 1 and type(value[0]) is Tensor:  # as gradients are
        tensors.append(value[0])
        return kind, (), [_tensor_signature(value[0])]
    if kind in _IN_SIGNATURES:
        return kind, value
    keys = _signed_keys(value) if kind is dict else ()
    if kind not in _SIGNED or keys is None or depth > wire.DEEPEST:
        return None
    parts = value.values() if kind is dict else value
    inner = [_signature(part, tensors, depth + 1) for part in parts]
    return None if None in inner else (kind, keys, inner)


def _tensor_signature(tensor: Tensor) -> Any:
    try:
        return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad
    except RuntimeError:
        return None  # sparse tensors have no strides


def _signed_keys(value: dict[Any, Any]) -> Any:
    kinds = {type(key) for key in value}
    if kinds <= {str}:
        return tuple(value)
    return tuple((type(key), key) for key in value) if kinds <= _IN_SIGNATURES else None


def refuse(edge: Edge, why: object) -> NoReturn:
    """Raise because what has come over an edge cannot be understood."""
    raise RunError(
        f"rank {edge.target} cannot read a message from rank {edge.source}: {why}; use the same "
        "versions of Python, torch and Penstock and the same message_types on every rank, and let "
        "nothing else reach the ports of this job"
    )


def pack(number: int, layout: BlockLayout, tensors: list[Tensor], note: bytes = b"") -> Tensor:
    """A block with a value, as a tensor of bytes."""
    block = torch.empty(layout.num_bytes, dtype=torch.uint8)
    memory = memory_of(block)
    write_description(memory, layout)
    write_prefix(memory, number, layout, note)
    write_tensors(places(block, layout), tensors)
    return block


def write_description(memory: memoryview, layout: BlockLayout) -> None:
    """Write what tells a block's layout, behind its prefix."""
    memory[PREFIX.size : PREFIX.size + len(layout.description)] = layout.description


def write_prefix(memory: memoryview, number: int, layout: BlockLayout, note: bytes) -> None:
    """Write what a block with a value begins with."""
    PREFIX.pack_into(memory, 0, BlockKind.VALUE, number, note, len(layout.description))


def places(block: Tensor, layout: BlockLayout) -> list[Tensor | None]:
    """Where in a block each tensor belongs; ``None`` for an empty one."""
    return [place.write_end(block) for place in layout.places]


def write_tensors(places: list[Tensor | None], tensors: list[Tensor]) -> None:
    """Copy tensors to their places."""
    for place, tensor in zip(places, tensors, strict=True):
        if place is not None:
            place.copy_(tensor)


def pack_notice(kind: BlockKind, number: int = 0, text: str = "") -> Tensor:
    """A block without a value."""
    data = short(text)
    block = torch.empty(PREFIX.size + len(data), dtype=torch.uint8)
    memory_of(block)[:] = PREFIX.pack(kind, number, b"", len(data)) + data
    return block


def short(text: str) -> bytes:
    """A text, cut to what fits in a notice: at most 2048 bytes of UTF-8."""
    # Cut between two letters; and a text that cannot be encoded must not hide the failure it tells.
    data = text.encode(errors="replace")[:_LONGEST_TEXT_BYTES]
    return data.decode(errors="ignore").encode()


def read_prefix(edge: Edge, memory: memoryview) -> BlockPrefix:
    """Read the beginning of a block of an edge.

    Raises:
        RunError: it is no block.
    """
    if len(memory) < PREFIX.size:
        refuse(edge, f"a block has {len(memory)} bytes, which is less than its header")
    kind, number, note, size = PREFIX.unpack_from(memory)
    if kind not in _KINDS or not 0 <= size <= len(memory) - PREFIX.size:
        refuse(edge, f"a block of kind {kind} with a description of {size} bytes")
    text = bytes(memory[PREFIX.size : PREFIX.size + size])
    return BlockPrefix(_KINDS[kind], number, b"" if note == _NO_NOTE else note, text)


_KINDS = {int(kind): kind for kind in BlockKind}


def read_note(memory: memoryview) -> bytes:
    """The note of a block with a value; empty if it has none."""
    note = bytes(memory[_NOTE_PLACE])
    return b"" if note == _NO_NOTE else note


def memory_of(block: Tensor) -> memoryview:
    """The bytes of a block, to read and write."""
    return memoryview(block.numpy())  # type: ignore[arg-type]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
