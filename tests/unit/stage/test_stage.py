"""A stage by itself: forward and backward against plain autograd, and what it keeps."""

from __future__ import annotations

import copy
import subprocess
import sys
from enum import Enum
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook

from penstock.base.errors import InputError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.helpers import Lambda, wanting
from tests.kit.launch import ENVIRONMENT
from tests.kit.paths import ROOT


def stage_of(*modules, first_layer=1):
    return Stage(1, spine_of(nn.Sequential(*modules)), first_layer, LayerStreams(0))


def overwriting_hook():
    layer = nn.Linear(6, 6)
    layer.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    return layer


FIRST_LAYERS = {
    "Linear": lambda: nn.Linear(6, 6),
    "in place in a hook": overwriting_hook,
    "in place": lambda: nn.ReLU(inplace=True),
    "in place behind a view": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)),
    "in place by hand": lambda: Lambda(lambda value: value.mul_(2)),
    "identity": nn.Identity,
    "view": lambda: Lambda(lambda value: value[:, 1:]),
    "transposed": lambda: Lambda(lambda value: value.t()),
    "one of several views": lambda: Lambda(lambda value: value.chunk(2, dim=1)[0]),
    "expanded": lambda: Lambda(lambda value: value[:, :1].expand(-1, 5)),
    "twice the input": lambda: Lambda(lambda value: value + value),
}


