"""Pipelines side by side, of every family that drains, train to the weights of one device; in
float64, since copies add up their gradients in another order."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, same_order_families
from tests.kit.one_device import OneDevice
from tests.kit.reducing import side_by_side
from tests.kit.training import adamw

STEPS = 3
WAYS = ("all-reduce", "sharded", "parameter-server", "servers")


@cache
def on_one_device(num_microbatches):
    """The losses and the weights afterwards."""
    model = make_mlp(dropout=0.0, dtype=torch.float64)
    reference = OneDevice(model, num_microbatches, optimizer=adamw)
    losses = [reference.step(*make_batch(24, torch.float64, step)) for step in range(STEPS)]
    return torch.stack(losses), model.state_dict()


def check(plan, model):
    """Train, where the last two steps overlap, and compare."""
    batches = [make_batch(24, torch.float64, step) for step in range(STEPS)]
    with pk.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=adamw, deadline_seconds=300
    ) as pipeline:
        losses = [pipeline.step(*batches[0]), *pipeline.steps(batches[1:])]
    expected, weights = on_one_device(plan.num_microbatches)
    assert torch.allclose(torch.stack(losses), expected, rtol=0, atol=1e-12)
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("num_microbatches", [8, 9])
@pytest.mark.parametrize("schedule", [*same_order_families(), "zb-auto"])
def test_two_pipelines_train_as_one_device(schedule, num_microbatches):
    model = make_mlp(dropout=0.0, dtype=torch.float64)
    plan = side_by_side(model, schedule, 2, 2, num_microbatches)
    assert plan.num_ranks == 4
    check(plan, model)


@pytest.mark.parametrize("how", ["stage", "layers"])
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1"])
def test_their_stages_may_run_forward_twice(schedule, how):
    model = make_mlp(dropout=0.0, dtype=torch.float64)
    check(side_by_side(model, schedule, 2, 3, 7).recomputing(how), model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "v-half"])
def test_whoever_sums(schedule, way):
    model = make_mlp(dropout=0.0, dtype=torch.float64)
    check(side_by_side(model, schedule, 2, 2, 8).with_reducer(way), model)
