"""Tensors get other memory and stay what they are, also where torch does not let them take
``.data``: from and to ``meta`` here, and other makers' devices in ``tests/numerics``."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn

from penstock.base.errors import RunError
from penstock.engine.device.crossing import give_memory


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


def values_of(parameter):
    return torch.arange(float(parameter.numel())).view_as(parameter)


@pytest.fixture(params=["cpu", "meta"])
def parameter(request):
    return Marked(torch.zeros(2, 3, device=request.param))


def test_it_keeps_object_class_attributes_and_weak_references(parameter):
    parameter.no_decay = True
    reference = weakref.ref(parameter)
    give_memory(parameter, values_of(parameter))
    assert reference() is parameter
    assert type(parameter) is Marked and parameter.no_decay
    assert parameter.requires_grad and parameter.is_leaf
    assert torch.equal(parameter.detach(), values_of(parameter))


@pytest.mark.parametrize("is_trained", [True, False])
def test_it_keeps_whether_it_is_trained(parameter, is_trained):
    parameter.requires_grad_(is_trained)
    give_memory(parameter, values_of(parameter))
    assert parameter.requires_grad is is_trained


def test_its_memory_is_that_of_the_values_and_its_versions_are_its_own(parameter):
    values = values_of(parameter)
    give_memory(parameter, values)
    assert parameter.data_ptr() == values.data_ptr()
    before = parameter._version
    values.add_(1)
    assert parameter._version == before


def test_hooks_go_on_seeing_gradients(parameter):
    seen = []
    parameter.register_hook(lambda gradient: seen.append("hook") or gradient * 2)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    give_memory(parameter, values_of(parameter))
    parameter.sum().backward()
    assert seen == ["hook", "accumulated"]
    assert torch.equal(parameter.grad, torch.full((2, 3), 2.0))
    handle.remove()
    parameter.sum().backward()
    assert seen == ["hook", "accumulated", "hook"]


def test_copies_and_pickles_have_the_values(parameter):
    give_memory(parameter, values_of(parameter))
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert torch.equal(other.detach(), values_of(parameter))


def test_an_optimizer_goes_on_with_it(parameter):
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    give_memory(parameter, values_of(parameter))
    parameter.sum().backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), values_of(parameter) - 1)


def test_a_backward_through_a_graph_from_before_is_refused():
    """It would add to the gradient of what nobody holds any more."""
    parameter = nn.Parameter(torch.ones(3))
    loss = (parameter * 2).sum()
    give_memory(parameter, torch.ones(3, device="meta"))
    with pytest.raises(RunError, match=r"shape \(3,\) that has gone from cpu to meta .*backward"):
        loss.backward()
    give_memory(parameter, torch.ones(3))
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))


def test_all_layers_that_hold_it_have_its_values():
    embedding = nn.Embedding(5, 3, device="meta")
    head = nn.Linear(3, 5, bias=False, device="meta")
    head.weight = embedding.weight
    give_memory(embedding.weight, torch.ones(5, 3))
    assert head.weight is embedding.weight
    assert torch.equal(head(torch.ones(1, 3)), torch.full((1, 5), 3.0))


def test_weights_of_recurrent_layers_have_weak_references_of_torch():
    layer = nn.LSTM(2, 3)
    for parameter in layer.parameters():
        whole = parameter.detach().clone()
        give_memory(parameter, torch.empty_like(parameter, device="meta"))
        give_memory(parameter, whole)
    layer(torch.ones(1, 1, 2))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
