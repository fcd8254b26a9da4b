"""A loss whose terms depend on other rows is not what a pipeline trains: ``profile`` says so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.training.profiler.alone import Sample
from penstock.training.profiler.profiling import mixed_rows


def contrastive(output, targets):
    """Every other row of the batch is a negative."""
    left, right = F.normalize(output, dim=-1).chunk(2, dim=-1)
    return F.cross_entropy(10 * left @ right.T, torch.arange(len(output)))


def per_token(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def model_of(kind=nn.Linear):
    torch.manual_seed(0)
    return nn.Sequential(kind(6, 8), nn.Tanh(), kind(8, 8))


TOKENS = torch.randn(5, 3, 6)
LABELS = torch.tensor([[1, 2, -100]] * 3 + [[1, -100, -100]] * 2)
HONEST = {
    "mean": (torch.randn(5, 6), torch.randn(5, 8), F.mse_loss),
    "sum": (torch.randn(5, 6), torch.randn(5, 8), nn.MSELoss(reduction="sum")),
    "padding": (TOKENS, LABELS, per_token),
    "next token": (TOKENS, LABELS, lambda out, own: per_token(out[:, :-1], own[:, 1:])),
    "one row": (torch.randn(1, 6), torch.zeros(1), contrastive),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_mean_a_sum_and_a_mean_over_labels_are_of_rows(name):
    assert mixed_rows(model_of(), Sample(*HONEST[name])) is None


@pytest.mark.parametrize("rows", [2, 5])
def test_a_contrastive_loss_is_told(rows):
    sample = Sample(torch.randn(rows, 6), torch.zeros(rows), contrastive)
    told = mixed_rows(model_of(), sample)
    assert "depends on other rows" in told and "Take larger microbatches" in told


def test_batch_norm_does_not_count():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = torch.get_rng_state(), model[1].running_mean.clone()
    assert mixed_rows(model, Sample(*HONEST["mean"])) is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(model[1].running_mean, before[1]) and model.training


def test_profile_warns_and_keeps_it():
    with pytest.warns(RuntimeWarning, match="negatives of the batch"):
        graph = pk.profile(
            model_of(),
            torch.randn(4, 6),
            loss=contrastive,
            targets=torch.zeros(4),
            repeats=1,
            ranks=0,
        )
    assert "depends on other rows" in str(graph)
    assert pk.LayerGraph.from_json(graph.to_json()).warnings == graph.warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs, targets, loss = HONEST["mean"]
        pk.profile(model_of(), inputs, loss=loss, targets=targets, repeats=1, ranks=0)
