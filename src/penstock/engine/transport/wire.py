"""Descriptions of values on the wire: their nesting and their tensors' places, as strict data.

A message must never be able to run code in the process that reads it, so nothing is pickled. A
description is msgpack that can say a few things only: tensors, plain values, tuples, lists and
dictionaries of these. Any other class has to be named by the program that receives it; a message
can then say which of *these* classes it means, but never bring in another one by its name. What
does not fit is ``Garbled``.

msgspec checks types when it decodes; what it cannot check (is this a dtype, do these strides fit
this shape) is checked here, before a byte of the message's tensors is touched.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import repeat
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.engine.model import tree

DEEPEST = 64
"""How deep values may be nested."""

_LARGEST = 2**62
_MACHINE_INTEGERS = range(-(2**63), 2**63)

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Quantised tensors have scales besides, and a few others are no whole bytes.
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Size = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]


class Garbled(ValueError):
    """Bytes that describe no value; says why."""


class Unsendable(ValueError):
    """A value that cannot be described; says which part of it, and what to do."""


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a description."""


class TensorNode(_Node, frozen=True, tag="tensor"):
    """Stands for a tensor.

    Attributes:
        shape: the tensor's.
        dtype: its name in ``torch``.
        strides: in numbers, of a tensor without gaps whose dimensions lie in memory in another
            order than they are counted, such as a transposed one; else empty.
        requires_grad: whether a gradient of it is wanted.
    """

    shape: tuple[_Size, ...]
    dtype: str
    strides: tuple[_Size, ...]
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        """That the tensor takes in a block."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class PlainNode(_Node, frozen=True, tag="plain"):
    """A value that is no tensor."""

    value: bool | int | float | str | None


class TextNode(_Node, frozen=True, tag="text"):
    """A value that has a text from which it can be made again."""

    kind: Literal["int", "bytes", "complex", "dtype", "device"]
    text: str


class SeriesNode(_Node, frozen=True, tag="series"):
    """Values one after the other."""

    kind: Literal["tuple", "list", "torch.Size"]
    parts: tuple[Node, ...]


class TableNode(_Node, frozen=True, tag="table"):
    """Values with keys, in their order."""

    kind: Literal["dict", "OrderedDict"]
    keys: tuple[PlainNode, ...]
    parts: tuple[Node, ...]


class ObjectNode(_Node, frozen=True, tag="record"):
    """An object of a class that the receiving program has named.

    Attributes:
        name: the class's.
        context: what there is beside its parts: an enumeration's member, keys of a class that is
            registered with torch's pytree.
        parts: its fields.
    """

    name: str
    context: Node
    parts: tuple[Node, ...]


Node: TypeAlias = "TensorNode | PlainNode | TextNode | SeriesNode | TableNode | ObjectNode"

_SERIES: dict[type, Literal["tuple", "list", "torch.Size"]] = {
    tuple: "tuple",
    list: "list",
    torch.Size: "torch.Size",
}
_TABLES: dict[type, Literal["dict", "OrderedDict"]] = {dict: "dict", OrderedDict: "OrderedDict"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "torch.Size": torch.Size,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "complex": complex,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
}
_PLAIN = frozenset({type(None), bool, float, str})


class _ClassCodec(NamedTuple):
    """How objects of a class are taken apart, into (context, parts), and made again."""

    apart: Callable[[Any], tuple[Any, Iterable[Any]]]
    together: Callable[[Any, list[Any]], Any]


class Codec:
    """Describes values, and makes them again.

    Args:
        classes: which may be part of a value, beside tensors, plain values, tuples, lists and
            dictionaries: NamedTuples, dataclasses, enumerations, and classes that are registered
            with torch's pytree.

    Raises:
        InputError: a class is none of these.
    """

    def __init__(self, classes: Iterable[type] = ()) -> None:
        own = (kind for kind in vars(torch.return_types).values() if isinstance(kind, type))
        named = (kind for kind in classes if kind not in _SERIES and kind not in _TABLES)
        self._ways = {kind: _way(kind) for kind in (*own, *named)}
        self._names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in self._ways}
        self._classes = {name: kind for kind, name in self._names.items()}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            TensorNode | PlainNode | TextNode | SeriesNode | TableNode | ObjectNode
        )

    def describe(self, value: Any) -> tuple[bytes, list[Tensor]]:
        """A value's description, and its tensors in their order.

        Raises:
            Unsendable: a part of it cannot be described.
        """
        tensors: list[Tensor] = []
        node = self._apart(value, tensors, 0)
        return self._encoder.encode(node), tensors

    def read(self, description: bytes) -> tuple[Node, list[TensorNode]]:
        """Read a description; gives its node, and its tensors' slots in their order.

        Raises:
            Garbled: it is no description, or of something that this program does not take.
        """
        try:
            node: Node = self._decoder.decode(description)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Garbled(str(error)) from None
        slots: list[TensorNode] = []
        self._check(node, slots, 0)
        return node, slots

    def _check(self, node: Node, slots: list[TensorNode], depth: int) -> None:
        """Raise unless a value can be made of a node; and collect its slots."""
        if depth > DEEPEST:
            raise Garbled(f"values are nested more than {DEEPEST} deep")
        if isinstance(node, TensorNode):
            _check_slot(node)
            slots.append(node)
            return
        if isinstance(node, TableNode) and len({*map(_identity, node.keys)}) != len(node.parts):
            raise Garbled("a dictionary's keys and values do not match")
        if isinstance(node, ObjectNode):
            if node.name not in self._classes:
                raise Garbled(f"it holds a {node.name!r}, which message_types does not name")
            self._check(node.context, [], depth + 1)
        if isinstance(node, SeriesNode | TableNode | ObjectNode):
            for part in node.parts:
                self._check(part, slots, depth + 1)

    def build(self, node: Node, tensors: Iterator[Tensor]) -> Any:
        """The value that a node describes, with the next tensors in its slots.

        Raises:
            Exception: whatever the constructor of a named class raises.
        """
        if isinstance(node, TensorNode):
            return next(tensors)
        if isinstance(node, PlainNode):
            return node.value
        if isinstance(node, TextNode):
            return _MAKERS[node.kind](node.text)
        parts = [self.build(part, tensors) for part in node.parts]
        if isinstance(node, SeriesNode):
            return _MAKERS[node.kind](parts)
        if isinstance(node, TableNode):
            return _MAKERS[node.kind](zip((key.value for key in node.keys), parts, strict=True))
        context = self.build(node.context, repeat(_NO_TENSOR))
        return self._ways[self._classes[node.name]].together(context, parts)

    def _apart(self, value: Any, tensors: list[Tensor], depth: int) -> Node:
        if depth > DEEPEST:
            raise Unsendable(f"it is nested more than {DEEPEST} deep, or holds itself")
        kind = type(value)
        if isinstance(value, Tensor):
            slot = slot_of(value)
            tensors.append(value)
            return slot
        if kind in self._ways:
            context, parts = self._ways[kind].apart(value)
            beside = self._apart(context, [], depth + 1)
            return ObjectNode(self._names[kind], beside, self._all(parts, tensors, depth))
        if kind in _SERIES:
            return SeriesNode(_SERIES[kind], self._all(value, tensors, depth))
        if kind in _TABLES:
            keys = tuple(map(_key, value))
            return TableNode(_TABLES[kind], keys, self._all(value.values(), tensors, depth))
        return _leaf(value)

    def _all(self, parts: Iterable[Any], tensors: list[Tensor], depth: int) -> tuple[Node, ...]:
        return tuple([self._apart(part, tensors, depth + 1) for part in parts])


_NO_TENSOR = torch.empty(0)


def slot_of(tensor: Tensor) -> TensorNode:
    """The node that stands for a tensor.

    Raises:
        Unsendable: it has more to it than its numbers.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise Unsendable(f"it holds a tensor of {tensor.dtype}; convert it")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsendable("it holds a sparse or nested tensor; make it dense with to_dense()")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    keeps = strides != _contiguous(shape) and tensor.numel() and is_dense(shape, strides)
    return TensorNode(shape, name, strides if keeps else (), tensor.requires_grad)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's numbers lie side by side, in whatever order, and none is there twice."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _check_slot(slot: TensorNode) -> None:
    if slot.dtype not in DTYPES:
        raise Garbled(f"{slot.dtype!r} is no dtype")
    dtype = DTYPES[slot.dtype]
    if slot.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise Garbled(f"a tensor of {slot.dtype} can have no gradient")
    if slot.strides and (
        len(slot.strides) != len(slot.shape) or not is_dense(slot.shape, slot.strides)
    ):
        raise Garbled(f"strides {slot.strides} do not fit shape {slot.shape}")


