"""A loss sees outputs as if they were whole, and gives what it gives on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.context.outputs import OutputPositions
from penstock.engine.context.zigzag import PositionDim, shares, taken
from penstock.engine.following.dims import ShardedDim
from tests.kit.groups import together

ROWS, LENGTH, WORDS = 2, 7, 5


def flat(logits, targets, **options):
    return F.cross_entropy(logits.float().view(-1, WORDS), targets.reshape(-1), **options)


def by_shape(logits, targets):
    rows, length, words = logits.shape
    assert (rows, length, logits.size(1), logits.numel()) == (ROWS, LENGTH, LENGTH, 70)
    return F.cross_entropy(logits.reshape(rows * length, words), targets.flatten()) / length


def positions_first(logits, targets):
    turned = logits.transpose(0, 1).contiguous()
    return F.cross_entropy(turned.view(-1, WORDS), targets.t().reshape(-1), reduction="sum")


def permuted(logits, targets):
    return nn.CrossEntropyLoss(ignore_index=1)(logits.permute(0, 2, 1), targets)


def weighted(logits, targets):
    weight = torch.arange(1.0, WORDS + 1).double()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight, label_smoothing=0.2)


def probable(logits, targets):
    wanted = F.one_hot(targets, WORDS).double() * 0.8 + 0.04
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


def by_hand(logits, targets):
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def of_each(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").square().sum()


def of_the_last(logits, targets):
    return F.cross_entropy(logits[:, -1], targets[:, -1])


def with_pull(logits, targets):
    return flat(logits, targets) + 0.1 * logits.pow(2).mean()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("loss", "gathers"),
    [
        (flat, False), (by_shape, False), (positions_first, False), (permuted, False),
        (weighted, False), (probable, False), (by_hand, True), (of_each, True),
        (of_the_last, True), (with_pull, True),
    ],
)  # fmt: skip
def test_a_loss_by_positions_is_the_loss(loss, gathers, size):
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(ROWS, LENGTH, WORDS, generator=generator).double()
    targets = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    whole = given.clone().requires_grad_()
    expected = loss(whole, targets)
    (gradient,) = torch.autograd.grad(expected, whole)
    way = ShardedDim(1, LENGTH, 1, shares(LENGTH, size))

    def member(group):
        part = taken(given, PositionDim(1, LENGTH), size, group.index).requires_grad_()
        positions = OutputPositions(group, {True: [way]}, nn.Identity())
        results = [loss(positions.for_loss(part), targets) for _ in range(2)]
        back = torch.autograd.grad(results[1], part)[0]
        assert torch.equal(*results)
        return results[0].detach(), back, group.sent_bytes > 8 * part.numel()

    for index, (made, back, sent) in enumerate(together(size, member)):
        own = taken(gradient, PositionDim(1, LENGTH), size, index)
        torch.testing.assert_close(made, expected.detach(), rtol=1e-6, atol=1e-6)
        tolerance = 1e-6 if loss in (flat, with_pull) else 1e-12  # which compute in single
        torch.testing.assert_close(back, own, rtol=tolerance, atol=tolerance)
        assert sent == gathers
