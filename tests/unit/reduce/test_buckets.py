"""Gradients in pieces: what is added, in which order, and in whose memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.engine.reduce.buckets import added

LARGE = 2.0**24
"""In single precision, 1 more than this is still this."""

SUMS = [
    # gradients in the order of their holders, their sum in that order
    ([None, None], None),
    ([None, 3.0, None], 3.0),
    ([1.0, LARGE], LARGE),
    ([LARGE, 1.0, 1.0], LARGE),
    ([1.0, 1.0, LARGE], LARGE + 2),
    ([0.0, LARGE, 1.0, -LARGE], 0.0),
    ([0.0, LARGE, -LARGE, 1.0], 1.0),
    ([LARGE, -LARGE, 1.0, LARGE, 1.0], LARGE),
    ([LARGE, None, -LARGE, 1.0, None, 1.0], 2.0),
    ([1.0, LARGE, 1.0, 1.0, -LARGE, 3.0], 3.0),
]


def as_tensor(value):
    return None if value is None else torch.full((2, 3), value)


@pytest.mark.parametrize(("given", "expected"), SUMS)
def test_gradients_are_added_in_the_order_of_their_holders(given, expected):
    total = added(map(as_tensor, given))
    if expected is None:
        assert total is None
    else:
        assert torch.equal(total, as_tensor(expected))


def test_a_sum_has_the_bits_of_a_loop_whatever_the_order():
    values = [LARGE, 1.0, -LARGE, 3.0]
    for order in itertools.permutations(values):
        in_order = torch.tensor(0.0)
        for value in order:
            in_order = in_order + value
        assert torch.equal(added([torch.tensor(value) for value in order]), in_order)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_has_memory_of_its_own_and_leaves_what_it_adds(count):
    given = [torch.ones(4) for _ in range(count)]
    total = added(given)
    assert total.data_ptr() not in {gradient.data_ptr() for gradient in given}
    assert all(torch.equal(gradient, torch.ones(4)) for gradient in given)
