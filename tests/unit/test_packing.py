"""A value survives being packed into bytes, whatever it is made of."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock import tree
from penstock.transport import packing
from penstock.transport.packing import BlockKind

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
    """Of a module, so that it can be pickled."""

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


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.just(2.5))
values = st.recursive(
    st.one_of(tensors(), tensors(), plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def sent(value, number=7):
    """(block, what arrives) of a value."""
    layout, parts = packing.describe(value)
    block = packing.pack(number, layout, parts)
    assert block.numel() == layout.num_bytes
    # The receiver's block may be larger, since an edge remembers the largest.
    arrived = torch.cat([block, torch.zeros(100, dtype=torch.uint8)])
    kind, found, header = packing.read_prefix(packing.memory_of(arrived))
    assert (kind, found) == (BlockKind.VALUE, number)
    return arrived, packing.unpack(arrived.numpy(), packing.recognise(header, None))


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
        assert (mine.shape, mine.dtype, mine.requires_grad) == (other.shape, other.dtype, False)
        if mine.numel():  # torch.equal does not know every dtype, but it knows bytes
            assert torch.equal(bytes_of(mine), bytes_of(other))
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
    layout, _ = packing.describe(value)
    again, parts = packing.describe(other, layout)
    assert pickle.loads(again.header) == pickle.loads(packing.describe(other)[0].header)
    assert len(parts) == len(tree.tensors(other))
    assert packing.recognise(again.header, layout).header == again.header


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
    ],
)
def test_which_layouts_are_the_same(value, other, same):
    layout, _ = packing.describe(value)
    assert (packing.describe(other, layout)[0] is layout) == same
    header = packing.describe(other)[0].header
    assert (packing.recognise(header, layout) is layout) == same


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
    assert packing.read_prefix(packing.memory_of(block)) == (kind, 123, "rank 1 failed: ✗".encode())


@pytest.mark.parametrize(
    ("text", "length"),
    [("x" * 9999, 2048), ("é" * 9999, 1024), ("a" + "é" * 9999, 1024), ("\udc80", 1)],
)
def test_a_long_or_odd_notice_is_cut_to_what_can_be_read(text, length):
    block = packing.pack_notice(BlockKind.FAILURE, text=text)
    assert block.numel() <= 4096
    assert len(packing.read_prefix(packing.memory_of(block))[2].decode()) == length
