"""Modules that no tracer can follow stay whole, and the model is cut around them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.engine.tracing.hidden import SeenCalls, UnseenShapesError


class Experts(nn.Module):
    """Tokens go to the expert that their router likes best: which rows, nobody knows before."""

    def __init__(self, width=8, count=3):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, value):
        flat = value.reshape(-1, value.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel() > 0:
                output = output.index_add(0, rows, weights[rows, None] * expert(flat[rows]))
        return output.reshape(value.shape)


class Mixture(nn.Module):
    """Two blocks with experts between plain layers, and a value that goes past them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        value = self.words(tokens)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            value = value + block(norm(value))
        return self.head(value)


class Halting(nn.Module):
    """Computes as often as a value says."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, value, times):
        for number in range(int(times.max())):
            value = torch.where((number < times)[:, None], self.inner(value).tanh(), value)
        return value, {"times": times + 1}


class Pondering(nn.Module):
    """Hands a dictionary on, from a module that looks at values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.halting = Halting()
        self.last = nn.Linear(8, 3)

    def forward(self, value, times):
        value, told = self.halting(self.first(value), times)
        return self.last(value) * told["times"][:, None]


MODELS = {
    "experts": (Mixture, lambda rows: torch.randint(11, (rows, 5))),
    "halting": (
        Pondering,
        lambda rows: {"value": torch.randn(rows, 6), "times": torch.randint(1, 4, (rows,))},
    ),
}


def made(kind):
    torch.manual_seed(7)
    return kind()


def loss_of(output, targets):
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_cut_around_them_and_trains_as_on_one_device(name):
    kind, draw = MODELS[name]
    torch.manual_seed(0)
    batches = [draw(8) for _ in range(3)]
    model = made(kind)
    outputs = [model(**batch) if isinstance(batch, dict) else model(batch) for batch in batches]
    targets = [torch.randint(output.shape[-1], output.shape[:-1]) for output in outputs]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
    expected = []
    for batch, target in zip(batches, targets, strict=True):
        loss = loss_of(twin(**batch) if isinstance(batch, dict) else twin(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    graph = pk.profile(model, batches[0], loss=loss_of, targets=targets[0], repeats=1, ranks=0)
    assert len(graph.layers) >= 3
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=4, stages=2)
    with pk.Pipeline(
        model, plan, loss=loss_of, optimizer=lambda own: torch.optim.SGD(own, lr=0.2)
    ) as pipeline:
        losses = [float(pipeline.step(*pair)) for pair in zip(batches, targets, strict=True)]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_what_stays_whole_is_told_with_its_line():
    captured = pk.capture(made(Mixture), torch.randint(11, (4, 5)))
    assert "blocks.0 is called as it is, because of test_hidden.py:" in captured.how
    assert {"blocks.0", "blocks.1", "words", "head"} <= {*captured.names}
    assert not any(name.startswith("blocks.0.") for name in captured.names)
    assert {*captured.state_dict()} == {*made(Mixture).state_dict()}


def test_attributes_of_what_stays_whole_may_change():
    model = made(Mixture)
    captured = pk.capture(model, torch.randint(11, (4, 5)))
    model.blocks[0].temperature = 3.0
    model.blocks[0].training = model.blocks[0].training
    captured.check_as_captured()


def test_a_model_that_would_be_but_one_layer_is_refused_with_the_line():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Pondering()

        def forward(self, value, times):
            if value.sum() > 0:
                return self.inner(value, times)
            return self.inner(-value, times)

    with pytest.raises(pk.ModelError, match=r"`if value.sum\(\) > 0:`: which way it goes depends"):
        pk.capture(Wrapper(), MODELS["halting"][1](4))


class Keeps(nn.Module):
    """Returns as many rows as it likes."""

    def forward(self, value):
        return value[value.sum(-1) > 0]


def seen(module, *runs):
    def run(which):
        for given in runs[which]:
            module(given)

    return SeenCalls({"it": module}, run)


def test_shapes_follow_from_inputs():
    module = nn.Flatten(0, 1)
    calls = seen(module, [torch.zeros(2, 3, 4)], [torch.zeros(3, 3, 4)])
    assert calls.next_call("it")(torch.zeros(7, 5, 4)).shape == (35, 4)
    module = nn.Linear(4, 9)
    calls = seen(module, [torch.zeros(2, 4)] * 2, [torch.zeros(5, 4)] * 2)
    assert [calls.next_call("it")(torch.zeros(6, 4)).shape for _ in range(2)] == [(6, 9)] * 2
    with pytest.raises(UnseenShapesError, match="only while it is traced"):
        seen(module, [], []).next_call("it")


def test_shapes_that_follow_from_values_are_not_told():
    positive = torch.tensor([[1.0], [1.0], [-1.0], [1.0]])
    with pytest.raises(UnseenShapesError, match="which no input has"):
        seen(Keeps(), [positive], [positive[1:]])
    with pytest.raises(UnseenShapesError, match="is called 1 times, and with other rows 2"):
        seen(nn.Linear(1, 1), [positive], [positive, positive])
