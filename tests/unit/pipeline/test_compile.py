"""``Pipeline(…, compile=…)``: what is refused before anything is learned; what users compiled."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.base.errors import InputError, ModelError, StageError
from penstock.engine.stage.backends import replaying_on
from tests.kit.awkward_layers import REFUSED, WIDTH, Scaled, linear
from tests.kit.examples import in_turns
from tests.kit.training import pipeline_of, sgd


def built(layer: nn.Module, **options):
    """(a model, a pipeline that compiles it)."""
    model = nn.Sequential(linear(), layer, linear(), linear())
    options = {"loss": F.mse_loss, "optimizer": sgd, "compile": "aot_eager", **options}
    return model, pipeline_of(model, **options)


def step(pipeline, rows=16):
    return pipeline.step(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_refused(model, pipeline, message, rows=16):
    before = weights(model)
    with pytest.raises(StageError, match=message):
        step(pipeline, rows)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_no_pass_can_be_made_of_are_named(name):
    make, message = REFUSED[name]
    model, pipeline = built(make())
    attributes = set(vars(model[1]))
    with pipeline:
        assert_refused(model, pipeline, rf"(?s)layer '1' .*{message}.*leave compile=… out")
    assert set(vars(model[1])) == attributes


def test_a_loss_that_draws_is_named():
    _, pipeline = built(linear(), loss=lambda outputs, targets: F.dropout(outputs - targets).mean())
    with pipeline, pytest.raises(StageError, match="the loss draws random numbers"):
        step(pipeline)


@pytest.mark.parametrize("rows", [14, 20])
def test_another_shape_is_refused(rows):
    model, pipeline = built(linear())
    with pipeline:
        step(pipeline)
        assert_refused(model, pipeline, rf"compiled for \(4, {WIDTH}\) float32.*drop_last", rows)
        step(pipeline)  # and it goes on as before


CHANGES = {
    "attribute": (lambda layer: setattr(layer, "scale", 2.0), "'scale' was 1.0 .* is 2.0 now"),
    "hook": (lambda layer: layer.register_forward_hook(print), "has the hook <built-in"),
    "frozen": (lambda layer: layer.inner.requires_grad_(False), "'weight' was trained"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_passes_would_not_see_is_refused(name):
    change, message = CHANGES[name]
    model, pipeline = built(Scaled())
    with pipeline:
        step(pipeline)
        change(model[1])
        assert_refused(model, pipeline, message)


@dataclass
class Settings:
    scale: float = 1.0

    def to_dict(self):
        return {"scale": self.scale}


class Configured(Scaled):
    """Reads a number from settings that it was given."""

    def __init__(self, settings, decay=1.0) -> None:
        super().__init__()
        self.settings, self.decay = settings, decay

    def forward(self, value):
        held = self.settings if isinstance(self.settings, dict | list) else vars(self.settings)
        key = 0 if isinstance(held, list) else "scale"
        if self.decay != 1.0:
            held[key] *= self.decay
        return self.inner(value) * held[key]


SETTINGS = [{"scale": 1.0}, [1.0], SimpleNamespace(scale=1.0), Settings()]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda own: type(own).__name__)
def test_settings_that_change_are_refused(settings):
    model, pipeline = built(Configured(copy.deepcopy(settings)))
    with pipeline:
        step(pipeline)
        step(pipeline)
        own = model[1].settings
        if isinstance(own, dict | list):
            own[0 if isinstance(own, list) else "scale"] = 2.0
        else:
            own.scale = 2.0
        assert_refused(model, pipeline, "in its attribute 'settings' was 1.0 .* is 2.0 now")


def test_settings_that_a_layer_changes_itself_are_refused_before_it_learns():
    model, pipeline = built(Configured({"scale": 1.0}, decay=0.5))
    with pipeline:
        assert_refused(
            model, pipeline, r"'scale' in its attribute 'settings' was 1.0 .* is 0\.\d+ now"
        )


def test_modes_have_passes_of_their_own():
    model, pipeline = built(nn.Dropout(0.5).eval())
    with pipeline:
        model[1].eval()
        step(pipeline)
        model[1].train()
        assert_refused(model, pipeline, "draws random numbers")


def test_layers_with_hooks_are_refused_when_it_is_built():
    layer = linear()
    layer.register_forward_hook(print)
    with pytest.raises(ModelError, match=r"layer '1' has the hook .* leave compile=… out"):
        built(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "tvm"}, "compile is 'tvm'; use inductor or aot_eager"),
        ({"batch_norm": "minibatch"}, "batch_norm='minibatch'"),
    ],
    ids=str,
)
def test_contradictory_arguments_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        built(nn.BatchNorm1d(WIDTH), **options)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"no compiler 'no-such-compiler' here; install g\+\+"):
        built(linear(), compile=True)
    built(linear(), compile="aot_eager")[1].close()


def test_devices_that_nothing_is_replayed_on_are_named():
    cpu, cuda, meta = map(torch.device, ("cpu", "cuda", "meta"))
    assert replaying_on([cpu, cpu]) == "inductor"
    assert replaying_on([cuda]) == "cudagraphs"
    with pytest.raises(InputError, match="compute on cpu and meta"):
        replaying_on([cpu, meta])


class Residual(nn.Module):
    """A block with a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.ReLU(), linear())

    def forward(self, value):
        return value + self.inner(value)


def _within(model):
    for block in model:
        block.inner = torch.compile(block.inner, backend="aot_eager")
    return model


def _in_place(model):
    for block in model:
        block.compile(backend="aot_eager")
    return model


COMPILED_BY_USERS = {
    "layers": lambda model: nn.Sequential(*(torch.compile(b, backend="aot_eager") for b in model)),
    "in place": _in_place,
    "modules within": _within,
    "whole": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:the model was compiled as a whole:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "schedule", "compile"),
    in_turns(itertools.product(COMPILED_BY_USERS, ("1f1b", "zb-h1"), (False, "aot_eager")), 3),
)
def test_what_users_have_compiled_is_trained(name, schedule, compile):
    def run(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(Residual() for _ in range(4))))
        options = {"loss": F.mse_loss, "optimizer": sgd, "compile": compile}
        torch.manual_seed(1)
        with pipeline_of(model, schedule, **options) as pipeline:
            return torch.stack([step(pipeline) for _ in range(3)])

    torch._dynamo.reset()
    expected = run(lambda model: model)
    torch.testing.assert_close(run(COMPILED_BY_USERS[name]), expected)


def test_a_model_that_was_compiled_as_a_whole_is_said_to_run_in_layers():
    model = torch.compile(nn.Sequential(linear(), linear()), backend="aot_eager")
    with pytest.warns(RuntimeWarning, match=r"compiled as a whole.*compile=True"):
        pipeline_of(model, loss=F.mse_loss).close()
