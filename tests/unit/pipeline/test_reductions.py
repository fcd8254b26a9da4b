"""A loss that says how it reduces its terms is held to what the pipeline does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import InputError
from tests.kit.helpers import make_mlp
from tests.kit.training import pipeline_of


def test_a_loss_that_reduces_otherwise_than_the_pipeline_joins_is_refused():
    model = make_mlp()
    total = nn.MSELoss(reduction="sum")
    with pytest.raises(InputError, match=r"MSELoss has reduction='sum'.*reduction='sum'\)"):
        pipeline_of(model, loss=total)
    with pytest.raises(InputError, match=r"MSELoss has reduction='mean'.*reduction='mean'\)"):
        pipeline_of(model, loss=nn.MSELoss(), reduction="sum")
    with pipeline_of(model, loss=total, reduction="sum"):
        pass


def test_a_loss_that_weighs_classes_is_warned_of_unless_microbatches_have_weights():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    with pytest.warns(RuntimeWarning, match=r"weight=lambda targets: loss.weight\[targets\].sum"):
        pipeline_of(make_mlp(), loss=loss).close()
    pipeline_of(make_mlp(), loss=loss, weight=lambda targets: loss.weight[targets].sum()).close()
