"""Labels of -100 that are spread unevenly over microbatches count for nothing, and it is said."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from penstock.base.errors import StageError
from penstock.engine.model.batches import IgnoredLabels
from penstock.engine.model.microbatches import Microbatches
from tests.kit.training import pipeline_of, sgd


def looked(*rows, whole=True):
    labels = torch.tensor(rows)
    parts = [*labels.split(1)]
    noticing = IgnoredLabels()
    noticing.look(labels if whole else Microbatches(parts), parts)
    return noticing, labels, parts


@pytest.mark.parametrize("whole", [True, False])
def test_uneven_shares_are_told_once(whole):
    with pytest.warns(RuntimeWarning, match=r"some targets are -100.*weight=lambda labels"):
        noticing, labels, parts = looked([1, -100], [1, 2], whole=whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noticing.look(labels, parts)
        looked([1, -100], [-100, 2], whole=whole)  # each counts half
        looked([1.0, -100.0], [1.0, 2.0], whole=whole)  # no labels


def test_a_pipeline_tells_of_them_unless_it_was_told_what_counts():
    inputs, targets = torch.randn(8, 6), torch.randint(0, 3, (8,))
    targets[0] = -100
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    options = {"optimizer": sgd}
    with pipeline_of(model, **options) as pipeline:
        with pytest.warns(RuntimeWarning, match="some targets are -100"):
            pipeline.step(inputs, targets)
        targets[1] = -100
        with pytest.raises(StageError, match="All labels of this microbatch are -100: give"):
            pipeline.step(inputs, targets)
    weight = {"weight": lambda labels: (labels != -100).sum()}
    with warnings.catch_warnings(), pipeline_of(model, **options, **weight) as pipeline:
        warnings.simplefilter("error")
        expected = F.cross_entropy(model(inputs), targets)
        assert float(pipeline.step(inputs, targets)) == pytest.approx(expected.item())
