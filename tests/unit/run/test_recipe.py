"""What training takes beside the model: what contradicts itself, and the loss scale's rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError
from penstock.engine.model.optimizer_factory import Parameters
from penstock.engine.run.recipe import LossScale, Recipe
from tests.kit.training import sgd


@given(
    verdicts=st.lists(st.booleans(), max_size=30),
    start=st.floats(2.0**-20, 2.0**127, width=32),
    growth=st.floats(1.5, 1000.0),
    backoff=st.floats(0.01, 0.9),
    interval=st.integers(1, 5),
)
def test_the_scale_follows_the_rule_of_torch_to_the_bit(verdicts, start, growth, backoff, interval):
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=start,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
    )
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale.of(scaler)
    for finite in verdicts:
        scaler.scale(torch.zeros(1))
        weight.grad = torch.tensor([1.0 if finite else float("inf")])
        scaler.unscale_(optimizer)
        if finite:
            assert weight.grad.item() == (torch.ones(1) * ours.inverse).item()
        scaler.step(optimizer)
        scaler.update()
        ours = ours.after(finite)
        assert ours == LossScale.of(scaler)
    other = torch.amp.GradScaler("cpu")
    ours.store(other)
    assert other.state_dict() == scaler.state_dict()


def test_a_scaler_that_is_off_has_no_scale():
    assert LossScale.of(torch.amp.GradScaler("cpu", enabled=False)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0, but must be > 0"),
        ({"clip_norm": float("inf")}, "must be > 0 and finite"),
        ({"clip_norm": float("nan")}, "must be > 0 and finite"),
        ({"optimizer": None, "clip_norm": 1.0}, "clip_norm needs an optimizer"),
        ({"optimizer": None, "lr_scheduler": len}, "lr_scheduler needs an optimizer"),
        ({"post_validate": True}, "give clip_norm or a grad_scaler too"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Recipe(**{"optimizer": sgd, **options})


def test_only_what_depends_on_all_ranks_needs_agreement():
    scale = LossScale.of(torch.amp.GradScaler("cpu"))
    assert not Recipe(optimizer=sgd).needs_agreement
    assert Recipe(optimizer=sgd, clip_norm=1.0).needs_agreement
    assert Recipe(optimizer=sgd, loss_scale=scale).needs_agreement


def test_parameters_are_a_list_with_names():
    model = nn.Linear(2, 3)
    parameters = Parameters([*model.named_parameters()])
    assert list(parameters) == list(model.parameters())
    assert dict(parameters.named()) == dict(model.named_parameters())
    assert len(torch.optim.SGD(parameters, lr=1.0).param_groups[0]["params"]) == 2
