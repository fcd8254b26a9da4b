"""Models without values get the same ones however they are spread."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.errors import ModelError
from tests.kit.helpers import make_batch
from tests.kit.one_device import assert_same
from tests.kit.tiny_models import conv_batch, make_conv_net
from tests.kit.training import pipeline_of, sgd


def on_meta(build):
    with torch.device("meta"):
        return build()


def mixed():
    return nn.Sequential(
        nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8),
        nn.BatchNorm1d(8), nn.Linear(8, 4),
    )  # fmt: skip


def trained(build, batch, *how, **options):
    model = on_meta(build)
    parameters, generator = [*model.parameters()], torch.get_rng_state()
    with pipeline_of(model, *how, optimizer=sgd, **options) as pipeline:
        losses = [pipeline.step(*batch(8, seed=step)).cpu() for step in range(2)]
    assert all(mine is other for mine, other in zip(model.parameters(), parameters, strict=True))
    assert not any(parameter.is_meta for parameter in parameters)
    assert torch.equal(torch.get_rng_state(), generator)
    return model, losses


@pytest.mark.parametrize(
    ("build", "batch"), [(mixed, make_batch), (make_conv_net, conv_batch)], ids=["mixed", "conv"]
)
def test_values_depend_on_the_seed_and_not_on_the_plan(build, batch):
    theirs, expected = trained(build, batch, "1f1b", 2)
    assert torch.stack(expected).isfinite().all()
    for how in (("1f1b", 1), ("zb-v", 2), ("gpipe", 4)):
        ours, losses = trained(build, batch, *how)
        assert losses == expected
        assert_same(ours, theirs)
    other, _ = trained(build, batch, "1f1b", 2, seed=4)
    assert not torch.equal(next(other.parameters()), next(theirs.parameters()))


def test_values_depend_on_no_device(accelerator):
    ours, losses = trained(mixed, make_batch, devices=["emu:1", "emu:0"])
    theirs, expected = trained(mixed, make_batch)
    assert losses == expected
    assert_same(ours, theirs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def spine(self):
        return [self.embedding, self.middle, self.head]


@pytest.mark.parametrize("cuts", [[1], [2]])
def test_a_tied_weight_has_the_values_of_its_first_layer(cuts):
    model = on_meta(Tied)
    words = torch.arange(7)
    with pipeline_of(model, cuts=cuts, loss=F.cross_entropy, optimizer=sgd) as pipeline:
        assert model.head.weight is model.embedding.weight
        assert model.embedding.weight.std() > 0.6  # an embedding's values, and no linear layer's
        assert pipeline.step(words, words).isfinite()


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, value):
        return value * self.scale


class Forgetful(Bare):
    def reset_parameters(self):
        pass


@pytest.mark.parametrize(
    ("build", "message"),
    [(Bare, "'1' .Bare. holds 'scale' .* no reset_parameters"), (Forgetful, "leaves 'scale' with")],
)
def test_what_has_no_way_to_its_values_is_refused_by_name(build, message):
    model = on_meta(lambda: nn.Sequential(nn.Linear(16, 4), build()))
    with pytest.raises(ModelError, match=message):
        pipeline_of(model)
