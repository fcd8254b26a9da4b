"""What a reviewer broke once: each test tells its story."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock.base.errors import InputError, ModelError, StageError
from tests.kit import training
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import OneDevice, assert_same


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def pipeline_of(model, num_ranks=2, **options):
    options = {"optimizer": nesterov, **options}
    return training.pipeline_of(model, num_ranks=num_ranks, **options)


def pair():
    ours = make_mlp(dropout=0.0)
    return ours, copy.deepcopy(ours)


def test_a_loader_may_use_the_same_memory_for_every_batch():
    batches = [make_batch(13, seed=step) for step in range(5)]

    def loader():
        inputs, targets = (torch.empty_like(one) for one in batches[0])
        for batch in batches:
            inputs.copy_(batch[0])
            targets.copy_(batch[1])
            yield inputs, targets

    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=nesterov)
    with pipeline_of(ours) as pipeline:
        losses = list(pipeline.steps(loader()))
    assert torch.equal(torch.stack(losses), torch.stack([reference.step(*b) for b in batches]))
    assert_same(ours, theirs)


def test_an_optimizer_that_works_in_the_gradients_memory_can_be_taken_back():
    ours, theirs = pair()
    reference = OneDevice(theirs, 4, optimizer=nesterov, clip_norm=0.1)
    with pipeline_of(ours, clip_norm=0.1, post_validate=True) as pipeline:
        for step in range(4):
            batch = make_batch(13, seed=step)
            assert torch.equal(pipeline.step(*batch), reference.step(*batch))
    assert_same(ours, theirs)


class FloatMasters(torch.optim.Optimizer):
    """SGD on copies of the weights in float32."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.float())
            parameter.copy_(master.sub_(parameter.grad, alpha=0.01))


def test_master_weights_are_taken_back_to_the_bit():
    models = [make_mlp(dropout=0.0).bfloat16() for _ in range(2)]
    batches = [(inputs.bfloat16(), targets) for inputs, targets in map(make_batch, [13] * 6)]
    losses = []
    for model, post_validate in zip(models, (False, True), strict=True):
        options = {"clip_norm": 0.1, "post_validate": post_validate, "optimizer": FloatMasters}
        with pipeline_of(model, **options) as pipeline:
            losses.append(torch.stack(list(pipeline.steps(batches))))
    assert torch.equal(*losses)
    assert_same(*models)


class Counting(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value):
        self.count = self.count + 1
        return value + 0.01 * self.count


def test_a_buffer_that_is_replaced_is_taken_back_with_the_step():
    ours = nn.Sequential(nn.Linear(16, 8), Counting(), nn.Linear(8, 4))
    theirs = copy.deepcopy(ours)
    batches = [make_batch(8, seed=step) for step in range(5)]
    reference = OneDevice(theirs, 4, optimizer=nesterov, clip_norm=0.1)
    with pipeline_of(ours, clip_norm=0.1, post_validate=True) as pipeline:
        losses = list(pipeline.steps(batches))
    assert torch.equal(torch.stack(losses), torch.stack([reference.step(*b) for b in batches]))
    assert_same(ours, theirs)


def test_a_step_that_fails_at_its_end_leaves_no_gradients_anywhere():
    model = make_mlp(dropout=0.0)
    calls = iter(range(100))

    def trouble(gradient):
        if next(calls) == 3:  # when the last rank has done all of its own ops
            raise ValueError("once")

    model[0].bias.register_hook(trouble)
    with pipeline_of(model) as pipeline:
        with pytest.raises(StageError, match="once"):
            pipeline.step(*make_batch(8), update=False)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scaler_that_is_not_enabled_does_not_switch_the_check_for_nan_off():
    model = make_mlp(dropout=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    inputs, targets = make_batch(8)
    with (
        pipeline_of(model, grad_scaler=scaler) as pipeline,
        pytest.raises(StageError, match="the loss is nan"),
    ):
        pipeline.step(inputs * float("nan"), targets)


def test_a_batch_norm_that_two_ranks_run_is_refused():
    norm = nn.BatchNorm1d(16)
    model = nn.Sequential(norm, nn.Linear(16, 16), norm, nn.Linear(16, 4))
    with pytest.raises(ModelError, match=r"'0' .BatchNorm1d. on ranks \[0, 1\]"):
        pipeline_of(model)


def test_a_copy_of_the_model_gathers_statistics_of_its_own():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    inputs, targets = make_batch(8)
    with pipeline_of(model, batch_norm="minibatch") as pipeline:
        pipeline.step(inputs, targets)
        other = copy.deepcopy(model)
        before = other[1].running_mean.clone()
        other(inputs)
    assert not torch.equal(other[1].running_mean, before)


def test_a_frozen_stage_needs_no_optimizer_and_a_failing_factory_names_the_stage():
    ours, theirs = pair()
    for model in (ours, theirs):
        for parameter in model[0].parameters():
            parameter.requires_grad = False

    def trained_only(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    reference = OneDevice(theirs, 4, optimizer=trained_only)
    with pipeline_of(ours, 3, optimizer=trained_only) as pipeline:
        pipeline.step(*make_batch(8))
        reference.step(*make_batch(8))
    assert_same(ours, theirs)
    with pytest.raises(InputError, match="optimizer of stage 0 cannot be made: ValueError"):
        pipeline_of(make_mlp(), optimizer=lambda parameters: torch.optim.SGD([], lr=0.1))
