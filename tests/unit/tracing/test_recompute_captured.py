"""Layers of captured models that run again: block by block, with what passes by going around."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from examples.models import resnet
from penstock.engine.model import tree
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.run.outcome import MemoryCounter
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.alive import Alive
from tests.kit.copied import made_once
from tests.kit.helpers import Lambda, make_plan

pytestmark = pytest.mark.xdist_group("layers that run again")  # they share captured models
ROWS = 4


class Attending(nn.Module):
    """Blocks with dropout that all read a mask, and a skip over both of them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"widen": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(2)
        )
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, words, mask):
        first = value = self.words(words)
        for block in self.blocks:
            inner = block["widen"](value * mask[:, :, None])
            value = value + self.drop(F.gelu(block["norm"](inner)))
        value = value + first
        value += first.tanh()
        return self.head(value.mean(1))


@made_once
def attending():
    torch.manual_seed(0)
    inputs = torch.randint(0, 7, (ROWS, 6)), torch.rand(ROWS, 6)
    return pk.capture(Attending(), inputs), inputs


@made_once
def small_resnet(granularity="module"):
    torch.manual_seed(0)
    images = resnet.batch(ROWS, "small", torch.Generator().manual_seed(0))[0]
    return pk.capture(resnet.build("small"), images, granularity=granularity), images


MODELS = {
    "attending": attending,
    "resnet": small_resnet,
    "resnet by block": functools.partial(small_resnet, "block"),
}


ALL, NONE = range(9), ()


def stages_of(model, cuts, again):
    """``again``: the stages whose layers run again."""
    layers = spine_of(model)
    borders = [0, *cuts, len(layers)]
    return [
        Stage(index, layers[start:stop], start, LayerStreams(0), index in again)
        for index, (start, stop) in enumerate(itertools.pairwise(borders))
    ]


def values_before(stages, inputs):
    """What each stage is given."""
    values = [inputs]
    with torch.no_grad():
        for stage in stages[:-1]:
            values.append(stage.forward(0, values[-1]).value)
    return values


def kept_bytes(stage, value, is_last):
    """(counted, really alive) after a forward: what is only handed on is none of it."""
    counter = MemoryCounter({stage.index: stage})
    state = [one for layer in stage.layers for one in layer.module.parameters()]
    state += [one for layer in stage.layers for one in layer.module.buffers()]
    alive = Alive(state)
    with alive:
        own = tree.replace(torch.Tensor, torch.clone, value)
        with counter.watching(stage.index, 0):
            stage.forward(0, own, criterion=torch.sum if is_last else None)
    del own
    counter.after(stage.index, 0)
    return counter.peak(1).activation_bytes, alive.num_bytes()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at", [(), (0.3,), (0.6,)])
def test_less_is_kept_and_all_of_it_is_counted(name, at):
    model, inputs = MODELS[name]()
    cuts = [round(share * len(model.names)) for share in at]
    state = sum(buffer.nbytes for buffer in model.buffers())
    totals = []
    for index, value in enumerate(values_before(stages_of(model, cuts, NONE), inputs)):
        is_last = index == len(cuts)
        sizes = []
        for again in (NONE, ALL):
            stage = stages_of(model, cuts, again)[index]
            counted, alive = kept_bytes(stage, value, is_last)
            # Statistics as they were before the first run are kept, too, and are no activations.
            assert counted <= alive <= counted + (state if again else 0)
            sizes.append(counted)
        assert sizes[1] <= sizes[0]
        totals.append(sizes)
    whole, less = map(sum, zip(*totals, strict=True))
    assert less < 0.9 * whole


def test_a_whole_resnet_keeps_little_more_than_a_value_per_block():
    model, images = small_resnet()
    whole, less = (
        kept_bytes(stages_of(model, [], again)[0], images, True)[0] for again in (NONE, ALL)
    )
    assert less < 0.5 * whole


