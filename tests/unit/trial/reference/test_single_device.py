"""The reference itself: against the simplest loop in plain torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import momentum


def test_one_microbatch_is_plain_training_to_the_bit():
    ours, theirs = make_mlp(dropout=0.0), make_mlp(dropout=0.0)
    reference, optimizer = (
        SingleDevice(ours, 1, F.cross_entropy, momentum),
        momentum(theirs.parameters()),
    )
    for seed in range(3):
        inputs, targets = make_batch(7, seed=seed)
        loss = F.cross_entropy(theirs(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(reference.step(inputs, targets), loss.detach())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("num_microbatches", [2, 3, 7, 20])
def test_accumulating_gives_the_full_batch_gradient(num_microbatches):
    ours = make_mlp(dropout=0.0, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    inputs, targets = make_batch(7, dtype=torch.float64)
    loss = SingleDevice(ours, num_microbatches, F.cross_entropy).step(inputs, targets)
    expected = F.cross_entropy(theirs(inputs), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_draws_depend_on_the_seed_and_the_step_alone():
    def losses(seed):
        reference = SingleDevice(make_mlp(dropout=0.5), 2, F.cross_entropy, seed=seed)
        torch.rand(5)
        return [reference.step(*make_batch(8)).item() for _ in range(2)]

    assert losses(1) == losses(1) != losses(2)
    assert losses(1)[0] != losses(1)[1]


def test_the_default_seed_is_torchs():
    def loss():
        torch.manual_seed(11)
        model = make_mlp(dropout=0.5, seed=11)
        return SingleDevice(model, 2, F.cross_entropy).step(*make_batch(8))

    assert torch.equal(loss(), loss())


def test_evaluation_restores_the_mode_of_every_layer():
    model = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5), nn.BatchNorm1d(4).eval())
    outputs = SingleDevice(model, 2, F.cross_entropy).evaluate(make_batch(5)[0])
    assert not outputs.requires_grad
    assert [module.training for module in model] == [True, True, False]
    assert torch.equal(outputs, model.eval()(make_batch(5)[0]).detach())
