"""A backward in two halves: what is kept in between, and who else holds it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.engine.stage.stage import Keep
from tests.kit.helpers import wanting
from tests.unit.stage.test_split_backward import Lambda, stage_of


def test_overwriting_what_a_deferred_layer_needs_is_noticed():
    layer = Lambda(lambda value, linear: [linear(hidden := value * 1), hidden.zero_()][0],
                   nn.Linear(3, 3))  # fmt: skip
    stage = stage_of(layer)
    stage.forward(0, torch.ones(2, 3), keep=Keep.SPLIT)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.backward_input(0, [torch.ones(2, 3)])


def memory(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def test_between_the_halves_only_the_layers_input_and_its_gradient_are_kept():
    kept = {}

    def note(name, value):
        kept[name] = memory(value)
        if value.requires_grad:
            value.register_hook(lambda gradient: kept.update({f"d {name}": memory(gradient)}))
        return value

    def run(value, first, second):
        hidden = note("hidden", first(note("input", value)))
        squashed = note("squashed", torch.tanh(hidden))
        product = note("product", second(squashed) * hidden)
        return torch.sigmoid(product)

    stage = stage_of(Lambda(run, nn.Linear(8, 8), nn.Linear(8, 8)))
    stage.forward(0, torch.randn(4, 8), keep=Keep.SPLIT)
    alive = {name for name, ref in kept.items() if not ref.expired()}
    assert alive == {"input", "hidden", "squashed"}
    gradients = stage.backward_input(0, [torch.ones(4, 8)])
    del gradients
    gc.collect()
    alive = {name for name, ref in kept.items() if not ref.expired()}
    # The input of either layer, and the gradient of the first one's output.
    assert alive == {"input", "squashed", "d hidden"}
    stage.backward_weight(0)
    assert all(ref.expired() for ref in kept.values())


def test_forgetting_drops_what_waits_for_its_second_half():
    stage = stage_of(nn.Linear(8, 8))
    inputs = torch.randn(4, 8)
    kept = memory(inputs)
    stage.forward(0, inputs, keep=Keep.SPLIT)
    stage.backward_input(0, [torch.ones(4, 8)])
    del inputs
    assert not kept.expired()
    stage.forget()
    assert kept.expired()
    assert stage.in_flight == 0


def test_a_gradient_that_others_hold_is_not_accumulated_into():
    # The gradient of a sum is one tensor for both terms.
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2, 3))

        def forward(self, value):
            return value + self.shift

    stage = stage_of(Shifted())
    first = torch.ones(2, 3)
    for k in range(2):
        stage.forward(k, wanting(torch.zeros(2, 3)), keep=Keep.SPLIT)
    gradient = stage.backward_input(0, [first]).inputs[0]
    stage.backward_input(1, [torch.ones(2, 3)])
    stage.backward_weight(0, 1)
    assert torch.equal(first, torch.ones(2, 3))
    assert torch.equal(gradient, torch.ones(2, 3))
    assert torch.equal(next(stage.parameters()).grad, torch.full((2, 3), 2.0))
