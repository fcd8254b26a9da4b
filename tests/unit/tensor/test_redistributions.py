"""Values go from one layout to another with every element once, and gradients by the adjoint."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DeadlineError, PeerError
from penstock.engine.tensor.group import ShardSpec, bounds, memory_order
from penstock.engine.tensor.layouts import (
    enter,
    gather,
    gather_copies,
    leave,
    own_shard,
    scatter,
    turn,
)
from tests.kit.groups import together
from tests.kit.training import DEADLINE_SECONDS

KINDS = ("part", "whole", "copies", "partial")

# (function of (value, group), what it is given, what it makes)
MAPS = {
    "gather": (lambda value, group: gather(value, group, 0), "part 0", "whole"),
    "gather copies": (lambda value, group: gather_copies(value, group, 1), "part 1", "copies"),
    "own part": (lambda value, group: own_shard(value, group, 1), "whole", "part 1"),
    "enter": (enter, "whole", "copies"),
    "leave": (leave, "partial", "whole"),
    "scatter": (lambda value, group: scatter(value, group, 0), "partial", "part 0"),
    "turn": (lambda value, group: turn(value, group, 0, 1), "part 0", "part 1"),
}

sizes = st.integers(1, 7)


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own_value(kind, shape, size, index, seed):
    """What a member has of a value: its part, all of it, or a term of its own."""
    if kind.startswith("part "):
        return ShardSpec(int(kind[-1])).part(drawn(shape, seed), size, index)
    return drawn(shape, seed + (index if kind == "partial" else 0))


def own_gradient(kind, shape, size, index, seed):
    # The gradient of copies is a sum of terms, and that of a sum is whole.
    dual = {"copies": "partial", "partial": "whole"}.get(kind, kind)
    return own_value(dual, shape, size, index, seed)


def product(kind, values, gradients):
    """⟨value, gradient⟩ over all members, each number once."""
    if kind == "whole":
        return (values[0] * gradients[0]).sum()
    return sum((value * gradient).sum() for value, gradient in zip(values, gradients, strict=True))


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=12, deadline=None)
@given(rows=sizes, columns=sizes, size=st.integers(1, 4), seed=st.integers(0, 1000))
def test_gradients_go_back_by_the_adjoint(name, rows, columns, size, seed):
    function, have, want = MAPS[name]
    shape = (rows, columns)

    def both_ways(group):
        value = own_value(have, shape, size, group.index, seed).requires_grad_()
        made = function(value, group)
        gradient = own_gradient(want, shape, size, group.index, seed + 100)
        made.backward(gradient)
        return value.detach(), made.detach(), gradient, value.grad

    values, made, gradients, back = zip(*together(size, both_ways), strict=True)
    forward, backward = product(want, made, gradients), product(have, values, back)
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)
    # Every element is there once: what was made is the value, wherever it lies.
    terms = [own_value(have, shape, size, index, seed) for index in range(size)]
    whole = sum(terms) if have == "partial" else drawn(shape, seed)
    for index, ours in enumerate(made):
        expected = ShardSpec(int(want[-1])).part(whole, size, index) if "part " in want else whole
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@given(size=st.integers(0, 50), count=st.integers(1, 9))
def test_bounds_cover_everything_once(size, count):
    parts = [bounds(size, count, index) for index in range(count)]
    assert [place for part in parts for place in range(*part)] == list(range(size))
    assert max(part.length for part in parts) - min(part.length for part in parts) <= 1


@given(
    length=st.integers(1, 6),
    blocks=st.integers(1, 3),
    dim=st.integers(0, 1),
    size=st.integers(1, 4),
)
def test_cuts_give_back_what_they_take(length, blocks, dim, size):
    shape = [3, 3]
    shape[dim] = length * blocks
    whole, cut = drawn(shape, 0), ShardSpec(dim, blocks)
    parts = [cut.part(whole, size, index) for index in range(size)]
    assert torch.equal(cut.joined(parts), whole)
    again = torch.zeros_like(whole)
    for index, part in enumerate(parts):
        cut.put(again, part, size, index)
    assert torch.equal(again, whole)


def test_sums_have_the_same_bits_on_all_members_and_the_order_of_the_members():
    terms = [torch.tensor([1e8, 1.0, -1e8, 3.0]) * (1 + index / 7) for index in range(3)]
    sums = together(3, lambda group: group.all_reduce(terms[group.index]))
    assert all(torch.equal(one, terms[0] + terms[1] + terms[2]) for one in sums)


@pytest.mark.parametrize("size", [2, 4])
def test_members_send_what_the_table_says(size):
    value = torch.zeros(8, 16)
    sent = {
        "gather": lambda group: group.gather(group.part(value, 0), 0),
        "reduce-scatter": lambda group: group.reduce_scatter(value, 0),
        "all-reduce": lambda group: group.all_reduce(value),
        "all-to-all": lambda group: group.all_to_all(group.part(value, 0), 0, 1),
    }
    away = (size - 1) / size
    expected = {"gather": away, "reduce-scatter": away, "all-reduce": 2 * away}
    for name, collective in sent.items():

        def count(group, collective=collective):
            collective(group)
            return group.sent_bytes

        share = expected.get(name, away / size)
        assert together(size, count) == [share * value.numel() * 4] * size, name


def test_what_was_sent_may_be_overwritten():
    def overwriting(group):
        value = torch.full((4,), float(group.index))
        parts = group.exchange([value] * group.size)
        value.fill_(-1.0)
        return [float(part[0]) for other, part in enumerate(parts) if other != group.index]

    assert together(3, overwriting) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


def test_a_member_that_fails_wakes_the_others():
    def failing(group):
        if group.index == 1:
            raise ValueError("out of order")
        try:
            group.all_reduce(torch.zeros(3))
        except PeerError as error:
            return str(error)
        return ""

    start = time.monotonic()
    with pytest.raises(ValueError, match="out of order"):
        together(2, failing)
    assert time.monotonic() - start < DEADLINE_SECONDS / 2


def test_a_member_that_does_not_come_is_named():
    def waiting(group):
        if group.index == 0:
            with pytest.raises(DeadlineError, match="rank 0, waiting for its part of a layer"):
                group.all_reduce(torch.zeros(3))

    together(2, waiting, deadline_seconds=0.1)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("sizes_of", [(5, 3, 4), (2, 4, 2), (3, 1, 5)])
def test_what_is_handed_around_lies_in_memory_as_it_did(order, sizes_of):
    """Dropout draws in that order, and kernels are chosen by it."""
    back = [order.index(dim) for dim in range(3)]
    whole = torch.randn([sizes_of[dim] for dim in order]).permute(back)

    def exchanged(group):
        parts = [group.part(whole, dim) for dim in range(3)]
        return [
            *[group.gather(parts[dim], dim)[0] for dim in range(3)],
            *[group.all_to_all(parts[have], have, 2 - have)[0] for have in (0, 2)],
            group.all_reduce(whole),
            group.gather(group.reduce_scatter(whole, 0), 0)[0],
        ]

    for index, got in enumerate(together(2, exchanged)):
        mine = [bounds(size, 2, index) for size in whole.shape]
        turned = [whole.narrow(dim, mine[dim].start, mine[dim].length) for dim in (2, 0)]
        for ours, expected in zip(got, [*[whole] * 3, *turned, *[whole * 2] * 2], strict=True):
            assert torch.equal(ours, expected)
            assert memory_order_of(ours) == memory_order_of(expected)
            assert not ours._is_view()  # or it could not be overwritten behind autograd's node


def memory_order_of(value):
    """Without dimensions of one number, which lie anywhere."""
    return [dim for dim in memory_order(value) if value.shape[dim] > 1]
