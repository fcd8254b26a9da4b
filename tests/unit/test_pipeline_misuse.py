"""Mistakes that a newcomer makes with a pipeline; each story ends in one clear message."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.run.single_device import SingleDevice
from tests.helpers import make_batch, make_mlp, make_plan


class TanhInPlace(nn.Module):
    """Writes into its input, and not twice the same."""

    def forward(self, value):
        return value.mul_(2).tanh_()


def test_an_in_place_first_layer_changes_neither_the_result_nor_the_callers_data():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(TanhInPlace(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

    inputs, targets = torch.randn(8, 4), torch.randint(0, 2, (8,))
    before = inputs.clone()
    ours, theirs = build(), build()
    reference = SingleDevice(theirs, 4, F.cross_entropy)
    # Several microbatches are in flight in the first stage while it writes in place.
    with pk.Pipeline(ours, make_plan(ours, 2, 4, cuts=[3]), loss=F.cross_entropy) as pipeline:
        assert torch.equal(pipeline.step(inputs, targets), reference.step(inputs, targets))
        pipeline.evaluate(inputs)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": lambda parameters: None}, "optimizer function made is of type NoneType"),
        ({"optimizer": torch.optim.SGD(make_mlp().parameters())}, "optimizer is of type SGD"),
        ({"loss": 3}, "loss is of type int; give a function"),
        ({"weight": 0.5}, "weight is of type float"),
        ({"transport": "process-group"}, "torchrun --nproc-per-node=2"),
    ],
)
def test_what_cannot_train_is_refused_at_once(options, message):
    model = make_mlp()
    with pytest.raises(pk.errors.InputError, match=message):
        pk.Pipeline(model, make_plan(model, 2, 4), **{"loss": F.cross_entropy, **options})


def test_a_plan_must_be_a_plan():
    with pytest.raises(pk.errors.InputError, match="the plan is of type dict; make one with"):
        pk.Pipeline(make_mlp(), {})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pk.plan(make_mlp(), microbatches=2), "the graph is of type Sequential"),
        (lambda: pk.simulate("1f1b"), "the schedule is of type str"),
        (lambda: pk.check("1f1b"), "the schedule is of type str"),
        (lambda: pk.draw(3), "the timeline is of type int"),
    ],
)
def test_a_name_or_a_model_where_a_value_belongs(call, message):
    with pytest.raises(pk.errors.InputError, match=message):
        call()


def test_a_rank_without_ops_is_refused():
    with pytest.raises(pk.errors.ScheduleError, match="rank 1 has no ops"):
        pk.check(pk.Schedule.parse("0F0,0B0\n\n1F0,1B0\n"))


def test_a_second_step_at_the_same_time_is_refused_and_harms_nothing():
    started, go_on = threading.Event(), threading.Event()

    def slow_loss(outputs, targets):
        started.set()
        assert go_on.wait(20)
        return F.cross_entropy(outputs, targets)

    model = make_mlp()
    with pk.Pipeline(model, make_plan(model, 2, 2), loss=slow_loss) as pipeline:
        first = threading.Thread(target=pipeline.step, args=make_batch(4))
        first.start()
        assert started.wait(20)
        with pytest.raises(pk.errors.InputError, match="running already, in another thread"):
            pipeline.step(*make_batch(4))
        go_on.set()
        first.join()
        pipeline.step(*make_batch(4))


def test_a_plan_for_gpus_is_refused_and_says_what_trains_today():
    model = make_mlp()
    plan = make_plan(model, 2, 4)
    cores = tuple(pk.Device(name=f"cpu{rank}", kind="cpu") for rank in range(2))
    pk.Pipeline(model, replace(plan, devices=cores)).close()
    gpus = tuple(pk.Device(name=f"gpu{rank}", kind="gpu") for rank in range(2))
    with pytest.raises(
        pk.errors.InputError, match=r"is for GPUs \(gpu0, gpu1\), but Penstock trains on CPUs today"
    ):
        pk.Pipeline(model, replace(plan, devices=gpus))
