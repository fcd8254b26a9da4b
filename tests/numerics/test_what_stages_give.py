"""What stands at a stage's border need not be a fresh result: views, parameters, whole numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from tests.kit.helpers import make_plan
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import sgd

OUTPUTS = {
    "a view of a parameter": lambda layer, value: (value, layer.weight.expand(len(value), 4)),
    "only a view of a parameter": lambda layer, value: (layer.weight.expand(len(value), 4),),
    "a parameter": lambda layer, value: (value, layer.weight),
    "a view of a buffer": lambda layer, value: (value, layer.steady.expand(len(value), 4)),
    "views of the input": lambda layer, value: (value[:, :2], value[:, 1:]),
    "a view of what was overwritten": lambda layer, value: (value.relu_(), value[:, 1:]),
    "whole numbers": lambda layer, value: (value, value.argmax(1, keepdim=True)),
    "nothing to train": lambda layer, value: (value.detach(), None),
}


class Giving(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.give = OUTPUTS[name]
        self.weight = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("steady", torch.ones(1, 4))

    def forward(self, value):
        return self.give(self, value)


class Taking(nn.Module):
    def forward(self, values):
        return sum(value.sin().sum(1, keepdim=True) for value in values if value is not None)


@pytest.mark.parametrize("recompute", ["none", "stage", "layers"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_it_trains_and_evaluates_as_on_one_device(name, recompute):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), Giving(name), Taking(), nn.Linear(1, 3))
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 2, optimizer=sgd)
    plan = make_plan(ours, 2, 2, cuts=[2], recompute=recompute)
    inputs, targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
    with pk.Pipeline(ours, plan, loss=F.cross_entropy, optimizer=sgd) as pipeline:
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                outputs = pipeline.evaluate(inputs)
                loss = pipeline.step(inputs, targets)
            with torch.no_grad():
                expected = torch.cat([theirs(part.clone()) for part in inputs.chunk(2)])
            assert torch.equal(outputs, expected)
            assert torch.equal(loss, reference.step(inputs, targets))
    assert_same(ours, theirs)
