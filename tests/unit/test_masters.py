"""Optimizers that keep weights of half precision a second time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.errors import InputError
from penstock.engine.masters import MASTER, gradient_dtype
from tests.kit.half_precision import MixedByHand
from tests.kit.helpers import make_batch, make_mlp

HALF = [torch.bfloat16, torch.float16]
FACTORIES = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "nadamw": lambda parameters: pk.optimizers.nadamw(parameters, lr=1e-3),
}


def mixed(make):
    return pk.optimizers.master_weights(make)


def trained(model, optimizer, steps=4, batch=make_batch):
    losses = []
    for step in range(steps):
        inputs, targets = batch(12, next(model.parameters()).dtype, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [*FACTORIES])
def test_steps_are_those_of_masters_kept_by_hand(name, dtype):
    ours, theirs = (make_mlp(dropout=0.0, dtype=dtype) for _ in range(2))
    optimizer = mixed(FACTORIES[name])([*ours.parameters()])
    by_hand = MixedByHand(theirs, 1, FACTORIES[name])
    losses = trained(ours, optimizer)
    wanted = [by_hand.step(*make_batch(12, dtype, step)).item() for step in range(4)]
    assert losses == wanted
    for own, other, master in zip(
        ours.parameters(), theirs.parameters(), by_hand.masters, strict=True
    ):
        assert torch.equal(own, other)
        assert torch.equal(optimizer.state[own][MASTER], master)


def test_what_is_less_than_a_digit_of_a_weight_is_not_lost():
    weights = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    steps = [make([own]) for make, own in zip((mixed(_slow), _slow), weights, strict=True)]
    for _ in range(100):
        for optimizer, own in zip(steps, weights, strict=True):
            own.grad = torch.ones(3, dtype=gradient_dtype(own))
            optimizer.step()
    kept, lost = weights
    assert torch.equal(lost, torch.ones_like(lost))
    torch.testing.assert_close(kept, torch.full_like(kept, 0.9), rtol=2**-8, atol=0.0)


def _slow(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def test_small_gradients_of_many_microbatches_are_not_lost():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    mixed(_slow)([weight])
    for _ in range(1000):
        weight.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 1000.0  # bfloat16 stays at 256


def test_weights_of_full_precision_are_updated_as_ever():
    ours, theirs = make_mlp(dropout=0.0), make_mlp(dropout=0.0)
    made = mixed(FACTORIES["AdamW"])([*ours.parameters()])
    trained(ours, made)
    trained(theirs, FACTORIES["AdamW"](theirs.parameters()))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
        assert MASTER not in made.state[own]


def test_hooks_of_steps_see_the_weights_themselves():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = mixed(_slow)([weight])
    seen = []

    def look(own, *_):
        seen.append((own.param_groups[0]["params"][0] is weight, MASTER in own.state[weight]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert seen == [(True, False), (True, True)]


def test_a_step_that_raises_leaves_the_weights_in_their_place():
    class Raising(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no luck")

    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = mixed(lambda own: Raising(own, lr=1.0))([weight])
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="no luck"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is weight
    assert torch.equal(weight, torch.ones_like(weight))


def test_copies_and_state_dicts_go_on_in_float32():
    model = make_mlp(dropout=0.0, dtype=torch.bfloat16)
    optimizer = mixed(FACTORIES["AdamW"])([*model.parameters()])
    trained(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    assert trained(model, optimizer, 3) == trained(other, copied, 3)
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_with_rates_that_are_corrected_for_delay():
    weights = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    makes = [
        mixed(pk.optimizers.delay_corrected(_slow, anneal_updates=5)),
        pk.optimizers.delay_corrected(mixed(_slow), anneal_updates=5),
    ]
    for make, weight in zip(makes, weights, strict=True):
        optimizer = make([weight])
        for _ in range(4):
            weight.grad = torch.ones(2)
            optimizer.step()
    assert torch.equal(*weights)


def _stepped(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1.0)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda own: 3, "what make gave"),
        (mixed(_slow), "keeps masters already"),
        (_stepped, "keeps state already"),
    ],
)
def test_what_cannot_have_masters_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        mixed(make)([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(InputError, match="make is"):
        mixed(3)
