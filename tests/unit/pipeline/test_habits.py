"""What people try on a pipeline that a module or an optimizer has."""

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.training.pipeline.habits import REMEDIES
from tests.kit.helpers import make_plan


@pytest.fixture(scope="module")
def pipeline():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pk.Pipeline(model, make_plan(model, 2, 4), loss=nn.functional.mse_loss) as made:
        yield made


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_each_says_what_does_it(pipeline, name):
    with pytest.raises(pk.InputError, match=rf"a Pipeline has no {name}: .{{20}}"):
        getattr(pipeline, name)
    assert not hasattr(pipeline, name)


def test_a_call_says_what_to_call(pipeline):
    with pytest.raises(pk.InputError, match=r"cannot be called: step\(inputs, targets\)"):
        pipeline(torch.ones(2, 2))


def test_what_nobody_means_is_an_ordinary_attribute_error(pipeline):
    with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'nonsense'"):
        _ = pipeline.nonsense


def test_no_remedy_is_for_what_a_pipeline_has():
    assert not [name for name in REMEDIES if hasattr(pk.Pipeline, name)]
