"""Models without values get the same ones however they are spread."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.base.errors import InputError, ModelError
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


def drawn(build, batch, *how, **options):
    """A model that was built with other values, and drawn layer by layer."""
    torch.manual_seed(99)
    model = build()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1)
    parameters, generator = [*model.parameters()], torch.get_rng_state()
    with pipeline_of(model, *how, optimizer=sgd, init="per-layer", **options) as pipeline:
        assert torch.equal(torch.get_rng_state(), generator)
        losses = [pipeline.step(*batch(8, seed=step)).cpu() for step in range(2)]
    assert all(mine is other for mine, other in zip(model.parameters(), parameters, strict=True))
    return model, losses


def pooled():
    """With a module that holds a buffer and has no way to draw it."""
    table = nn.Module()
    table.register_buffer("scale", torch.full((8,), 2.0))
    table.forward = lambda value: value * table.scale
    return nn.Sequential(*mixed()[:3], table, *mixed()[3:])


@pytest.mark.parametrize(
    ("build", "batch"), [(mixed, make_batch), (make_conv_net, conv_batch)], ids=["mixed", "conv"]
)
@pytest.mark.parametrize("how", [("1f1b", 1), ("1f1b", 2), ("zb-v", 2), ("gpipe", 4)])
def test_values_drawn_anew_are_those_of_the_model_on_meta(build, batch, how):
    theirs, expected = trained(build, batch, "1f1b", 2)
    ours, losses = drawn(build, batch, *how)
    assert losses == expected
    assert_same(ours, theirs)
    other, _ = drawn(build, batch, *how, seed=4)
    assert not torch.equal(next(other.parameters()), next(theirs.parameters()))


@pytest.mark.parametrize("devices", ["emu:2", ["emu:1", "emu:0"], ["emu:1", "cpu"]])
def test_values_drawn_anew_depend_on_no_device(accelerator, devices):
    theirs, expected = trained(mixed, make_batch)
    ours, losses = drawn(mixed, make_batch, devices=devices)
    assert losses == expected
    assert_same(ours, theirs)
    moved, losses = drawn(lambda: mixed().to("emu:3"), make_batch, devices=devices)
    assert losses == expected
    assert_same(moved, theirs)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 2), ("zb-v", 2), ("chimera", 2)])
def test_tied_weights_are_drawn_by_their_first_layer(schedule, num_ranks):
    def untied():
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16) for _ in range(6)]
        layers[3] = nn.Linear(16, 16, bias=False)
        return nn.Sequential(*layers)

    def build():
        model = untied()
        model[3].weight = model[5].weight = model[2].weight
        return model

    found = []
    for model, how in (
        (on_meta(untied), ("1f1b", 1)),
        (on_meta(build), ("1f1b", 1)),
        (on_meta(build), (schedule, num_ranks)),
        (build(), (schedule, num_ranks)),
    ):
        init = "given" if model[0].weight.is_meta else "per-layer"
        with pipeline_of(model, *how, optimizer=sgd, init=init):
            found.append({key: value.clone() for key, value in model.state_dict().items()})
    right = {**found[0], "3.weight": found[0]["2.weight"], "5.weight": found[0]["2.weight"]}
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in right.items())


def test_buffers_that_nobody_sets_keep_their_values():
    model = pooled()
    with pipeline_of(model, optimizer=sgd, init="per-layer"):
        assert model[3].scale.tolist() == [2.0] * 8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            Bare,
            "'1' .Bare. holds 'scale' and has no reset_parameters .* leave init='per-layer' out",
        ),
        (Forgetful, "leaves 'scale' without values; .* leave init='per-layer' out"),
    ],
)
def test_what_cannot_be_drawn_anew_is_refused_by_name(build, message):
    model = nn.Sequential(nn.Linear(16, 4), build())
    before = model[0].weight.clone()
    with pytest.raises(ModelError, match=message):
        pipeline_of(model, init="per-layer")
    if build is Bare:  # nothing has been drawn yet
        assert torch.equal(model[0].weight, before)
        assert torch.equal(model[1].scale, torch.ones(4))


def test_another_way_to_begin_is_refused():
    with pytest.raises(InputError, match="init is 'layers'; use given or per-layer"):
        pipeline_of(mixed(), init="layers")