@pytest.mark.parametrize("last", ["nothing", "view", "Tanh"])
@pytest.mark.parametrize("name", FIRST_LAYERS)
@pytest.mark.parametrize("knows_layers", [False, True])
def test_forward_and_backward_are_those_of_plain_autograd(name, last, knows_layers):
    tail = {"nothing": nn.Identity(), "view": Lambda(lambda v: v.reshape(-1)), "Tanh": nn.Tanh()}
    modules = [FIRST_LAYERS[name](), tail[last]]
    twins = copy.deepcopy(modules)
    inputs = torch.randn(4, 6)
    plain = inputs.clone().requires_grad_()
    expected = nn.Sequential(*twins)(plain * 1)  # not a leaf, so that it may be overwritten
    seed = torch.randn(expected.shape)
    expected.backward(seed)

    stage = stage_of(*modules)
    if knows_layers:
        stage.forward(1, wanting(inputs.clone()))
    output = stage.forward(0, wanting(inputs.clone())).value
    assert torch.equal(output, expected)
    assert output.is_leaf
    assert output.requires_grad
    (gradient,) = stage.backward(0, [seed]).inputs
    assert torch.equal(gradient, plain.grad)
    theirs = nn.Sequential(*twins).parameters()
    for mine, other in zip(stage.parameters(), theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("given", [torch.randn(4, 6), torch.randn(4, 2, 6).transpose(0, 1)])
def test_a_gradient_has_the_strides_that_its_layer_gives_it(given):
    layer = nn.Linear(6, 6)
    plain = given.detach().requires_grad_()
    (expected,) = torch.autograd.grad(layer(plain).sum(), plain)

    stage = stage_of(layer)
    for microbatch in range(2):
        output = stage.forward(microbatch, wanting(given)).value
        (gradient,) = stage.backward(microbatch, [torch.ones_like(output)]).inputs
        assert gradient.stride() == expected.stride()


def test_microbatches_may_be_under_way_together_and_accumulate():
    stage = stage_of(nn.Linear(3, 3))
    inputs = torch.randn(3, 2, 3)
    for k in range(3):
        stage.forward(k, inputs[k])
    for k in (1, 2, 0):
        stage.backward(k, [torch.ones(2, 3)])
    (parameter, _) = stage.parameters()
    torch.testing.assert_close(parameter.grad, inputs.sum((0, 1)).expand(3, 3))


def test_an_output_that_gets_no_gradient_contributes_none():
    stage = stage_of(Lambda(lambda value: (value * 2, value * 3)))
    stage.forward(0, wanting(torch.ones(2)))
    assert torch.equal(stage.backward(0, [None, torch.ones(2)]).inputs[0], torch.full((2,), 3.0))


def test_without_any_gradient_nothing_flows_on():
    stage = stage_of(nn.Linear(2, 2))
    stage.forward(0, torch.ones(1, 2))
    assert stage.backward(0, [None]).inputs == [None]
    assert next(stage.parameters()).grad is None


class Colour(Enum):
    RED = 1


def test_values_without_gradients_pass_through():
    extras = (torch.tensor([1, 2]), torch.tensor([True]), None, 3, "text", Colour.RED, torch.int8)
    stage = stage_of(Lambda(lambda value: (value[0] * 2, *value[1:])))
    outputs = stage.forward(0, wanting((torch.ones(2), *extras))).value
    assert torch.equal(outputs[1], extras[0])
    assert outputs[2:] == extras[1:]
    gradients = stage.backward(0, [torch.ones(2), *[None] * len(extras)]).inputs
    assert torch.equal(gradients[0], torch.full((2,), 2.0))
    assert gradients[1:] == [None] * len(extras)


def test_an_input_that_is_not_used_has_no_gradient():
    stage = stage_of(Lambda(lambda value: value["used"] * 2))
    stage.forward(0, wanting({"unused": torch.ones(1), "used": torch.ones(1)}))
    assert stage.backward(0, [torch.ones(1)]).inputs == [None, torch.tensor([2.0])]


def test_each_leaf_leaves_with_the_requires_grad_that_it_had():
    stage = stage_of(
        Lambda(lambda v, linear: (linear(v[0]), v[1] + 1, v[2], v[1].bool()), nn.Linear(3, 3))
    )
    given = (wanting(torch.ones(2, 3)), torch.zeros(2), torch.ones(2, requires_grad=True))
    for keep in Keep:
        value, _ = stage.forward(0, given, keep=keep)
        assert [leaf.requires_grad for leaf in value] == [True, False, True, False]
        assert all(leaf.is_leaf for leaf in value)
        if keep is Keep.INPUT:
            stage.recompute(0)
        gradients = stage.backward(0, [torch.ones(2, 3), torch.ones(2), torch.ones(2), None]).inputs
        assert [gradient is None for gradient in gradients] == [False, True, False]
    with torch.no_grad():
        assert not any(leaf.requires_grad for leaf in stage.forward(0, given).value)


def test_a_loss_leaves_without_wanting_a_gradient():
    for modules in ((nn.Linear(3, 3),), (nn.Linear(3, 3), nn.Dropout(0.5))):
        stage = stage_of(*modules)
        assert not stage.forward(0, torch.ones(2, 3), criterion=torch.sum).value.requires_grad


def test_complex_values_have_gradients():
    stage = stage_of(Lambda(lambda value: value * 2j))
    stage.forward(0, wanting(torch.ones(2, dtype=torch.complex64)))
    assert torch.equal(stage.backward(0, [torch.ones(2) + 0j]).inputs[0], torch.full((2,), -2j))


@pytest.mark.parametrize("value", [SimpleNamespace(hidden=torch.ones(1)), {1, 2}, object()])
def test_an_object_that_may_hide_tensors_is_refused(value):
    # Its tensors would carry the graph across the border, or lose it on the way.
    with pytest.raises(InputError, match=rf"stage 1 returned a {type(value).__name__}.*register"):
        stage_of(Lambda(lambda _: value)).forward(0, torch.ones(1))


def test_the_first_stage_wants_no_gradient_of_its_input():
    stage = stage_of(nn.Linear(2, 2), first_layer=0)
    stage.forward(0, wanting(torch.ones(1, 2)))
    assert stage.backward(0, [torch.ones(1, 2)]).inputs == [None]
    assert next(stage.parameters()).grad is not None


def test_frozen_parameters_pass_gradients_on_and_get_none():
    layer = nn.Linear(2, 2).requires_grad_(False)
    stage = stage_of(layer)
    stage.forward(0, wanting(torch.ones(1, 2)))
    assert torch.equal(stage.backward(0, [torch.ones(1, 2)]).inputs[0], layer.weight.sum(0)[None])
    assert layer.weight.grad is None
    first = stage_of(nn.Linear(2, 2).requires_grad_(False), first_layer=0)
    first.forward(0, torch.ones(1, 2))
    assert first.backward(0, [torch.ones(1, 2)]).inputs == [None]


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda output: output, r"must be one number, but it has shape \(2, 3\); reduce it"),
        (lambda output: output.sum().item(), "a plain float, which has no gradient"),
        (lambda _: None, "must be one number, but it has NoneType"),
        (lambda output: output.sum().detach(), "the loss has no gradient: it was detached"),
        (lambda output: output.argmax().float(), "the loss has no gradient"),
        (lambda output: (output > 0).sum(), "the loss has no gradient"),
    ],
)
def test_what_is_no_loss_is_refused(criterion, message):
    with pytest.raises(InputError, match=message):
        stage_of(nn.Linear(3, 3)).forward(0, torch.ones(2, 3), criterion=criterion)


