"""A value survives being packed into bytes, whatever it is made of."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections import OrderedDict
from typing import NamedTuple

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from penstock.base.errors import InputError, RunError
from penstock.engine.model import tree
from penstock.engine.transport import Codec, Edge, Noted, packing, wire
from penstock.engine.transport.packing import BlockKind, Packer

EDGE = Edge(0, 1, 0)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


class Pair(NamedTuple):
    """A class that the receiver has named."""

    left: object
    right: object


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 3, shape).to(dtype)
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "requires_grad"]))
    if how == "transposed" and len(shape) > 1:
        return tensor.transpose(0, -1)
    if how == "strided" and shape:
        return tensor[::2]
    if how == "expanded":
        return tensor.expand(2, *shape)
    if how == "requires_grad" and dtype in (torch.float32, torch.complex64):
        return tensor.requires_grad_() * 1
    return tensor


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=4),
    st.floats(allow_nan=False),
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
)
keys = st.one_of(st.text(max_size=2), st.integers(0, 9), st.booleans())
values = st.recursive(
    st.one_of(tensors(), tensors(), plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def sent(value, number=7, note=b""):
    """(block, what arrives) of a value."""
    sender, receiver = (Packer(Codec([Pair])) for _ in range(2))
    layout, parts = sender.describe(EDGE, value)
    block = packing.pack(number, layout, parts, note)
    assert block.numel() == layout.num_bytes
    # The receiver's block may be larger, since an edge remembers the largest.
    arrived = torch.cat([block, torch.zeros(100, dtype=torch.uint8)])
    kind, found, noted, text = packing.read_prefix(EDGE, packing.memory_of(arrived))
    assert (kind, found) == (BlockKind.VALUE, number)
    layout = receiver.recognise(EDGE, text)
    return arrived, receiver.unpack(EDGE, arrived.numpy(), layout, noted)


def bytes_of(tensor):
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return fresh.view(-1).view(torch.uint8)


@given(value=values)
def test_a_value_arrives_as_it_was_sent(value):
    block, arrived = sent(value)
    leaves, structure = tree.flatten(value)
    ours, ours_structure = tree.flatten(arrived)
    assert ours_structure == structure
    start, end = block.data_ptr(), block.data_ptr() + block.numel()
    for mine, other in zip(ours, leaves, strict=True):
        if not isinstance(other, torch.Tensor):
            assert mine == other
            assert type(mine) is type(other)
            continue
        assert mine.is_leaf
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        assert mine.requires_grad == other.requires_grad
        if mine.numel():  # torch.equal does not know every dtype, but it knows bytes
            assert torch.equal(bytes_of(mine), bytes_of(other))
            dense = wire.is_dense(other.shape, other.stride())
            assert mine.stride() == other.stride() if dense else mine.is_contiguous()
            assert (mine.data_ptr() - start) % 64 == 0
            assert start <= mine.data_ptr() < end


def test_tensors_in_one_block_do_not_overlap():
    value = [torch.full((n,), n, dtype=torch.int32) for n in (1, 16, 17, 3)]
    _, arrived = sent(value)
    for tensor in arrived:
        tensor.add_(1)
    assert [tensor.unique().tolist() for tensor in arrived] == [[2], [17], [18], [4]]


def test_overwriting_one_arrived_tensor_does_not_worry_autograd_about_another():
    _, (one, other) = sent((torch.ones(2), torch.ones(2)))
    other.zero_()
    assert one._version == 0


@given(value=values, other=values)
def test_the_last_layout_is_used_again_for_equal_layouts_only(value, other):
    sender, receiver = Packer(Codec([Pair])), Packer(Codec([Pair]))
    layout, _ = sender.describe(EDGE, value)
    receiver.recognise(EDGE, layout.description)
    again, parts = sender.describe(EDGE, other)
    assert again.description == Packer(Codec([Pair])).describe(EDGE, other)[0].description
    assert len(parts) == len(tree.tensors(other))
    assert receiver.recognise(EDGE, again.description).description == again.description


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (torch.ones(2), torch.zeros(2), True),
        ([torch.ones(2), None, {"a": 1}], [torch.zeros(2), None, {"a": 1}], True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        ((1,), (True,), False),
        ((1,), [1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({"a": 1}, {"b": 1}, False),
        ((0.0,), (-0.0,), False),
        ({1: None}, {True: None}, False),
        (Pair(1, 2), (1, 2), False),
        (torch.ones(2, 3), torch.ones(3, 2).T, False),
        (torch.ones(3, 2).T, torch.zeros(3, 2).T, True),
        ({1: None, 2: torch.ones(1)}, {1: None, 2: torch.zeros(1)}, True),
    ],
)
def test_which_layouts_are_the_same(value, other, same):
    sender, receiver = Packer(Codec([Pair])), Packer(Codec([Pair]))
    layout, _ = sender.describe(EDGE, value)
    known = receiver.recognise(EDGE, layout.description)
    again, _ = sender.describe(EDGE, other)
    assert (again is layout) == same
    assert (receiver.recognise(EDGE, again.description) is known) == same


def test_an_arrived_parameter_is_a_plain_tensor():
    _, arrived = sent(nn.Parameter(torch.ones(2)))
    assert type(arrived) is torch.Tensor


def test_conjugate_and_negative_views_arrive_resolved():
    value = torch.tensor([1 + 2j, 3 - 1j])
    _, arrived = sent((value.conj(), value.conj().imag))
    assert torch.equal(arrived[0], value.conj())
    assert torch.equal(arrived[1], -value.imag)


@pytest.mark.parametrize("kind", [BlockKind.GROW, BlockKind.FAILURE])
def test_a_notice_has_a_number_and_a_text(kind):
    block = packing.pack_notice(kind, 123, "rank 1 failed: ✗")
    prefix = packing.read_prefix(EDGE, packing.memory_of(block))
    assert prefix == (kind, 123, b"", "rank 1 failed: ✗".encode())


@pytest.mark.parametrize(
    ("text", "length"),
    [("x" * 9999, 2048), ("é" * 9999, 1024), ("a" + "é" * 9999, 1024), ("\udc80", 1)],
)
def test_a_long_or_odd_notice_is_cut_to_what_can_be_read(text, length):
    block = packing.pack_notice(BlockKind.FAILURE, text=text)
    assert block.numel() <= 4096
    text = packing.read_prefix(EDGE, packing.memory_of(block)).text
    assert len(text.decode()) == length


def test_a_note_comes_with_its_value_and_is_no_part_of_its_layout():
    note = bytes(range(40))
    block, arrived = sent((torch.ones(2), 1), note=note)
    assert type(arrived) is Noted
    assert arrived.note == note
    assert torch.equal(arrived.value[0], torch.ones(2))
    assert sent((torch.ones(2), 1))[0].numel() == block.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_strides_survive_also_those_of_dimensions_of_one(dtype):
    """Kernels are chosen by strides, and those of a single channel say which format it is in."""
    for shape in ((2, 3, 4, 5), (2, 1, 4, 5), (1, 1, 1, 1)):
        picture = torch.ones(shape).to(dtype).to(memory_format=torch.channels_last)
        assert sent(picture)[1].stride() == picture.stride()


class Named:
    """What a message would name, and nobody has allowed."""

    made = 0

    def __reduce__(self):
        return Named._count, ()

    @staticmethod
    def _count():
        Named.made += 1


@dataclasses.dataclass(frozen=True)
class Fields:
    left: object
    right: object = 3


class Colour(enum.Enum):
    RED = 1


class Output(dict):
    """As the outputs of transformers: a dictionary with attributes, registered with torch."""

    @classmethod
    def together(cls, parts, keys):
        return cls(zip(keys, parts, strict=True))


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    Output.together,
)


@pytest.mark.parametrize(
    "value",
    [
        Pair(Colour.RED, Fields(2)),
        Fields((1, None), Pair(1, 2)),
        Output(a=1, b=Pair(2, Colour.RED)),
        [Colour.RED],
        torch.ones(3, 2).topk(1),
    ],
)
def test_objects_of_named_classes_arrive_and_no_others(value):
    codec = Codec([Pair, Fields, Colour, Output])
    sender, receiver, stranger = Packer(codec), Packer(codec), Packer(Codec())
    layout, tensors = sender.describe(EDGE, value)
    block = packing.pack(7, layout, tensors)
    arrived = receiver.unpack(EDGE, block.numpy(), receiver.recognise(EDGE, layout.description))
    assert type(arrived) is type(value)
    assert str(arrived) == str(value)
    if tensors:
        return  # torch's own return types need not be named
    with pytest.raises(RunError, match=r"rank 0 cannot send .* rank 1: it holds a .*message_types"):
        stranger.describe(EDGE, value)
    with pytest.raises(RunError, match=r"rank 1 cannot read .* rank 0: .* message_types"):
        stranger.recognise(EDGE, layout.description)


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Named(), "a .*Named; hand on tensors"),
        ((torch.ones(2), len), "builtin_function_or_method"),
        ({Named: 1}, "type; hand on"),
        ({(1, 2): 1}, "tuple"),
        ("\udc80", "no encoding"),
        (torch.ones(2).to_sparse(), "to_dense"),
        (LOOP, "holds itself"),
        (numpy.float64(1.0), "numpy.float64"),
    ],
)
def test_what_cannot_travel_is_named_before_it_is_sent(value, told):
    with pytest.raises(RunError, match=rf"rank 0 cannot send this value to rank 1: .*{told}"):
        Packer(Codec()).describe(EDGE, value)


def test_a_class_that_cannot_travel_is_refused_at_once():
    with pytest.raises(InputError, match="message_types holds Named, but only NamedTuples"):
        Codec([Named])
    with pytest.raises(InputError, match="3, which is no class"):
        Codec([3])


def test_no_message_can_run_code():
    packer = Packer(Codec([Pair]))
    for description in (pickle.dumps(Named()), msgspec.msgpack.encode(pickle.dumps(Named()))):
        with pytest.raises(RunError, match="rank 1 cannot read a message from rank 0"):
            packer.recognise(EDGE, description)
    assert Named.made == 0


TENSOR = ["tensor", [2, 3], "float32", []]


@pytest.mark.parametrize(
    "description",
    [
        ["plain", 1, 2],
        ["else", 1],
        ["plain", [1]],
        ["tensor", [2, -3], "float32", []],
        ["tensor", [2, 3], "Tensor", []],
        ["tensor", [2, 3], "int64", [], True],
        ["tensor", [2, 3], "float32", [], 1],
        ["tensor", [2, 3], "float32", [1]],
        ["tensor", [2, 3], "float32", [3, 2]],
        ["tensor", [2, 3], "float32", [0, 1]],
        ["tensor", [2**62, 2**62], "float32", []],
        ["tensor", [1000], "float32", []],
        ["tensor", [0, 2**62, 2**62], "float32", []],
        ["series", "tuple", [TENSOR] * 99],
        ["series", "set", []],
        ["series", "torch.Size", [["plain", "a"]]],
        ["table", "dict", [["plain", "a"]], []],
        ["table", "dict", [["plain", "a"], ["plain", "a"]], [TENSOR, TENSOR]],
        ["table", "dict", [["series", "list", []]], [TENSOR]],
        ["text", "int", "x"],
        ["text", "dtype", "load"],
        ["record", "builtins.eval", ["plain", None], [["plain", "1"]]],
        ["record", "tests.unit.transport.test_packing.Pair", ["plain", None], [["plain", 1]]],
    ],
)
def test_a_description_of_nothing_is_refused(description):
    encoded = msgspec.msgpack.encode(description)
    nested = b"".join(
        [b"\x93", msgspec.msgpack.encode("series"), msgspec.msgpack.encode("list"), b"\x91"]
    )
    for text in (encoded, encoded[:-1], nested * 70 + encoded, nested * 100_000 + encoded):
        data = packing.PREFIX.pack(0, 7, b"", len(text)) + text
        assert_refused(data + bytes(200 - len(data) % 64))


def assert_refused(data):
    with pytest.raises(RunError, match="rank 1 cannot read a message from rank 0"):
        taken(data)


def taken(data):
    packer = Packer(Codec([Pair]))
    block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    kind, _, note, text = packing.read_prefix(EDGE, packing.memory_of(block))
    if kind is BlockKind.VALUE:
        packer.unpack(EDGE, block.numpy(), packer.recognise(EDGE, text), note)


@given(value=values, data=st.data())
def test_corrupted_bytes_give_a_value_or_an_error_and_nothing_else(value, data):
    packer = Packer(Codec([Pair]))
    layout, tensors = packer.describe(EDGE, value)
    block = bytearray(packing.pack(7, layout, tensors).numpy().tobytes())
    places = st.integers(0, min(len(block), packing.PREFIX.size + len(layout.description)) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(places)] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(block)), st.integers(1, len(block))))
    try:
        taken(block[:end])
    except RunError as error:
        assert str(error).startswith("rank 1 cannot read a message from rank 0")
    assert Named.made == 0
