"""Every schedule trains a GPT and a convolutional net to the weights of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
import torch
import torch.nn.functional as F

import penstock as pk
from penstock.demo import gpt
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import crossed, more
from tests.kit.helpers import make_plan, same_order_families
from tests.kit.one_device import assert_same, same
from tests.kit.tiny_models import conv_batch, gpt_batch, make_conv_net, make_gpt

NUM_STEPS = 8


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on."""

    build: Callable
    loss: Callable
    batch: Callable
    num_ranks: int

    def batches(self):
        return [self.batch(2 * self.num_ranks, seed) for seed in range(NUM_STEPS)]


@lru_cache
def on_one_device(case):
    """The losses and the model afterwards."""
    model = case.build()
    reference = SingleDevice(model, 2 * case.num_ranks, case.loss, adamw)
    return torch.stack([reference.step(*batch) for batch in case.batches()]), model


def train(case, schedule):
    """In a pipeline, where half of the steps overlap."""
    tolerance = 1e-12 if schedule == "chimera" else 0.0
    model, batches = case.build(), case.batches()
    plan = make_plan(model, case.num_ranks, 2 * case.num_ranks, schedule)
    with pk.Pipeline(
        model, plan, loss=case.loss, optimizer=adamw, deadline_seconds=300, record=False
    ) as pipeline:
        half = len(batches) // 2
        losses = [pipeline.step(*batch) for batch in batches[:half]]
        losses += pipeline.steps(batches[half:])
    expected, theirs = on_one_device(case)
    assert expected.isfinite().all()
    assert same(torch.stack(losses), expected, tolerance)
    assert_same(model, theirs, tolerance)


@pytest.mark.parametrize("num_ranks", [2, more(4)])
@pytest.mark.parametrize("schedule", same_order_families())
def test_a_gpt_trains_as_on_one_device(schedule, num_ranks):
    train(Case(make_gpt, gpt.loss, gpt_batch, num_ranks), schedule)


@pytest.mark.parametrize(("schedule", "num_ranks"), crossed(same_order_families(), (2, 4)))
def test_a_convolutional_net_trains_as_on_one_device(schedule, num_ranks):
    train(Case(make_conv_net, F.cross_entropy, conv_batch, num_ranks), schedule)


def without_statistics():
    # The two copies of each stage would gather statistics of their own.
    return make_conv_net(torch.float64, statistics=False)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("build", "loss", "batch"),
    [
        (partial(make_gpt, torch.float64), gpt.loss, gpt_batch),
        (without_statistics, F.cross_entropy, partial(conv_batch, dtype=torch.float64)),
    ],
    ids=["gpt", "convolutional"],
)
def test_chimera_sums_in_another_order(build, loss, batch, num_ranks):
    train(Case(build, loss, batch, num_ranks), "chimera")