def test_a_loss_of_one_element_is_a_scalar():
    stage = stage_of(nn.Linear(3, 1))
    loss = stage.forward(0, torch.ones(1, 3), criterion=lambda output: output).value
    assert loss.shape == ()
    stage.backward(0, [torch.tensor(2.0)])
    assert torch.equal(next(stage.parameters()).grad, torch.full((1, 3), 2.0))


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_a_kept_loss_keeps_no_large_storage(loss):
    # torch's pipelining kept each microbatch's: mse_loss returns a view of a full-size buffer.
    stage = stage_of(nn.Linear(64, 64))
    inputs = torch.randn(32, 64)
    kept = stage.forward(0, inputs, criterion=lambda output: loss(output, inputs)).value
    assert kept.untyped_storage().nbytes() == kept.element_size()


@pytest.mark.parametrize("first_layer", [0, 1])
def test_a_sent_output_is_not_kept_alive(first_layer):
    # The backward of a sum needs no output; only what autograd itself saves may stay.
    outputs = []

    def doubled(value):
        outputs.append(value * 2)
        return outputs[-1]

    stage = stage_of(nn.Linear(8, 8), Lambda(doubled), first_layer=first_layer)
    sent = stage.forward(0, torch.ones(4, 8)).value
    memory = StorageWeakRef(sent.untyped_storage())
    outputs.clear()
    del sent
    assert memory.expired()
    stage.backward(0, [torch.ones(4, 8)])


def test_after_its_backward_a_microbatch_leaves_nothing():
    stage = stage_of(nn.Linear(8, 8), nn.Tanh())
    inputs = torch.ones(4, 8)
    memory = StorageWeakRef(inputs.untyped_storage())
    stage.forward(0, inputs)
    del inputs
    assert not memory.expired()
    stage.backward(0, [torch.ones(4, 8)])
    assert memory.expired()


def test_forgetting_drops_what_unfinished_microbatches_left():
    stage = stage_of(nn.Linear(8, 8))
    inputs = torch.ones(4, 8)
    stage.forward(0, inputs)
    memory = StorageWeakRef(inputs.untyped_storage())
    del inputs
    stage.forget()
    assert memory.expired()
    assert stage.in_flight == 0
    with pytest.raises(InputError, match="backward of microbatch 0 on stage 1 needs a forward"):
        stage.backward(0, [torch.ones(4, 8)])


def test_without_gradients_nothing_is_kept():
    stage = stage_of(nn.Linear(8, 8))
    inputs = torch.ones(4, 8)
    with torch.no_grad():
        stage.forward(0, inputs)
    memory = StorageWeakRef(inputs.untyped_storage())
    del inputs
    assert memory.expired()


def test_a_stage_needs_layers():
    with pytest.raises(InputError, match="stage 1 has no layers"):
        Stage(1, (), 0, LayerStreams(0))


def test_shared_parameters_are_listed_once():
    shared = nn.Linear(2, 2)
    assert len([*stage_of(shared, nn.ReLU(), shared).parameters()]) == 2


def test_layers_that_draw_in_one_mode_only_draw_their_own_stream_whenever_they_are_in_it():
    modules = nn.Linear(6, 6), nn.Dropout(0.5)
    inputs = torch.randn(4, 6)

    def dropped(stage, microbatch):
        return stage.forward(microbatch, inputs, step=3).value

    modules[1].eval()
    stage = stage_of(*modules)
    for microbatch in range(3):  # now it is known that nothing draws in this mode
        dropped(stage, microbatch)
    modules[1].train()
    first = dropped(stage, 3)
    torch.manual_seed(5)  # of no use to a layer with a stream of its own
    stage_from_start = stage_of(*modules)
    assert torch.equal(first, dropped(stage_from_start, 3))
    modules[1].eval()
    assert torch.equal(dropped(stage, 4), modules[0](inputs))


