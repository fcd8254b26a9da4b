"""Nested values, and where autograd's graph is cut between layers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from penstock.engine.model import tree


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        None,
        3,
        (torch.ones(1),),
        [torch.ones(1), (torch.zeros(2), None)],
        {"b": torch.ones(1), "a": [1, "text"]},
        Pair(torch.ones(1), {"x": torch.zeros(1)}),
        (),
    ],
)
def test_unflatten_undoes_flatten(value):
    leaves, structure = tree.flatten(value)
    again = tree.unflatten(leaves, structure)
    assert type(again) is type(value)
    assert str(again) == str(value)


def test_replace_and_tensors_go_in_the_same_order():
    value = {"b": torch.ones(1), "a": (torch.zeros(2), 5, Pair(torch.ones(3), None))}
    replaced = []
    assert tree.replace(torch.Tensor, lambda t: replaced.append(t) or len(t), value) == {
        "b": 1,
        "a": (2, 5, Pair(3, None)),
    }
    assert [t.data_ptr() for t in tree.tensors(value)] == [t.data_ptr() for t in replaced]


def test_a_cut_leaf_receives_the_gradient_and_shares_the_memory():
    source = nn.Linear(3, 3)(torch.ones(2, 3))
    leaf, value = tree.cut(source, wants_gradient=True)
    assert leaf.data_ptr() == value.data_ptr() == source.data_ptr()
    (value * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 3.0))


@pytest.mark.parametrize(
    "overwrite",
    [torch.relu_, lambda value: value.view(-1).mul_(2), lambda value: value.t().add_(value.t())],
)
def test_a_cut_value_may_be_overwritten_as_without_a_cut(overwrite):
    inputs = torch.randn(3, 3)
    grown = nn.Linear(3, 3)
    overwrite(whole := grown(inputs))
    whole.sum().backward()
    expected = grown.weight.grad.clone()
    grown.zero_grad()
    source = grown(inputs)
    edge = torch.autograd.graph.get_gradient_edge(source)
    leaf, value = tree.cut(source, wants_gradient=True)
    overwrite(value)
    value.sum().backward()
    torch.autograd.backward([edge], [leaf.grad])
    assert torch.equal(grown.weight.grad, expected)


def test_overwriting_what_the_layer_before_needs_is_noticed():
    source = torch.tanh(torch.ones(2, requires_grad=True))  # its backward needs its output
    edge = torch.autograd.graph.get_gradient_edge(source)
    leaf, value = tree.cut(source, wants_gradient=True)
    torch.relu_(value).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([edge], [leaf.grad])


@pytest.mark.parametrize("leaf", [torch.tensor([1, 2]), torch.tensor([True]), None, "text", 3])
def test_what_has_no_gradient_passes_a_cut_unchanged(leaf):
    held, value = tree.cut(leaf, wants_gradient=True)
    assert held is value
    assert not getattr(value, "requires_grad", False)


def test_without_gradients_wanted_a_cut_detaches():
    source = torch.ones(2, requires_grad=True) * 2
    held, value = tree.cut(source, wants_gradient=False)
    assert held is value
    assert not value.requires_grad


def test_a_leaf_that_wants_no_gradient_wants_none_behind_a_cut():
    mask = torch.zeros(2)
    held, value = tree.cut(mask, wants_gradient=True)
    assert held is value
    assert not value.requires_grad
    assert value.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("made", [None, torch.clone, lambda tensor: tensor[:1]])
def test_what_crosses_apart_has_no_graph_and_wants_what_it_wanted(wants, made):
    crossed = tree.apart(torch.ones(2, requires_grad=wants) * 2, made)
    assert crossed.is_leaf
    assert crossed.requires_grad is wants
    assert not crossed._is_view() or made is not None
