"""Kernels are chosen by strides, so what is cut, copied or handed on must keep them.

Each model is what a random search left when it was made as small as possible; each once gave other
bits than a plain loop.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import run_spine, spine_of
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.helpers import Lambda, make_plan, wanting
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.training import sgd


def sum_of_pixels(value):
    return value.sum((2, 3))


def crop(value):
    return value[..., 1:, :-1]


def every_other_channel(value):
    return value.contiguous(memory_format=torch.channels_last)[:, ::2]


# (layers, cut, shape of a row)
MODELS = {
    "gradient without strides": lambda: (
        [nn.BatchNorm2d(8), Lambda(sum_of_pixels), nn.Linear(8, 3)],
        1,
        (8, 6, 6),
    ),
    "gradient in another order": lambda: (
        [nn.BatchNorm2d(8), Lambda(lambda v: v.permute(0, 2, 3, 1).flatten(1)), nn.Linear(288, 3)],
        1,
        (8, 6, 6),
    ),
    "input with gaps": lambda: (
        [Lambda(crop), Lambda(sum_of_pixels), nn.Linear(4, 3)],
        1,
        (4, 6, 6),
    ),
    "gaps inside a stage": lambda: (
        [Lambda(crop), Lambda(sum_of_pixels), nn.Linear(4, 3)],
        2,
        (4, 6, 6),
    ),
    "gaps before a batch norm": lambda: (
        [Lambda(every_other_channel), nn.BatchNorm2d(4), Lambda(sum_of_pixels), nn.Linear(4, 3)],
        1,
        (8, 6, 6),
    ),
}


def assert_trains_as_one_device(ours, plan, batches, autocast=None):
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, plan.num_microbatches, optimizer=sgd)
    with pk.Pipeline(ours, plan, loss=F.cross_entropy, optimizer=sgd) as pipeline:
        for batch in batches:
            with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                loss = pipeline.step(*batch)
            # Views, where the pipeline copies.
            parts = [pk.Microbatches(value.tensor_split(plan.num_microbatches)) for value in batch]
            assert torch.equal(loss, reference.step(*parts, autocast=autocast))
    assert_same(ours, theirs)


@pytest.mark.parametrize("recompute", ["none", "stage", "layers"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_and_a_second_run_keep_strides(name, num_microbatches, schedule, recompute):
    torch.manual_seed(0)
    layers, cut, shape = MODELS[name]()
    model = nn.Sequential(*layers)
    plan = make_plan(model, 2, num_microbatches, schedule, [cut], recompute)
    batches = [(torch.randn(16, *shape), torch.randint(0, 3, (16,))) for _ in range(2)]
    assert_trains_as_one_device(model, plan, batches)


class Down(nn.Module):
    stashes = ("first",)

    def forward(self, value):
        return value, {"first": value[:, :1]}


class Up(nn.Module):
    recalls = ("first",)

    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, value, first):
        return self.head((value + self.scale(first)).mean(1))


class Skipping(nn.Module):
    """A skip that is every fourth row of what it is a view of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), Down(), Up()])

    def spine(self):
        return list(self.layers)

    def forward(self, value):
        return run_spine(self.spine(), value)


@pytest.mark.parametrize("recompute", ["none", "stage", "layers"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_skip_with_gaps_gives_the_same_under_autocast(schedule, recompute):
    torch.manual_seed(0)
    model = Skipping()
    plan = make_plan(model, 2, 2, schedule, [2], recompute)
    batches = [(torch.randn(8, 4, 16), torch.randint(0, 3, (8,))) for _ in range(2)]
    assert_trains_as_one_device(model, plan, batches, torch.bfloat16)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("view", [crop, every_other_channel])
def test_a_minibatch_may_be_a_view(view, num_microbatches):
    torch.manual_seed(0)
    batches = [(view(torch.randn(16, 4, 6, 6)), torch.randint(0, 3, (16,))) for _ in range(2)]
    channels = batches[0][0].shape[1]
    model = nn.Sequential(nn.BatchNorm2d(channels), Lambda(sum_of_pixels), nn.Linear(channels, 3))
    plan = make_plan(model, 2, num_microbatches)
    assert_trains_as_one_device(model, plan, batches)


class Biased(nn.Module):
    """autograd gives the parameter's gradient and the input's the same memory."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2, 3))

    def forward(self, value):
        return value + self.bias.view(-1)


@pytest.mark.parametrize("keep", [Keep.EVERYTHING, Keep.INPUT])
def test_what_is_handed_on_is_no_sum_of_later_microbatches(keep):
    stage = Stage(1, spine_of(nn.Sequential(Biased(), nn.Tanh())), 1, LayerStreams(0))
    handed = []
    for microbatch in range(2):
        stage.forward(microbatch, wanting(torch.zeros(6)), keep=keep)
        if keep is Keep.INPUT:
            stage.recompute(microbatch)
        handed += stage.backward(microbatch, [torch.ones(6)]).inputs
    expected = 1 - torch.tanh(torch.ones(6)).square()
    torch.testing.assert_close(torch.stack(handed), expected.expand(2, 6))
    (bias,) = stage.parameters()
    torch.testing.assert_close(bias.grad.view(-1), 2 * expected)


def test_a_gradient_that_came_in_is_no_sum_of_later_microbatches():
    stage = Stage(0, spine_of(nn.Sequential(Biased())), 0, LayerStreams(0))
    seed = torch.ones(6)
    for microbatch in range(2):
        stage.forward(microbatch, torch.ones(6))
        stage.backward(microbatch, [seed])
    assert torch.equal(seed, torch.ones(6))