def _identity(key: PlainNode) -> tuple[type, Any]:
    return type(key.value), key.value


def _key(key: Any) -> PlainNode:
    leaf = _leaf(key)
    if not isinstance(leaf, PlainNode):
        raise Unsendable(f"it holds a dictionary with the key {key!r}; use texts")
    return leaf


def _leaf(value: Any) -> PlainNode | TextNode:
    """A value without parts."""
    kind = type(value)
    if kind is int:
        return PlainNode(value) if value in _MACHINE_INTEGERS else TextNode("int", hex(value))
    if kind is str and not _is_unicode(value):
        raise Unsendable("it holds a text with characters that no encoding has")
    if kind in _PLAIN:
        return PlainNode(value)
    if kind is bytes:
        return TextNode("bytes", value.hex())
    if kind is complex:
        return TextNode("complex", repr(value))
    if kind is torch.device:
        return TextNode("device", str(value))
    if kind is torch.dtype and value in _NAMES:
        return TextNode("dtype", _NAMES[value])
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise Unsendable(
        f"it holds a {name}; hand on tensors, numbers and texts in tuples, lists and dicts, or "
        f"give Pipeline(…, message_types=[{kind.__name__}]) if that is a NamedTuple, a dataclass, "
        "an enumeration, or registered with torch's pytree"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _way(kind: type) -> _ClassCodec:
    """How objects of a class travel.

    Raises:
        InputError: it is not known.
    """
    if not isinstance(kind, type):
        raise InputError(f"message_types holds {kind!r}, which is no class")
    if issubclass(kind, Enum):
        return _ClassCodec(lambda member: (member.name, ()), lambda name, _: kind[name])
    registered = tree.node(kind)
    if registered is not None:
        return _ClassCodec(*registered)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _ClassCodec(lambda value: (None, value), lambda _, parts: kind(*parts))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.init]
        return _ClassCodec(
            lambda value: (None, [getattr(value, name) for name in names]),
            lambda _, parts: kind(**dict(zip(names, parts, strict=True))),
        )
    raise InputError(
        f"message_types holds {kind.__qualname__}, but only NamedTuples, dataclasses, enumerations "
        "and classes that are registered with torch's pytree can travel between processes"
    )
