"""Experts of mixtures, told by structure, and routes within a capacity."""

from __future__ import annotations

import pytest
import torch
from penstock.errors import InputError, ModelError
from torch import nn

from penstock.engine.model.experts import experts_in, tokens_per_expert, within_capacity
from tests.kit.mixtures import (
    KINDS,
    ListedExperts,
    StackedExperts,
    make_mixture,
    make_transformer,
)


@pytest.mark.parametrize("experts", [StackedExperts, ListedExperts])
def test_own_experts_are_found(experts):
    found = experts_in(make_mixture(experts, num_experts=4))
    assert [(own.path, own.num_experts) for own in found] == [("1.experts", 4), ("4.experts", 4)]
    assert all(own.is_list == (experts is ListedExperts) for own in found)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_transformers_are_found(kind):
    found = experts_in(make_transformer(kind))
    assert [own.path for own in found] == [f"model.layers.{k}.mlp.experts" for k in range(2)]
    assert {own.num_experts for own in found} == {4}


def test_a_router_attention_and_plain_layers_are_none():
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Bilinear(2, 2, 2))
    assert experts_in(model) == []
    assert experts_in(make_mixture()[1].router) == []


def test_what_says_that_it_can_be_divided_must_have_a_form_that_can():
    experts = StackedExperts(4)
    experts.scale = nn.Parameter(torch.ones(3))
    assert experts_in(experts) == []
    experts.divides_experts = True
    with pytest.raises(ModelError, match="StackedExperts says divides_experts, but is neither"):
        experts_in(experts)


def test_no_expert_gets_more_than_its_capacity_and_first_choices_come_first():
    torch.manual_seed(0)
    index = torch.rand(40, 6).argsort(1)[:, :2]
    kept = within_capacity(index, 6, 9)
    counts = tokens_per_expert(kept, 6)
    wanted = tokens_per_expert(index, 6).clamp(max=9)
    assert counts.equal(wanted) and counts.max() == 9
    assert torch.all((kept == index) | (kept == 6))
    for expert in range(6):
        # Whoever comes later in the order of choices, then tokens, is dropped first.
        pairs = zip(kept.t().ravel(), index.t().ravel(), strict=True)
        queue = [bool(k == expert) for k, wanted in pairs if wanted == expert]
        assert queue == sorted(queue, reverse=True)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_capacity_is_a_whole_number(capacity):
    with pytest.raises(InputError, match="capacity is"):
        within_capacity(torch.zeros(2, 1, dtype=torch.long), 2, capacity)