class ListensByItself(nn.Module):
    """Calls itself by other means than torch's."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __call__(self, value):
        self.num_calls += 1
        return super().__call__(value)

    def forward(self, value):
        return value


def listen_to_all(layer, listener):
    return register_module_forward_hook(lambda module, *_: listener() if module is layer else None)


LISTEN = {
    "before": lambda layer, listener: layer.register_forward_pre_hook(lambda *_: listener()),
    "behind": lambda layer, listener: layer.register_forward_hook(lambda *_: listener()),
    "back, before": lambda layer, listener: layer.register_full_backward_pre_hook(
        lambda *_: listener()
    ),
    "back": lambda layer, listener: layer.register_full_backward_hook(lambda *_: listener()),
    "all modules": listen_to_all,
}


@pytest.mark.parametrize("way", LISTEN)
def test_who_listens_to_a_layer_from_some_minibatch_on_hears_of_it_until_it_ends(way):
    layer = nn.Linear(3, 3)
    stage = stage_of(layer, nn.ReLU())
    heard = []

    def pass_through(step):
        value = stage.forward(0, wanting(torch.ones(2, 3)), step).value
        stage.backward(0, [torch.ones_like(value)])
        stage.forget()
        return len(heard)

    assert [pass_through(step) for step in range(3)] == [0, 0, 0]
    hook = LISTEN[way](layer, lambda: heard.append(way))
    assert [pass_through(3), pass_through(3)] == [1, 2]  # also if only the minibatch has ended
    hook.remove()
    assert pass_through(4) == 2


def test_a_layer_that_is_called_in_its_own_way_is_called_so():
    layer = ListensByItself()
    stage = stage_of(nn.Linear(3, 3), layer)
    for step in range(3):
        stage.forward(0, torch.ones(2, 3), step)
    assert layer.num_calls == 3


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_weight_in_the_place_of_the_parameter_is_used(is_parameter):
    """As some libraries compute weights of others, and set them; the parameter may still be there,
    behind it."""
    layer = nn.Linear(3, 2, bias=False)
    if not is_parameter:
        del layer.weight
    vars(layer)["weight"] = torch.ones(2, 3)
    stage = stage_of(layer, nn.ReLU())
    for step in range(2):
        assert torch.equal(stage.forward(0, torch.ones(1, 3), step).value, torch.full((1, 2), 3.0))


@pytest.mark.parametrize(("owner", "name"), [(nn.Linear, "forward"), (nn.Module, "__call__")])
def test_what_replaces_calls_of_all_layers_is_called(monkeypatch, owner, name):
    stage, calls = stage_of(nn.Linear(3, 3), nn.ReLU()), []
    original = getattr(owner, name)
    stage.forward(0, torch.ones(2, 3), 0)
    monkeypatch.setattr(
        owner, name, lambda self, *args: calls.append(self) or original(self, *args)
    )
    for step in range(1, 3):
        stage.forward(0, torch.ones(2, 3), step)
    assert sum(type(layer) is nn.Linear for layer in calls) == 2


PROFILED = """
import torch
from torch import nn
from tests.unit.stage.test_stage import stage_of

stage = stage_of(nn.Linear(3, 3), nn.ReLU())
for step in range(2):
    stage.forward(0, torch.ones(2, 3), step)
with torch.profiler.profile(with_stack=True, with_modules=True) as profiled:
    stage.forward(0, torch.ones(2, 3), 2)
assert any("nn.Module: Linear" in event.name for event in profiled.events())
"""


def test_a_profiler_sees_layers_by_name():
    """In a process of its own, whose stacks are few."""
    done = subprocess.run(
        [sys.executable, "-c", PROFILED],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_scripted_layer_runs_for_each_microbatch():
    stage = stage_of(torch.jit.script(nn.Linear(3, 3)), nn.ReLU())
    for microbatch in range(3):
        value = stage.forward(microbatch, wanting(torch.ones(2, 3)), 0).value
        stage.backward(microbatch, [torch.ones_like(value)])


def test_a_layer_whose_forward_was_replaced_may_overwrite_what_it_is_given():
    """As other libraries replace it; the leaf where its gradient will be is not given away."""
    layer = nn.Linear(3, 3)
    layer.forward = partial(lambda own, value: nn.Linear.forward(own, value.mul_(2)), layer)
    stage = stage_of(layer, first_layer=1)
    gradients = []
    for step in range(2):
        value = stage.forward(0, wanting(torch.ones(2, 3)), step).value
        gradients += stage.backward(0, [torch.ones_like(value)]).inputs
    torch.testing.assert_close(gradients[0], 2 * layer.weight.detach().sum(0).expand(2, 3))
    assert torch.equal(*gradients)
