"""Small models, plans and data for asynchronous training."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import penstock as pk
from penstock.engine.model.spine import spine_of

NUM_LAYERS = 5
WIDTH = 6


def layered_model(num_layers: int = NUM_LAYERS, seed: int = 1) -> nn.Sequential:
    """Layers that differ, with dropout and a norm, in float64."""
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers).double()


def batches(sizes, seed=5):
    """Minibatches with so many rows."""
    torch.manual_seed(seed)
    return [
        (torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()) for rows in sizes
    ]


def even_graph(model) -> pk.LayerGraph:
    """Every layer costs the same."""
    layers = spine_of(model)
    seconds = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"), 1.0
    )
    return pk.LayerGraph(
        layers=tuple(
            pk.Layer(name=layer.name, signature=layer.signature, **seconds) for layer in layers
        )
    )


def plan_for(policy, num_stages, *, microbatches, replicas=None, model=None, schedule=None):
    """A plan with a policy, for a model whose layers cost the same."""
    graph = even_graph(layered_model() if model is None else model)
    if schedule is None and not policy.asynchronous:
        schedule = "1f1b"
    ranks = sum(map(int, replicas.split("-"))) if replicas else num_stages
    stages = None if replicas else num_stages
    return _planned(graph.to_json(), ranks, microbatches, stages, schedule, policy, replicas)


@cache
def _planned(graph: str, ranks, microbatches, stages, schedule, policy, replicas) -> pk.Plan:
    """The planner takes longer than most trainings in tests; its plans never change."""
    return pk.plan(
        pk.LayerGraph.from_json(graph),
        pk.Cluster.local(ranks),
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        versions=policy,
        replicas=replicas,
    )


def cuts_of(plan):
    """How many layers each stage has."""
    return [len(stage.layers) for stage in plan.stages]
