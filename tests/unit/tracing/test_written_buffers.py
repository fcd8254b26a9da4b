"""Buffers that a forward writes and computes with, while several microbatches are in flight."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError, StageError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Stage
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.copied import made_once
from tests.kit.helpers import Lambda, make_plan
from tests.kit.training import pipeline_of, sgd

pytestmark = pytest.mark.xdist_group("written buffers")  # they share captured models


class Counter(nn.Module):
    """``value * count``, where the count is one more than in the forward before.

    Args:
        how: it is counted and used.
    """

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, value):
        if self.how == "assigned":
            self.count = self.count + 1
        else:
            self.count += 1
        if self.how == "used at the end":
            return self.last(self.first(value)) * self.count.clone()
        if self.how == "used before and after":
            value = self.first(value) * self.count.clone()
            return self.last(value) + self.count.clone()
        counted = self.count.clone() if self.how == "copied" else self.count
        return self.last(self.first(value) * counted)


@made_once
def captured(how):
    torch.manual_seed(0)
    return capture(Counter(how), torch.randn(2, 4))


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, value):
        self.count += 1
        return value.exp() * self.count


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Alone(), nn.Linear(4, 4), nn.Linear(4, 4))


BATCH = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(1, -1, 32).view(8, 4)


def pipeline(model, schedule="1f1b", recompute="none", **options):
    options = {"loss": F.mse_loss, "optimizer": sgd, "recompute": recompute, **options}
    return pipeline_of(model, schedule, **options)


@pytest.mark.parametrize("count_memory", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("build", "layer", "buffer"),
    [(chain, "1", "1.count"), (lambda: captured("in place"), "first", "count")],
)
def test_a_buffer_that_is_overwritten_too_soon_is_named(
    build, layer, buffer, schedule, count_memory
):
    with (
        pipeline(build(), schedule, count_memory=count_memory) as running,
        pytest.raises(
            StageError, match=f"layer '{layer}' overwrites its buffer '{buffer}'"
        ) as told,
    ):
        running.step(*BATCH)
    assert "microbatches are in flight" in str(told.value)
    assert "self.count = self.count + 1" in str(told.value)
    assert "stage 0, microbatch 0, op 0" in str(told.value)


def losses_and_state(model, steps):
    return [steps(*BATCH).item() for _ in range(2)], copy.deepcopy(model.state_dict())


def assert_as_on_one_device(build, **options):
    one = build()
    device = SingleDevice(one, 4, F.mse_loss, sgd)
    expected = losses_and_state(one, device.step)
    ours = build()
    with pipeline(ours, **options) as running:
        found = losses_and_state(ours, running.step)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][key], expected[1][key]) for key in found[1])
    assert not any(buffer.requires_grad for buffer in ours.buffers())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("how", ["assigned", "copied", "used at the end", "used before and after"])
def test_what_the_error_tells_to_do_works(how, schedule):
    assert_as_on_one_device(lambda: captured(how), schedule=schedule)


@pytest.mark.parametrize("recompute", ["stage", "layers"])
def test_so_does_recomputing(recompute):
    assert_as_on_one_device(chain, recompute=recompute)


@pytest.mark.parametrize("how", ["in place", "copied", "assigned", "used at the end"])
def test_a_captured_model_goes_backward_wherever_the_model_does(how):
    model = captured(how)
    for _ in range(2):
        model(BATCH[0]).sum().backward()
    plain = Counter(how)
    plain.load_state_dict({**model.state_dict(), "count": torch.zeros(1)})
    for _ in range(2):
        plain(BATCH[0]).sum().backward()
    assert model.count.item() == plain.count.item() == 2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)


class HandingOn(Alone):
    def forward(self, value):
        self.count += 1
        return value, self.count


def test_a_buffer_that_goes_to_the_next_stage_is_as_it_was_then():
    def build():
        torch.manual_seed(0)
        last = Lambda(lambda pair, linear: linear(pair[0]) * pair[1].clone(), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), HandingOn(), last)

    for schedule in ("gpipe", "1f1b"):
        ours, theirs = build(), build()
        device = SingleDevice(theirs, 4, F.mse_loss, sgd)
        plan = make_plan(ours, 2, 4, schedule=schedule, cuts=[2])
        with pk.Pipeline(ours, plan, loss=F.mse_loss, optimizer=sgd) as running:
            for _ in range(2):
                assert running.step(*BATCH) == device.step(*BATCH)


class Overwriting(nn.Module):
    """Spoils what its own backward needs; no buffer has to do with it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("other", torch.zeros(7))

    def forward(self, value):
        value = self.linear(value).exp()
        squared = value.square()
        value.zero_()
        return squared


class Squashing(nn.Module):
    """Overwrites a value that its backward needs, of the shape of a buffer of another layer."""

    def forward(self, value):
        return value.sigmoid().add_(1)


class Table(nn.Module):
    """Never overwrites its buffers in a forward, but did so once before; they look alike."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.zeros(1).copy_(torch.ones(1)))

    def forward(self, value):
        for buffer in self.buffers():
            value = value + buffer
        return value


def test_a_value_that_a_layer_made_is_no_buffer():
    stage = Stage(1, spine_of(nn.Sequential(Squashing(), Table("table"))), 1, LayerStreams(0))
    stage.forward(0, torch.randn(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="is output 0 of Sigmoid") as told:
        stage.backward(0, [torch.ones(1)])
    assert not isinstance(told.value, ModelError)


def overwritten_too_soon(model):
    stage = Stage(1, spine_of(model), 1, LayerStreams(0))
    for microbatch in range(2):
        stage.forward(microbatch, torch.randn(3, 1, requires_grad=True))
    with pytest.raises(ModelError) as told:
        stage.backward(0, [torch.ones(3, 1)])
    return str(told.value)


def test_where_several_buffers_fit_all_are_named():
    told = overwritten_too_soon(nn.Sequential(Alone(), Alone(), Table("old")))
    assert "may be '0.count' of layer '0' or '1.count' of layer '1', in place" in told
    # A buffer of another type is not what autograd speaks of.
    whole = Table("old")
    whole.old = whole.old.long().add_(0).add_(0)
    told = overwritten_too_soon(nn.Sequential(Alone(), whole))
    assert "layer '0' overwrites its buffer '0.count'" in told


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inner, self.last = nn.Linear(4, 4), Alone(), nn.Linear(4, 4)

    def forward(self, value):
        self.inner.count += 1
        return self.last(self.linear(value) * self.inner.count)


@made_once
def inside():
    torch.manual_seed(0)
    return capture(Inside(), torch.randn(2, 4))


def test_captured_layers_are_not_told_to_assign_what_capture_does_not_see():
    with (
        pipeline(inside(), "gpipe") as running,
        pytest.raises(StageError, match=r"overwrites its buffer 'inner\.count'") as told,
    ):
        running.step(*BATCH)
    assert "`self.count.clone()`" in str(told.value)
    assert 'recompute to "stage"' in str(told.value)
    assert "Assign" not in str(told.value)


def test_recomputing_works_for_buffers_inside():
    assert_as_on_one_device(inside, recompute="stage")


def test_other_values_that_are_overwritten_are_told_as_autograd_tells_them():
    with (
        pipeline(nn.Sequential(Overwriting(), nn.Linear(4, 4))) as running,
        pytest.raises(StageError, match="RuntimeError: one of the variables needed") as told,
    ):
        running.step(*BATCH)
    assert not isinstance(told.value.__cause__, ModelError)
