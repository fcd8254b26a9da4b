"""Buffers that one layer writes and another reads, in models whose layers or stages run again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.copied import made_once
from tests.kit.helpers import make_plan

pytestmark = pytest.mark.xdist_group("shared buffers")  # they share captured models
FIRST, SECOND = range(2)
INPUTS = torch.linspace(-1, 1, 32).view(8, 4)


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, value):
        return value.tanh() * self.scale.clone()


class Block(nn.Module):
    """Two layers around a module with buffers.

    Args:
        leaf: that module.
        write: overwrites its buffers, or nothing, between the first layer and it.
    """

    def __init__(self, leaf, write=None):
        super().__init__()
        self.before, self.leaf, self.behind = nn.Linear(4, 4), leaf, nn.Linear(4, 4)
        self.write = write

    def forward(self, value):
        value = self.before(value).tanh()
        if self.write is not None:
            self.write(self.leaf)
        return self.behind(self.leaf(value))


class Blocks(nn.Module):
    """Two blocks, where the leaf of one is overwritten by the model between them."""

    def __init__(self, written):
        super().__init__()
        self.blocks = nn.ModuleList(Block(Scaling()) for _ in range(2))
        self.written = written

    def forward(self, value):
        value = self.blocks[FIRST](value)
        self.blocks[self.written].leaf.scale.add_(1)
        return self.blocks[SECOND](value)


class Only(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, value):
        return self.blocks[0](value)


def normalising():
    return Only(Block(nn.BatchNorm1d(4), lambda norm: norm.running_var.mul_(3)))


MODELS = {
    "by its own block": lambda: Only(Block(Scaling(), lambda leaf: leaf.scale.add_(1))),
    "statistics, by its own block": lambda: normalising().eval(),
    "read before": lambda: Blocks(FIRST),
    "read behind": lambda: Blocks(SECOND),
}


@made_once
def built(name):
    """(a model, what it was captured as)"""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, pk.capture(model, INPUTS)


def loss_of(output):
    return output.square().mean()


def expected(model, num_microbatches):
    for part in INPUTS.chunk(num_microbatches):
        loss_of(model(part)).backward()
    return [*(one.grad for one in model.parameters()), *model.buffers()]


def train(stage, num_microbatches, keep):
    """All forwards, then all backwards."""
    for at, part in enumerate(INPUTS.chunk(num_microbatches)):
        stage.forward(at, part, criterion=loss_of, keep=keep)
    for at in range(num_microbatches):
        if keep is Keep.INPUT:
            stage.recompute(at)
        stage.backward(at, (torch.ones(()),))


def assert_has(model, plain):
    """Gradients and buffers are those that ``expected`` gave."""
    found = [*(one.grad for one in model.parameters()), *model.buffers()]
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["layers", "stage", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_all_are_read_as_they_were(name, recompute, num_microbatches):
    model, captured = built(name)
    plain = expected(copy.deepcopy(model), num_microbatches)
    keep = Keep.EVERYTHING if recompute == "layers" else Keep.INPUT
    again = recompute != "stage"
    stage = Stage(0, spine_of(captured), 0, LayerStreams(0), again)
    train(stage, num_microbatches, keep)
    assert_has(model, plain)


def test_holders_of_a_buffer_still_hold_the_same_afterwards():
    model, captured = built("by its own block")
    stage = Stage(0, spine_of(captured), 0, LayerStreams(0), True)
    loss = stage.forward(0, INPUTS, criterion=loss_of)
    stage.backward(0, (torch.ones(()),))
    assert loss.value.isfinite()
    held = [one for layer in stage.layers for one in layer.module.buffers()]
    assert len(held) == 2
    assert all(one is model.blocks[0].leaf.scale for one in held)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["layers", "stage"])
def test_a_pipeline_learns_the_same(recompute, schedule):
    states = []
    for kind in ("none", recompute):
        _, captured = built("by its own block")
        plan = make_plan(captured, 1, 4, schedule=schedule, recompute=kind)
        with pk.Pipeline(
            captured,
            plan,
            loss=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            deadline_seconds=300,
        ) as pipeline:
            for _ in range(2):
                pipeline.step(INPUTS, torch.zeros(8, 4))
        states.append(captured.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


class Sometimes(nn.Module):
    """Overwrites what it has read only if the rows are positive."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, value):
        if value.sum() > 0:
            self.scale = self.scale + 1
        return value.exp() * self.scale


@pytest.mark.parametrize("recompute", ["layers", "stage"])
def test_a_microbatch_that_left_a_buffer_alone_reads_what_it_read(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(Sometimes(), nn.Linear(4, 4))
    plain = expected(copy.deepcopy(model), 2)
    stage = Stage(0, spine_of(model), 0, LayerStreams(0), recompute == "layers")
    keep = Keep.INPUT if recompute == "stage" else Keep.EVERYTHING
    train(stage, 2, keep)  # rows that are negative, then positive ones
    assert_has(model, plain)


@pytest.mark.parametrize("order", ["as made", "the other first"])
def test_two_names_in_one_module_are_one_buffer(order):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            names = ["one", "other"] if order == "as made" else ["other", "one"]
            shared = torch.ones(4)
            for name in names:
                self.register_buffer(name, shared)

        def forward(self, value):
            self.one.add_(1)
            return value.exp() * self.other.clone()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Twice(), nn.Linear(4, 4))
    plain = expected(copy.deepcopy(model), 1)
    stage = Stage(0, spine_of(model), 0, LayerStreams(0), True)
    stage.forward(0, INPUTS, criterion=loss_of)
    stage.backward(0, (torch.ones(()),))
    found = [*(one.grad for one in model.parameters()), *model.buffers()]
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