def step(model, cuts, inputs, again, keep):
    """Loss and all gradients and buffers of two microbatches that are in flight at once."""
    stages = stages_of(model, cuts, again)
    found = []
    for microbatch in range(2):
        value = inputs
        for stage in stages:
            criterion = (lambda output: output.square().sum()) if stage is stages[-1] else None
            produced = stage.forward(microbatch, value, 3, criterion, keep)
            value = produced.value
        found.append(value)
    for microbatch in range(2):
        gradients = [torch.ones(())]
        for stage in reversed(stages):
            if keep is Keep.SPLIT:
                gradients = stage.backward_input(microbatch, gradients).inputs
                stage.backward_weight(microbatch)
            else:
                gradients = stage.backward(microbatch, gradients).inputs
    return [*found, *(one.grad for one in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("keep", [Keep.EVERYTHING, Keep.SPLIT])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_the_same_wherever_it_is_cut(name, keep):
    captured, inputs = MODELS[name]()
    count = len(captured.names)
    for cuts in ([], [count // 2], [count // 3, count // 3 + 1, count - 2]):
        one, other = (
            step(copy.deepcopy(captured), cuts, inputs, again, keep) for again in (NONE, ALL)
        )
        assert all(map(torch.equal, one, other))


def test_a_pipeline_counts_less_and_learns_the_same():
    peaks, losses = [], []
    for recompute in ("none", "layers"):
        captured, images = small_resnet()
        plan = make_plan(captured, 2, 2, recompute=recompute)
        targets = torch.arange(ROWS) % 10
        with pk.Pipeline(
            captured,
            plan,
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            count_memory=True,
            deadline_seconds=300,
        ) as pipeline:
            losses.append([pipeline.step(images, targets) for _ in range(2)])
            peaks.append([peak.activation_bytes for peak in pipeline.peaks])
    assert losses[0] == losses[1]
    assert all(after < 0.8 * before for before, after in zip(*peaks, strict=True))


class Noisy(nn.Module):
    """One layer runs in training only; in evaluation all goes around it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, value):
        first = value = self.blocks[0](value)
        if self.training:
            value = value * self.blocks[1](value)
        return self.blocks[2](value + first)


def test_what_goes_around_follows_the_mode():
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 4)
    model = Noisy()
    captured = pk.capture(model, inputs)
    (stage,) = stages_of(captured, [], ALL)
    for training in (False, True, False, True):
        captured.train(training)
        stage.forward(0, inputs, criterion=torch.sum)
        stage.backward(0, [torch.ones(())])
        found = [one.grad for one in model.parameters()]
        model.zero_grad()
        model(inputs).sum().backward()
        assert [one is None for one in found] == [one.grad is None for one in model.parameters()]
        for ours, theirs in zip(found, model.parameters(), strict=True):
            if ours is not None:
                torch.testing.assert_close(ours, theirs.grad)
        model.zero_grad()


class Adding(nn.Module):
    def forward(self, values):
        kept, other = values
        return kept, other.tanh() + kept


class Overwriting(nn.Module):
    def forward(self, values):
        kept, other = values
        return kept.add_(1) * other


@pytest.mark.parametrize("again", [ALL, (0,), (1,)], ids=["all", "first", "second"])
@pytest.mark.parametrize("cuts", [[], [1], [2]])
def test_what_is_handed_on_may_be_overwritten_by_whoever_comes_later(cuts, again):
    model = nn.Sequential(
        Lambda(lambda value, linear: (linear(value), linear(value)), nn.Linear(4, 4)),
        Adding(),
        Overwriting(),
        nn.Linear(4, 4),
    )
    inputs = torch.randn(3, 4)
    one, other = (
        step(copy.deepcopy(model), cuts, inputs, which, Keep.EVERYTHING) for which in (NONE, again)
    )
    assert all(map(torch.equal, one, other))


class Repeating(nn.Module):
    """The same block three times, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())])

    def forward(self, value):
        for _ in range(3):
            value = self.blocks[0](value)
        return value


@pytest.mark.parametrize(
    ("captured", "units"),
    [
        (lambda: small_resnet()[0], 5),  # the stem, three blocks, the head
        (lambda: pk.capture(Repeating(), torch.randn(2, 4)), 3),
        (
            lambda: pk.capture(
                nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(2, 4)
            ),
            2,
        ),
    ],
)
def test_a_unit_is_a_block_or_begins_with_weights(captured, units):
    layers = captured().spine()
    numbers = [layer.unit for layer in layers]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(units))
