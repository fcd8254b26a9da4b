"""Small models and plans that several test files use."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from penstock.planner import Plan, StagePlan
from penstock.spine import spine_fingerprint, spine_of


def make_plan(model, num_stages, num_microbatches, schedule="1f1b", cuts=None) -> Plan:
    """A plan for ``model`` without a profile: cut evenly, or before the given layers."""
    layers = spine_of(model)
    count = len(layers)
    cuts = cuts or [round(index * count / num_stages) for index in range(1, num_stages)]
    borders = [0, *cuts, count]
    return Plan(
        model=spine_fingerprint(layers),
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_threads=1,
        stages=tuple(
            StagePlan(layers=tuple(layer.name for layer in layers[a:b]), rank=rank)
            for rank, (a, b) in enumerate(itertools.pairwise(borders))
        ),
    )


def make_mlp(dropout=0.3, dtype=torch.float32, seed=0) -> nn.Sequential:
    """Six layers, with in-place activations and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 4),
    ).to(dtype)


def make_batch(rows=13, dtype=torch.float32, seed=1):
    """(inputs, targets) for ``make_mlp``."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 16, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (rows,), generator=generator)
