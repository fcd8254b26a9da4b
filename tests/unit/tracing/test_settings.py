"""Attributes that are in the graphs of a captured model may not change behind its back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError
from penstock.engine.tracing import capture
from tests.kit.helpers import make_plan

pytestmark = pytest.mark.xdist_group("capture")  # loading torch.export takes longest


class Scaled(nn.Module):
    """A model that reads some of its attributes, sets one, and has others for whoever trains it."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 2)
        self.alpha, self.epoch, self.calls = 1.0, 0, 0
        self.how = 1.0  # as a capture has one of its own

    @property
    def scale(self):
        return self.alpha * self.factor

    def forward(self, value):
        self.calls += 1
        return self.last(self.drop(self.first(value)) * self.scale * self.how)


@pytest.fixture
def model():
    return Scaled()


@pytest.fixture
def captured(model):
    with pytest.warns(UserWarning, match="sets calls"):
        return capture(model, torch.randn(4, 6))


def test_a_pipeline_refuses_attributes_that_have_changed_since(model, captured):
    batch = torch.randn(4, 6), torch.randint(0, 2, (4,))
    plan = make_plan(captured, 2, 2)
    with pk.Pipeline(captured, plan, loss=F.cross_entropy) as pipeline:
        loss = pipeline.evaluate_loss(batch)
        # What no graph has may change: another reads it, sets it, or a module that stays whole.
        model.epoch, model.calls, model.drop.p = 3, 7, 0.5
        assert pipeline.evaluate_loss(batch) == loss
        model.alpha = 5.0
        for call in (pipeline.step, pipeline.evaluate_loss):
            with pytest.raises(ModelError, match=r"Scaled\.alpha is 5\.0, but it was 1\.0 when"):
                call(batch)
        with pytest.raises(ModelError, match=r"Scaled\.alpha"):
            list(pipeline.steps([batch]))
        model.alpha = 1.0
        assert pipeline.evaluate_loss(batch) == loss


def test_attributes_of_the_class_and_those_set_at_the_capture_are_compared_too(captured, model):
    model.factor = 3.0
    with pytest.raises(ModelError, match=r"factor is 3\.0, but it was 2\.0"):
        captured(torch.randn(4, 6))
    model.factor = 2.0
    captured.alpha = 9.0
    with pytest.raises(ModelError, match=r"alpha is 9\.0, but it was 1\.0"):
        captured.spine()
