"""Profiles: what layers hold together, hand past each other, and need for themselves."""

from __future__ import annotations

import torch
from torch import nn

import penstock as pk
from penstock.engine.model.spine import spine_of
from penstock.training.profiler.alone.bench import measure_workspaces
from penstock.training.profiler.alone.passes import runs_of
from tests.kit.helpers import Net

ROWS, WIDTH, FLOAT = 8, 16, 4
VALUE = ROWS * WIDTH * FLOAT


def quick(model, inputs, **options):
    return pk.profile(model, inputs, **{"repeats": 1, "ranks": 0, **options})


class Stash(nn.Module):
    stashes = ("wide", "flags")

    def forward(self, value):
        return value * 2, {"wide": torch.cat([value, value], 1), "flags": value.detach() > 0}


class Recall(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.recalls = (key,)

    def forward(self, value, **skips):
        skip = skips[self.recalls[0]][:, : value.shape[1]]
        return value * skip


def test_skips_are_counted_beside_outputs_by_the_layer_that_takes_them():
    model = Net(nn.Linear(WIDTH, WIDTH), Stash(), nn.Tanh(), Recall("flags"), Recall("wide"))
    graph = quick(model, torch.randn(ROWS, WIDTH))
    assert [layer.output_bytes for layer in graph.layers] == [VALUE] * 5
    skips = {"layers.3": ROWS * WIDTH, "layers.4": 2 * VALUE}
    assert [layer.skip_bytes for layer in graph.layers] == [{}, skips, {}, {}, {}]
    both = VALUE + sum(skips.values())
    assert graph.crossing_bytes == (VALUE, both, both, VALUE + 2 * VALUE)


class Both(nn.Module):
    recalls = ("wide", "flags")

    def forward(self, value, wide, flags):
        return value + wide[:, : value.shape[1]] * flags


def test_skips_to_the_same_layer_add_up():
    graph = quick(Net(Stash(), nn.Tanh(), Both()), torch.randn(ROWS, WIDTH))
    assert graph.layers[0].skip_bytes == {"layers.2": 2 * VALUE + ROWS * WIDTH}


class First(nn.Linear):
    """What it makes is read until the end."""

    reads = ()
    produces = (0,)
    readers = ("2",)


class Several(nn.Module):
    """Hands on what it was given beside two tensors that it makes."""

    reads = ("0",)
    produces = (0, 2)
    readers = ("2", "2", "2")
    kind = "made up"

    def forward(self, value):
        return (value.tanh(), value, value[:, :1] * 2)


class Last(nn.Module):
    reads = ("0", "1")
    readers = ("2",)

    def forward(self, values):
        return values[0] + values[1] + values[2]


def test_layers_of_a_captured_model_say_what_they_read_and_make():
    graph = quick(nn.Sequential(First(WIDTH, WIDTH), Several(), Last()), torch.randn(ROWS, 16))
    assert [layer.inputs for layer in graph.layers] == [(), ("0",), ("1",)]
    assert [layer.after for layer in graph.layers] == [(), (), ("0",)]
    assert graph.layers[0].skip_bytes == {"2": VALUE}
    assert graph.layers[1].output_bytes == VALUE + ROWS * FLOAT
    assert graph.layers[1].kind == "made up"
    assert graph.crossing_bytes == (VALUE, 2 * VALUE + ROWS * FLOAT)


def test_tied_weights_and_buffers_are_seen():
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    )
    model[2].weight = model[0].weight
    layers = quick(model, torch.randn(ROWS, WIDTH)).layers
    tied = {"0.weight": WIDTH * WIDTH * FLOAT}
    assert [layer.shared_parameters for layer in layers] == [tied, {}, tied, {}]
    # Mean, variance, and how many batches it saw, in eight bytes.
    assert [layer.buffer_bytes for layer in layers] == [0, 2 * WIDTH * FLOAT + 8, 0, 0]
    assert layers[2].parameter_bytes == FLOAT * (WIDTH * WIDTH + WIDTH)


class Scratch(torch.autograd.Function):
    """Takes memory for a while in both directions, and keeps some of it."""

    @staticmethod
    def forward(ctx, value, gauge, sizes):
        ctx.gauge, ctx.sizes = gauge, sizes
        gauge.take(sizes["forward"] + sizes["kept"])
        gauge.give(sizes["forward"])
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.gauge.take(ctx.sizes["backward"])
        ctx.gauge.give(ctx.sizes["backward"] + ctx.sizes["kept"])
        return gradient, None, None


class Scratching(nn.Module):
    def __init__(self, gauge, **sizes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.gauge, self.sizes = gauge, sizes

    def forward(self, value):
        return Scratch.apply(value * self.weight, self.gauge, self.sizes)


class CountingGauge:
    """An allocator that knows what it is told."""

    def __init__(self):
        self.now = self.most = 1000

    def take(self, size):
        self.now += size
        self.most = max(self.most, self.now)

    def give(self, size):
        self.now -= size

    def taken(self):
        return self.now

    def peak(self):
        return self.most

    def forget_peak(self):
        self.most = self.now


def test_the_workspace_is_what_is_taken_beyond_what_stays():
    gauge = CountingGauge()
    model = nn.Sequential(
        Scratching(gauge, forward=70, backward=20, kept=5),
        Scratching(gauge, forward=10, backward=300, kept=50),
        Scratching(gauge, forward=0, backward=0, kept=9),
    )
    runs = runs_of(spine_of(model), None, None)
    assert measure_workspaces(runs, torch.randn(4, 4), gauge) == [70, 300, 0]
    assert gauge.now == 1000
