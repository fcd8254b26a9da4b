"""Attention over positions that members share is attention."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.context import ring
from penstock.engine.context.ring import ring_attention
from penstock.engine.context.zigzag import PositionDim, chunks, put_together, shares, taken
from tests.kit.groups import together

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize(("length", "size"), [*itertools.product((4, 7, 8, 13), (1, 2))])
def test_members_have_every_position_once_and_as_many(length, size):
    numbers = [
        [*range(own.start, own.stop)]
        for index in range(size)
        for own in chunks(length, size, index)
    ]
    assert sorted(itertools.chain(*numbers)) == [*range(length)]
    assert max(shares(length, size)) - min(shares(length, size)) <= 1


def test_chunks_make_causal_work_alike():
    """Scores that a member computes beside those of its own positions are the same for all."""
    length, size = 24, 3
    sizes = [[own.length for own in chunks(length, size, index)] for index in range(size)]
    own = [sum(each) for each in sizes]
    # Earlier members' first chunk is seen by all of mine, later ones are seen by my second.
    work = [
        own[index] * sum(sizes[other][0] for other in range(index))
        + sizes[index][1] * sum(own[other] for other in range(index + 1, size))
        for index in range(size)
    ]
    assert len({*work}) == 1


def test_what_is_taken_goes_together_again():
    whole = torch.arange(2 * 9 * 3 * 5).view(2, 27, 5)
    parts = [taken(whole, PositionDim(1, 9, 3), 3, index) for index in range(3)]
    assert torch.equal(put_together(parts, PositionDim(1, 9, 3)), whole)


@pytest.mark.parametrize(
    ("size", "length", "heads", "key_heads", "causal", "scale"),
    [
        (2, 8, 2, 2, True, None),
        (2, 9, 4, 2, True, 0.3),
        (3, 14, 6, 2, True, None),
        (3, 13, 2, 2, False, None),
        (2, 8, 4, 1, False, 0.5),
        (1, 5, 2, 1, True, None),
    ],
)
@pytest.mark.parametrize("tile", [512, 2])
def test_a_ring_is_attention(size, length, heads, key_heads, causal, scale, tile, monkeypatch):
    monkeypatch.setattr(ring, "_TILE", tile)
    generator = torch.Generator().manual_seed(0)

    def drawn(count, width):
        return torch.randn(2, count, length, width, generator=generator, dtype=torch.float64)

    given = drawn(heads, 4), drawn(key_heads, 4), drawn(key_heads, 3)
    seed = drawn(heads, 3)
    whole = [value.clone().requires_grad_() for value in given]
    expected = F.scaled_dot_product_attention(
        *whole, is_causal=causal, scale=scale, enable_gqa=heads != key_heads
    )
    gradients = torch.autograd.grad(expected, whole, seed)

    def member(group):
        own = [
            taken(value, PositionDim(2, length), size, group.index).requires_grad_()
            for value in given
        ]
        output = ring_attention(*own, group, length if causal else 0, scale)
        share = taken(seed, PositionDim(2, length), size, group.index)
        return output.detach(), torch.autograd.grad(output, own, share)

    results = together(size, member)
    made = put_together([output for output, _ in results], PositionDim(2, length))
    torch.testing.assert_close(made, expected.detach(), **EXACT)
    for place, wanted in enumerate(gradients):
        back = put_together([own[place] for _, own in results], PositionDim(2, length))
        torch.testing.assert_close(back, wanted, **EXACT)


def test_half_precision_is_computed_in_single():
    given = [torch.randn(1, 2, 16, 8).bfloat16() for _ in range(3)]
    wanted = F.scaled_dot_product_attention(*(one.float() for one in given), is_causal=True)

    def member(group):
        own = [taken(value, PositionDim(2, 16), 2, group.index).requires_grad_() for value in given]
        output = ring_attention(*own, group, 16)
        output.sum().backward()
        assert {one.grad.dtype for one in own} == {output.dtype} == {torch.bfloat16}
        return output.detach()

    made = put_together(together(2, member), PositionDim(2, 16))
    torch.testing.assert_close(made.float(), wanted, rtol=0.01, atol=0.01)


def test_keys_and_values_go_round_once_and_their_gradients_with_them():
    """A member of t sends t − 1 times its keys and values, and with gradients t times more."""
    given = [torch.randn(1, 2, 12, 4) for _ in range(3)]
    share = 2 * 2 * 4 * 4 * 4  # keys and values, of 2 heads, 4 positions, width 4, in 4 bytes

    def member(group):
        own = [taken(value, PositionDim(2, 12), 3, group.index).requires_grad_() for value in given]
        output = ring_attention(*own, group, 12)
        forward = group.sent_bytes
        output.sum().backward()
        return forward, group.sent_bytes - forward

    assert together(3, member) == [(2 * share, (2 + 3) * share)] * 3
