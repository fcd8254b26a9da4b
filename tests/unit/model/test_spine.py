"""How a model names the layers it can be cut between, and every way to get that wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError
from penstock.engine.model.spine import evaluation_mode, spine_of
from tests.kit.helpers import make_plan


class Model(nn.Module):
    """A model whose spine is whatever a test says."""

    def __init__(self, spine=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
        if spine is not None:
            self._spine = spine

    def spine(self):
        return self._spine(self)


def names(model):
    return [layer.name for layer in spine_of(model)]


def whole(model):
    return [model.first, *model.rest]


def test_a_sequential_is_its_own_spine():
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_a_method_may_return_any_iterable(kind):
    assert names(Model(lambda model: kind(whole(model)))) == ["first", "rest.0", "rest.1"]


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList, list, tuple, lambda layers: nn.Sequential(*layers)],
    ids=["ModuleList", "list", "tuple", "Sequential"],
)
def test_an_attribute_may_be_the_spine(container):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.spine = container([*model.layers])
    assert names(model) == ["layers.0", "layers.1"]


def test_the_whole_model_may_be_one_layer():
    model = Model(lambda model: [model])
    assert [(layer.name, layer.prefix) for layer in spine_of(model)] == [("model", "")]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"Linear does not name its spine.*method `spine\(self\)`"),
        (lambda x: x, r"the model is a function, not an nn\.Module.*method `spine\(self\)`"),
        (nn.Sequential(), r"the spine of Sequential has no layers.*method `spine\(self\)`"),
        (Model(lambda _: []), "the spine of Model has no layers"),
        (Model(lambda _: 3), r"Model\.spine is not a list of layers"),
        (
            Model(lambda model: [*whole(model), F.relu]),
            "entry 3 of the spine is a function, not an nn.Module; wrap functions in a module",
        ),
        (
            Model(lambda model: [*whole(model), nn.Linear(2, 2)]),
            "entry 3 .*Linear.* is not a submodule of the model; assign it to an attribute",
        ),
        (
            Model(lambda model: [*whole(model), nn.BatchNorm1d(2, affine=False)]),
            "entry 3 .*BatchNorm1d.* is not a submodule of the model",
        ),
    ],
)
def test_what_is_no_spine_is_refused_with_advice(model, message):
    with pytest.raises(ModelError, match=message):
        spine_of(model)


def test_a_parameter_outside_the_spine_is_refused():
    with pytest.raises(ModelError, match=r"no layer .* holds first\.weight, first\.bias.*Move it"):
        spine_of(Model(lambda model: model.rest))


def test_many_parameters_outside_the_spine_are_counted():
    with pytest.raises(ModelError, match=r"first\.weight, first\.bias, rest\.0\.weight and 1 more"):
        spine_of(Model(lambda model: [model.rest[1]]))


def test_a_parameter_and_a_buffer_of_the_model_itself_are_refused():
    model = Model(whole)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ModelError, match="holds scale"):
        spine_of(model)
    model = Model(whole)
    model.register_buffer("mask", torch.ones(3))
    with pytest.raises(ModelError, match="holds mask"):
        spine_of(model)


def test_a_sequential_with_a_forward_of_its_own_is_refused():
    class Residual(nn.Sequential):
        def forward(self, value):
            return value + super().forward(value)

    with pytest.raises(ModelError, match=r"Residual .* a forward of its own"):
        spine_of(Residual(nn.Linear(2, 2)))
    # Inside a layer, or with a spine that says what it does, it is nobody's business.
    assert names(nn.Sequential(Residual(nn.Linear(2, 2)))) == ["0"]
    Residual.spine = lambda self: [self]
    assert names(Residual(nn.Linear(2, 2))) == ["model"]


def test_a_repeated_layer_has_the_name_of_every_place():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu, relu)
    assert names(model) == ["0", "1", "2", "3", "4"]


def test_a_layer_that_repeats_more_often_than_it_has_names_is_numbered():
    model = Model(lambda model: [model.first, model.act, *model.rest, model.act, model.act])
    model.act = nn.ReLU()
    assert names(model) == ["first", "act", "rest.0", "rest.1", "act#2", "act#3"]


def test_a_layer_without_state_need_not_belong_to_the_model():
    model = Model(lambda model: [model.first, nn.Flatten(), *model.rest, nn.Flatten()])
    assert names(model) == ["first", "spine.1", "rest.0", "rest.1", "spine.4"]


def test_a_repeated_stateful_layer_in_one_stage_is_summed_and_saved_under_all_its_names():
    shared = nn.Linear(4, 4, dtype=torch.float64)
    ours = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 4, dtype=torch.float64))
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    with pk.Pipeline(ours, make_plan(ours, 2, 2, cuts=[3]), loss=F.cross_entropy) as pipeline:
        pipeline.step(inputs, targets)
        assert list(pipeline.state_dict()) == list(ours.state_dict())
    F.cross_entropy(theirs(inputs), targets).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_repeated_stateless_layer_may_stand_in_several_stages():
    relu = nn.ReLU()
    ours = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 4))
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(6, 4), torch.randint(0, 4, (6,))
    with pk.Pipeline(ours, make_plan(ours, 3, 2), loss=F.cross_entropy) as pipeline:
        loss = pipeline.step(inputs, targets)
    torch.testing.assert_close(loss, F.cross_entropy(theirs(inputs), targets).detach())


@pytest.mark.parametrize("tie", ["module", "parameter"])
def test_weights_tied_across_stages_stay_tied(tie):
    # Megatron, DeepSpeed: tied weights that drifted apart without a word.
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    if tie == "module":
        last = first
    else:
        last.weight = first.weight
    ours = nn.Sequential(first, nn.Tanh(), last).double()
    theirs = copy.deepcopy(ours)
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5)
    with pk.Pipeline(
        ours,
        make_plan(ours, 2, 2),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    ) as pipeline:
        for _ in range(3):
            pipeline.step(inputs, targets)
            F.cross_entropy(theirs(inputs), targets).backward()
            sgd.step()
            sgd.zero_grad()
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(pipeline.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    assert ours[2].weight is ours[0].weight


def test_the_signature_tells_shapes_and_dtypes_apart():
    signatures = {
        spine_of(nn.Sequential(layer))[0].signature
        for layer in (
            nn.Linear(2, 3),
            nn.Linear(3, 2),
            nn.Linear(2, 3, bias=False),
            nn.Linear(2, 3, dtype=torch.float64),
        )
    }
    assert len(signatures) == 4


class Switching(nn.Module):
    """Does more when its mode changes than to note it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dropout()
        self.__dict__["beside"] = nn.Dropout()  # no child

    def train(self, mode=True):
        self.beside.training = mode
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_module_switches_with_its_mode_is_switched_back(training):
    model = Switching().train(training)
    with evaluation_mode(nn.Sequential(model)):
        assert not (model.training or model.layer.training or model.beside.training)
    assert model.training == model.layer.training == model.beside.training == training


def test_modules_get_back_the_modes_that_they_had_each():
    model = nn.Sequential(nn.Sequential(nn.Dropout(), nn.Dropout().eval()), nn.Dropout().eval())
    inner = nn.Sequential(model[1], nn.Dropout()).train()
    model[1].eval()
    modes = [module.training for whole in (model, inner) for module in whole.modules()]
    with evaluation_mode(model, inner):
        assert not any(module.training for whole in (model, inner) for module in whole.modules())
    assert [module.training for whole in (model, inner) for module in whole.modules()] == modes
