"""Buffers of captured models that are assigned and then changed in place: written when final."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError

INPUTS = torch.linspace(-1, 1, 12).view(3, 4)


class Assigning(nn.Module):
    """Assigns its buffer while it runs its layers.

    Args:
        assign: (model, what its first layer gave) to what its second layer is given.
    """

    def __init__(self, assign):
        super().__init__()
        self.assign = assign
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.same, self.relu = nn.Identity(), nn.ReLU(inplace=True)
        self.register_buffer("mean", torch.arange(4.0))
        self.register_buffer("other", torch.arange(4.0) + 5)

    def forward(self, value):
        value = self.assign(self, self.first(value))
        return self.last(value) * self.mean.clone()


def in_place_by_another_name(model, value):
    rows = value.detach().mean(0)
    model.mean = rows
    value = model.second(value)
    rows.add_(1)
    return value


def in_place_by_its_name(model, value):
    model.mean = 0.5 * model.mean + value.detach().mean(0)
    model.mean.clamp_(0, 1)
    return model.second(value)


def of_a_part(model, value):
    model.mean = 0.9 * model.mean
    value = model.second(value)
    model.mean[0].add_(1)
    return value


def of_one_of_its_halves(model, value):
    rows = value.detach().mean(0)
    model.mean = rows
    value = model.second(value)
    rows.split(2)[1].mul_(3)
    return value


def without_gradients(model, value):
    with torch.no_grad():
        model.mean = 0.5 * model.mean + value.mean(0)
        value = value.clone()
    value = model.second(value)
    with torch.no_grad():
        model.mean.add_(1)
    return value


def of_what_it_is_a_view_of(model, value):
    value = value * 1
    model.mean = value.detach()[0]
    return model.second(value.add_(1))


def of_a_buffer_that_it_is_a_view_of(model, value):
    model.mean = model.other.view(2, 2).view(4)
    value = model.second(value)
    model.other.add_(1)
    return value


def through_a_module_that_hands_it_on(model, value):
    rows = value.detach().mean(0)
    model.mean = rows
    same = model.same(rows)
    value = model.second(value)
    same.add_(3)
    return value


def by_a_module(model, value):
    rows = value.detach().mean(0)
    model.mean = rows
    return model.second(value) + model.relu(rows)


def several_at_once(model, value):
    rows = value.detach().mean(0)
    model.mean = rows
    value = model.second(value)
    torch._foreach_add_([rows], 1)
    return value


@pytest.mark.parametrize(
    "assign",
    [
        in_place_by_another_name,
        in_place_by_its_name,
        of_a_part,
        of_one_of_its_halves,
        without_gradients,
        of_what_it_is_a_view_of,
        of_a_buffer_that_it_is_a_view_of,
        through_a_module_that_hands_it_on,
        by_a_module,
        several_at_once,
    ],
)
def test_a_buffer_becomes_what_its_value_becomes(assign):
    torch.manual_seed(0)
    model = Assigning(assign)
    captured_model = copy.deepcopy(model)
    captured = pk.capture(captured_model, INPUTS)
    assert captured.how == "torch.export"
    for scale in (1, 2):
        assert torch.equal(captured(scale * INPUTS), model(scale * INPUTS))
        assert torch.equal(captured_model.mean, model.mean)


def test_a_write_waits_for_nothing_else():
    def assign(model, value):
        model.mean = 0.5 * model.mean + value.detach().mean(0)
        value = model.second(value)
        return value.add_(1)

    captured = pk.capture(Assigning(assign), INPUTS)
    first, second, _ = captured.spine()
    assert "mean" in dict(first.named_buffers())
    assert "mean" not in dict(second.named_buffers())


def shifted(model, value):
    model.mean, model.other = model.other, value.detach().mean(0)
    return model.second(value)


def test_a_model_that_cannot_be_traced_keeps_its_buffers():
    model = Assigning(shifted)
    before = dict(model.named_buffers())
    with pytest.raises(ModelError, match="forward assigns the buffers mean, other, which"):
        pk.capture(model, INPUTS)
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    model(INPUTS)
