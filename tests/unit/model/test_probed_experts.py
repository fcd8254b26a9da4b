"""Experts whose code would compute something else where copies divide them are told before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from penstock.errors import ModelError
from torch import nn

from penstock.engine.experts.probing import check_apart
from penstock.engine.model.experts import experts_in
from tests.kit.mixtures import (
    KINDS,
    ListedExperts,
    StackedExperts,
    make_mixture,
    make_transformer,
)

TOGETHER = "treats tokens together, as a capacity or a mean over them does.*use within_capacity"


class Capped(StackedExperts):
    """No expert takes more than its share of the tokens, half as much again."""

    def forward(self, tokens, expert_index, expert_weights):
        most = 3 * expert_index.numel() // (2 * self.num_experts)
        index = expert_index.clone()
        for expert in range(self.num_experts):
            rows, choices = torch.where(index == expert)
            index[rows[most:], choices[most:]] = self.num_experts
        return super().forward(tokens, index, expert_weights)


class Centred(StackedExperts):
    def forward(self, tokens, expert_index, expert_weights):
        return super().forward(tokens - tokens.mean(0), expert_index, expert_weights)


class Normed(StackedExperts):
    def forward(self, tokens, expert_index, expert_weights):
        shares = expert_weights / expert_weights.sum(-1, keepdim=True)
        return super().forward(tokens, expert_index, shares)


class Shuffled(ListedExperts):
    def forward(self, x, where, how_much):
        return super().forward(F.dropout(x, 0.1, self.training), where, how_much)


class Counted(StackedExperts):
    def forward(self, tokens, expert_index, expert_weights):
        output = torch.zeros_like(tokens)
        for expert in range(4):
            rows, choices = torch.where(expert_index == expert)
            hidden = F.linear(tokens[rows], self.up[expert], self.bias[expert])
            made = F.linear(hidden, self.down[expert]) * expert_weights[rows, choices, None]
            output = output.index_add(0, rows, made)
        return output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [StackedExperts, ListedExperts])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_that_treat_each_token_alone_may_be_divided(experts, dtype, num_ranks):
    model = make_mixture(experts, dtype=dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules, state = dict(model.named_modules()), torch.get_rng_state()
    check_apart(experts_in(model), num_ranks)
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(model.named_modules()) == modules
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    model.eval()
    check_apart(experts_in(model), num_ranks)
    assert not any(module.training for module in model.modules())


class FirstOnly(StackedExperts):
    """Knows of one choice: others are passed over, or, ``strict``, fail."""

    strict = False

    def forward(self, tokens, expert_index, expert_weights):
        first = expert_index.squeeze(1) if self.strict else expert_index[:, 0]
        return super().forward(tokens, first.view(len(tokens), 1), expert_weights[:, :1])


@pytest.mark.parametrize("strict", [False, True])
def test_experts_that_take_one_choice_are_given_one(strict):
    model = make_mixture(FirstOnly)
    model[1].experts.strict = model[4].experts.strict = strict
    check_apart(experts_in(model), 2)
    experts = type("Centred", (Centred, FirstOnly), {})
    with pytest.raises(ModelError, match=TOGETHER):
        check_apart(experts_in(make_mixture(experts)), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_transformers_may_be_divided(kind):
    check_apart(experts_in(make_transformer(kind)), 2)
    faster = make_transformer(kind, dtype=torch.float32, implementation="grouped_mm")
    check_apart(experts_in(faster), 2)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (Capped, TOGETHER),
        (Centred, TOGETHER),
        (Normed, TOGETHER),
        (Shuffled, "drops out features, or draws otherwise, inside experts"),
        (Counted, r"all its 4 experts, and fails with 2 of them \(IndexError.*self.num_experts"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_would_compute_something_else_is_refused_by_name(experts, words, dtype):
    model = make_mixture(experts, dtype=dtype)
    for weight in model.parameters():
        nn.init.zeros_(weight)  # the values that a copy happens to have do not count
    with pytest.raises(ModelError, match=f"'1.experts' \\({experts.__name__}\\) .*{words}"):
        check_apart(experts_in(model), 2)


def test_those_with_other_settings_are_looked_at_too():
    class Chosen(StackedExperts):
        centres = False

        def forward(self, tokens, expert_index, expert_weights):
            mean = tokens.mean(0) * self.centres
            return super().forward(tokens - mean, expert_index, expert_weights)

    model = make_mixture(Chosen)
    check_apart(experts_in(model), 2)
    model[4].experts.centres = True
    with pytest.raises(ModelError, match=r"'4.experts' \(Chosen\) treats tokens together"):
        check_apart(experts_in(model), 2)
