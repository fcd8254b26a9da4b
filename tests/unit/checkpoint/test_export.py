"""Weights that are given to a pipeline under the model's keys: all of them, or none."""

from __future__ import annotations

import pytest
import torch

from penstock.base.errors import InputError
from tests.kit.helpers import make_mlp
from tests.kit.training import adamw, pipeline_of


def state_of(seed):
    return {key: value.clone() for key, value in make_mlp(seed=seed).state_dict().items()}


def test_whole_tensors_are_taken_and_what_nobody_needs_is_left():
    wanted = state_of(7)
    with pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline:
        pipeline.load_dtensor_state_dict({**wanted, "more": torch.ones(1)})
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key])


WRONG = {
    "a key is missing": (lambda state: state.pop("3.bias"), r"the state lacks '3\.bias'; give all"),
    "no tensor": (lambda state: state.update({"3.bias": 3}), r"the state has 3 as '3\.bias'; give"),
    "another shape": (
        lambda state: state.update({"5.weight": torch.zeros(4, 31)}),
        r"has '5\.weight' of shape \(4, 31\), and the model of shape \(4, 32\); build the model",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named_and_changes_nothing(wrong):
    spoil, told = WRONG[wrong]
    spoil(state := state_of(7))
    before = state_of(0)
    with (
        pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline,
        pytest.raises(InputError, match=told),
    ):
        pipeline.load_dtensor_state_dict(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_one_process_gives_copies_of_whole_tensors():
    with pipeline_of(model := make_mlp(), optimizer=adamw) as pipeline:
        given = pipeline.dtensor_state_dict()
        assert given.keys() == model.state_dict().keys()
        given["3.bias"].add_(1)
        assert torch.equal(model[3].bias, state_of(0)["3.bias"])
