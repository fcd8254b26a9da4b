"""Sums of gradients have the order of one device, and where they have not, the docs say so.

"Equal to the bit, and where not" in docs/training.md is this file in words.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.engine.model.spine import run_spine
from tests.kit.helpers import make_plan
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import sgd

KEYS = ("a", "b", "c")


class Down(nn.Module):
    """One value leaves as three skips, and as the output unless that is computed."""

    stashes = KEYS

    def __init__(self, computes):
        super().__init__()
        self.computes = computes

    def forward(self, value):
        return (value.tanh() if self.computes else value), dict.fromkeys(KEYS, value)


class Up(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.recalls = (key,)
        self.straight, self.aside = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, value, **skip):
        return (self.straight(value) + self.aside(*skip.values())).tanh()


class Spread(nn.Module):
    def __init__(self, order, computes):
        super().__init__()
        ups = [Up(key) for key in order]
        layers = [nn.Linear(16, 16), Down(computes), *ups, nn.Linear(16, 3)]
        self.layers = nn.ModuleList(layers)

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        return run_spine(self.spine(), value)


def trained_pair(ours, plan, dtype=torch.float32):
    """(the model through a pipeline, its twin in a plain loop) after two steps."""
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, plan.num_microbatches, optimizer=sgd)
    with pk.Pipeline(ours, plan, loss=F.cross_entropy, optimizer=sgd) as pipeline:
        for _ in range(2):
            batch = torch.randn(8, 16, dtype=dtype), torch.randint(0, 3, (8,))
            losses = pipeline.step(*batch), reference.step(*batch)
            torch.testing.assert_close(*losses)
    return ours, theirs


@pytest.mark.parametrize("order", [*itertools.permutations(KEYS)], ids="".join)
@pytest.mark.parametrize("computes", [False, True], ids=["handed on", "computed"])
def test_gradients_of_a_value_with_several_readers_are_summed_from_the_last(order, computes):
    for (cut, schedule), recompute in itertools.product(
        [([2], "gpipe"), ([3], "gpipe"), ([2, 4], "zb-h1")], ["none", "layers"]
    ):
        torch.manual_seed(0)
        model = Spread(order, computes)
        plan = make_plan(model, len(cut) + 1, 2, schedule, cut, recompute)
        assert_same(*trained_pair(model, plan))


class Tied(nn.Sequential):
    """One weight in the first and the last stage."""

    def __init__(self):
        super().__init__(*[nn.Linear(16, 16, bias=False) for _ in range(4)], nn.Linear(16, 3))
        self[3].weight = self[0].weight


@pytest.mark.parametrize(("num_microbatches", "tolerance"), [(1, 0.0), (4, 1e-12)])
def test_weights_tied_between_stages_are_summed_by_stage(num_microbatches, tolerance):
    torch.manual_seed(0)
    model = Tied().double()
    pair = trained_pair(model, make_plan(model, 2, num_microbatches), torch.float64)
    assert_same(*pair, tolerance)


def test_the_grouping_of_a_value_that_the_chain_hands_on_is_that_of_the_stages():
    torch.manual_seed(0)
    model = Spread(KEYS, computes=False).double()
    model.layers.insert(2, nn.Identity())
    pair = trained_pair(model, make_plan(model, 3, 2, cuts=[2, 4]), torch.float64)
    assert_same(*pair, 1e-12)
