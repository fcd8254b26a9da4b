"""A small mixture of experts whose replicas divide the experts, beside the same with all of them.

    torchrun --nproc-per-node=4 examples/mixture_of_experts.py

Two stages have two replicas each. With two expert ranks, each replica has half of the experts of
its stage; tokens travel to them and back. Losses are equal, and each rank holds less.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk


class Experts(nn.Module):
    """Two-layer experts, their weights stacked."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, 4 * width) / (4 * width) ** 0.5)

    def forward(self, tokens, expert_index, expert_weights):
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, choices = torch.where(expert_index == expert)
            hidden = F.gelu(F.linear(tokens[rows], self.up[expert]))
            made = F.linear(hidden, self.down[expert]) * expert_weights[rows, choices, None]
            output = output.index_add(0, rows, made)
        return output


class Mixture(nn.Module):
    """A router, and the two experts that it likes best for each token."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, num_experts)
        self.experts = Experts(width, num_experts)

    def forward(self, x):
        tokens = self.norm(x)
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        return x + self.experts(tokens, index, weights)


def build_model(width: int, num_experts: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [block for _ in range(2) for block in (nn.Linear(width, width), nn.Tanh(),
                                                    Mixture(width, num_experts))]  # fmt: skip
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows = torch.randn(16, arguments.width, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(16) % 10
    graph = pk.profile(build_model(arguments.width, arguments.experts), rows[:2], repeats=3)
    for expert_ranks in (1, 2):
        plan = pk.plan(
            graph, pk.Cluster.local(4), microbatches=8, replicas="2-2", expert_ranks=expert_ranks
        )
        with pk.Pipeline(
            build_model(arguments.width, arguments.experts),
            plan,
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        ) as pipeline:
            losses = [pipeline.step(rows, labels).item() for _ in range(arguments.steps)]
            loads = pipeline.expert_loads()
        if os.environ.get("RANK", "0") == "0":
            kept = ", ".join(f"{num_bytes / 2**20:.2f}" for num_bytes in plan.rank_bytes)
            print(f"expert_ranks={expert_ranks}: losses {losses}; MiB of ranks, as planned: {kept}")
            for name, shares in loads.items():
                print(f"  {name}: {', '.join(f'{share:.0%}' for share in shares)} of the tokens")


if __name__ == "__main__":
    main()
