"""What a profile says of mixtures of experts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as pk
from benchmarks.predicting.estimates import Experts
from penstock.engine.model.experts import tokens_per_expert
from tests.docs.pages import QUICK_PROFILE
from tests.kit.mixtures import ListedExperts, StackedExperts, make_mixture, make_transformer


@pytest.mark.parametrize("experts", [StackedExperts, ListedExperts])
def test_a_profile_has_the_routing_that_it_has_seen(experts):
    model = make_mixture(experts, dtype=torch.float32, num_experts=8, idle=(2,))
    rows = torch.randn(32, 16)
    graph = pk.profile(model, rows, **QUICK_PROFILE)
    assert [len(layer.experts) for layer in graph.layers] == [0, 1, 0, 0, 1, 0]
    (part,) = graph.layers[1].experts
    own = model[1].experts
    with torch.no_grad():
        shares = model[1].router(model[0](rows)).softmax(-1)
        shares[:, 2] = -1
        counts = tokens_per_expert(shares.topk(2, -1).indices, 8)
    assert part.name == "1.experts" and part.num_experts == 8
    assert part.loads == pytest.approx((counts / 64).tolist(), abs=1e-4)
    assert part.loads[2] == 0.0 and "1.experts: 8 experts" in str(graph)
    assert part.parameter_bytes == sum(weight.nbytes for weight in own.parameters())
    assert part.token_bytes == 32 * 2 * 16 * 4
    assert 0 < part.share <= 1 and len(part.fewer) == 3 and min(part.fewer) > 0
    assert pk.LayerGraph.from_json(graph.to_json()) == graph


def test_layers_of_a_captured_model_are_experts_as_a_whole():
    model = make_transformer("Mixtral", dtype=torch.float32, num_layers=1)
    graph = pk.profile(model, {"input_ids": torch.randint(11, (2, 6))}, **QUICK_PROFILE)
    (layer,) = (layer for layer in graph.layers if layer.experts)
    assert layer.name == "model.layers.0.mlp.experts"
    assert layer.experts[0].name == layer.name and sum(layer.experts[0].loads) == pytest.approx(
        1, abs=1e-3
    )


class DenseExperts(nn.Module):
    """All experts compute all tokens: nothing that an estimate would have to look at."""

    def __init__(self, num_experts: int, width: int):
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, width, width))

    def forward(self, tokens, expert_index, expert_weights):
        shares = torch.zeros(*tokens.shape[:-1], self.num_experts, device=tokens.device)
        shares = shares.scatter_add(-1, expert_index, expert_weights)
        return torch.einsum("nw,ewv,ne->nv", tokens, self.weight, shares)


def test_an_estimate_takes_routing_as_balanced():
    model = make_mixture(DenseExperts, dtype=torch.float32)
    graph = pk.estimate(model, torch.randn(8, 16), device="a100")
    (part,) = graph.layers[1].experts
    assert part.loads == () and part.imbalance(2) == 1.0 and 0 < part.share <= 1
    assert part.token_bytes == 8 * 2 * 16 * 4


def test_experts_in_the_code_of_a_router_are_no_part():
    graph = pk.profile(nn.Sequential(Experts(32)), torch.randn(2, 8, 32), **QUICK_PROFILE)
    assert graph.layers[0].experts == ()
