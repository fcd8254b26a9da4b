"""Profiles: how time is measured, divided among layers, and by what it is disturbed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.deferral import undeferred_parameters
from penstock.training.profiler.alone.bench import flags_of
from penstock.training.profiler.alone.conditions import AcceleratorClock, WallClock, clock_of
from penstock.training.profiler.alone.passes import Passes, SplitPass, WholePass, runs_of
from penstock.training.profiler.alone.rounds import (
    LayerTimes,
    Overhead,
    Overheads,
    PassTimes,
    measure_overheads,
    times_of,
)

CPU = torch.device("cpu")
NONE = Overheads(*[Overhead(0.0)] * 4)


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, forward, backward):
        ctx.backward_seconds = backward
        time.sleep(forward)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Waiting(nn.Module):
    """Sleeps, in forward and in backward."""

    def __init__(self, forward, backward):
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value):
        return Wait.apply(value * self.weight, *self.seconds)


def test_every_layer_gets_its_own_time():
    milliseconds = [(4, 12), (16, 4), (4, 4)]
    model = nn.Sequential(*(Waiting(f / 1e3, b / 1e3) for f, b in milliseconds))

    def is_right():
        layers = pk.profile(model, torch.ones(2, 2), repeats=3, ranks=0).layers
        found = [(layer.forward_seconds, layer.backward_seconds) for layer in layers]
        unit = found[2][0]
        near = [
            (f / unit, b / unit) == (pytest.approx(x / 4, rel=0.3), pytest.approx(y / 4, rel=0.3))
            for (f, b), (x, y) in zip(found, milliseconds, strict=True)
        ]
        again = [layer.recompute_seconds / layer.forward_seconds for layer in layers]
        # Nothing of a wait can be put off.
        inputs = [layer.backward_input_seconds / layer.backward_seconds for layer in layers]
        return all(near) and again == pytest.approx([1] * 3, rel=0.3) and min(inputs) > 0.7

    assert any(is_right() for _ in range(5))


class Late:
    """A clock like that of a GPU: stamps mean nothing until all is settled."""

    tick_seconds = 0.0

    def __init__(self):
        self.stamps, self.settled = [], 0

    def now(self):
        self.stamps.append(time.perf_counter())
        return len(self.stamps) - 1

    def settle(self):
        self.settled = len(self.stamps)

    def seconds(self, start, stop):
        assert start < stop < self.settled
        return self.stamps[stop] - self.stamps[start]


def test_a_clock_that_knows_only_later_serves_as_well():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    runs = runs_of(spine_of(model), None, None)
    passes = Passes(runs, torch.randn(4, 8), Late(), undeferred_parameters(model.modules()))
    rows = [*passes.whole(), *passes.split(), passes.again()]
    assert len(rows) == 6
    assert all(len(row) == 3 and min(row) > 0 for row in rows)
    assert passes.num_leaves == [0, 1, 1]
    # Both halves of a backward give what a whole one gives.
    model.zero_grad()
    passes.whole()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    passes.split()
    assert all(map(torch.equal, whole, (parameter.grad for parameter in model.parameters())))


def test_a_device_has_its_clock():
    assert isinstance(clock_of(CPU), WallClock)
    assert isinstance(clock_of(torch.device("cuda")), AcceleratorClock)
    clock = WallClock()
    start = clock.now()
    assert clock.seconds(start, clock.now()) > 0
    assert clock.tick_seconds > 0


def whole(forward, backward):
    return WholePass(list(forward), list(backward))


def test_layers_say_how_time_divides_and_passes_without_cuts_how_much_it_is():
    rounds = PassTimes(
        whole=[whole((2, 4), (5, 0)), whole((2, 4), (5, 0)), whole((9, 4), (9, 0))],
        split=[SplitPass([3, 4], [4, 0], [3, 0])],
        again=[[1, 4]],
        uncut=[whole((12,), (8,)), whole((12,), (8,))],
        num_leaves=[0, 1],
    )
    overheads = Overheads(Overhead(0), Overhead(1, 1), Overhead(1, 1), Overhead(1))
    first, second = times_of(rounds, overheads, [True, True], 0.5)
    # Forward 6 becomes 12; backward 5 - 1 becomes 8 - 1.
    assert first[:2] == (4, 7)
    assert first.backward_input == (4 - 1) * 7 / 4
    # Forward 3 and both halves, less what measuring takes; less forward 2 and backward 4.
    assert first.split_forward == (3 - 2) * 2
    assert first.split == pytest.approx((3 + 2 - 4) * 7 / 4)
    assert first.recompute == 2
    # Nothing comes to the second layer.
    assert second == LayerTimes(8, 0, 0, 0, 0, 8, 0)
    # Half the distance of the quartiles 7 and 12.5 over the median 7.
    assert first.spread == pytest.approx((12.5 - 7) / 2 / 7)


def test_a_layer_without_weights_does_all_in_the_first_half_and_never_takes_nothing():
    rounds = PassTimes(
        whole=[whole((1, 1), (4, 5))],
        split=[SplitPass([1, 1], [3, 5], [5, 1])],
        again=[[1, 1]],
        uncut=[whole((2,), (5,))],
        num_leaves=[0, 1],
    )
    overheads = Overheads(Overhead(0), Overhead(0, 9), Overhead(0, 9), Overhead(0))
    first, second = times_of(rounds, overheads, [False, False], 0.1)
    assert (first.backward_input, first.split) == (first.backward, 0)
    assert (first.backward, second.backward) == pytest.approx((4 * 5 / 4.5, 0.5 * 5 / 4.5))


def test_cutting_costs_something_and_more_where_more_is_cut():
    found = measure_overheads(WallClock(), CPU)
    assert 0 < found.backward.of(1) < 0.1
    assert found.backward.of(8) >= found.backward.of(1)


TIMES = LayerTimes(1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "trains", "overhead", "words"),
    [
        ({}, True, 0.0, ()),
        ({"backward": 0.4}, False, 0.0, ()),
        ({"backward": 0.4}, True, 0.0, ("takes 40% of its forward",)),
        ({"backward": 0.4}, True, 0.2, ()),
        ({"backward": 0.0}, True, 0.0, ("no gradient comes to it",)),
        ({"spread": 0.2}, True, 0.0, ("spread by 20%",)),
        ({"spread": 0.2, "backward": 0.1}, True, 0.0, ("takes 10%", "spread by 20%")),
        ({"backward": 0.4, "spread": 0.2}, True, 2.0, ("less time than measuring",)),
    ],
)
def test_what_is_odd_is_said(changes, trains, overhead, words):
    overheads = NONE._replace(backward=Overhead(overhead))
    found = [*flags_of(TIMES._replace(**changes), trains, overheads)]
    assert len(found) == len(words)
    for sentence, part in zip(found, words, strict=True):
        assert part in sentence


class Detached(nn.Module):
    def forward(self, value):
        return value.detach()


def test_a_profile_warns_of_layers_that_cannot_learn():
    model = nn.Sequential(nn.Linear(8, 8), Detached(), nn.Linear(8, 8))
    layers = pk.profile(model, torch.randn(4, 8), repeats=1, ranks=0).layers
    assert ["no gradient comes" in " ".join(layer.warnings) for layer in layers] == [
        *(True, False, False)
    ]
    assert layers[0].backward_seconds == 0


class Branching(nn.Module):
    """No chain: what the first layer makes is read by two."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, value):
        hidden = self.first(value)
        return self.left(hidden).tanh() * self.right(hidden)


def test_a_model_that_is_no_chain_is_captured():
    model = Branching()
    inputs = torch.randn(4, 8)
    graph = pk.profile(model, inputs, repeats=1, sizes=[2], ranks=0)
    assert [layer.name for layer in graph.layers] == ["first", "left", "right"]
    assert [layer.inputs for layer in graph.layers] == [(), ("first",), ("left",)]
    assert [layer.after for layer in graph.layers] == [(), (), ("first",)]
    assert graph.crossing_bytes == (inputs.nbytes, 2 * inputs.nbytes)
    assert all(parameter.grad is None for parameter in model.parameters())
