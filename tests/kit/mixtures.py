"""Small mixtures of experts: stacked, as a list, with more tokens than fit, and those of
``transformers``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.model.experts import within_capacity

WIDTH = 16


class StackedExperts(nn.Module):
    """Experts whose weights are stacked, and their biases."""

    def __init__(self, num_experts: int, width: int = WIDTH):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 2 * width, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(num_experts, 2 * width) / 8)
        self.down = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)

    def forward(self, tokens, expert_index, expert_weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, choices = torch.where(expert_index == expert)
            if len(rows):
                hidden = torch.tanh(F.linear(tokens[rows], self.up[expert], self.bias[expert]))
                made = F.linear(hidden, self.down[expert]) * expert_weights[rows, choices, None]
                output = output.index_add(0, rows, made)
        return output


class ListedExperts(nn.ModuleList):
    """An expert is a module of its own."""

    divides_experts = True

    def __init__(self, num_experts: int, width: int = WIDTH):
        super().__init__(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x, where, how_much):
        output = torch.zeros_like(x)
        for number, expert in enumerate(self):
            rows, choices = torch.where(where == number)
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * how_much[rows, choices, None])
        return output


class MixtureBlock(nn.Module):
    """A router and experts around a residual; ``idle`` experts get no token, and no expert more
    than ``capacity``."""

    def __init__(self, experts, num_experts=4, *, choices=2, idle=(), capacity=None, width=WIDTH):
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = experts(num_experts, width)
        self.choices, self.idle, self.capacity = choices, tuple(idle), capacity
        self.num_experts = num_experts

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        for expert in self.idle:
            shares = shares.index_fill(-1, torch.tensor([expert]), -1.0)
        weights, index = shares.topk(self.choices, -1)
        if self.capacity is not None:
            index = within_capacity(index, self.num_experts, self.capacity)
        return x + self.experts(x, index, weights)


def make_mixture(
    experts=StackedExperts, *, num_experts=4, dtype=torch.float64, seed=0, **options
) -> nn.Sequential:
    """Six layers, of which two are mixtures, for ``make_batch``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, WIDTH),
        MixtureBlock(experts, num_experts, **options),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        MixtureBlock(experts, num_experts, **options),
        nn.Linear(WIDTH, 4),
    ).to(dtype)


KINDS = ("Mixtral", "Qwen2Moe", "Qwen3Moe")


def make_transformer(
    kind: str, *, dtype=torch.float64, implementation="eager", num_layers=2
) -> nn.Module:
    """A small causal language model of ``transformers`` with mixtures, tokens of 11 words."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=11, hidden_size=16, intermediate_size=32, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.0, use_cache=False,
        tie_word_embeddings=False,
        **{
            "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
            "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                         "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
            "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                         "head_dim": 8, "decoder_sparse_step": 1, "norm_topk_prob": True},
        }[kind],
    )  # fmt: skip
    config._experts_implementation = implementation
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # routers begin with zeros
    return model.train()


def make_tokens(rows: int = 8, seed: int = 0) -> torch.Tensor:
    """Rows of six words."""
    return torch.randint(11, (rows, 6), generator=torch.Generator().manual_seed(seed))


def next_word_loss(output, tokens):
    """Of what a causal language model of ``transformers`` gives."""
    logits = output["logits"][:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())
