"""Optimizers and pipelines as most tests want them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_plan

DEADLINE_SECONDS = 60
"""Nothing waits that long, not even on a machine with other things to do."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class KeepingGradients(torch.optim.Optimizer):
    """Takes gradients away, and keeps them for its next step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                kept = self.state[parameter].get("kept", parameter.grad)
                parameter.sub_(kept + parameter.grad, alpha=0.1)
                self.state[parameter]["kept"], parameter.grad = parameter.grad, None


def pipeline_of(
    model,
    schedule="1f1b",
    num_ranks=2,
    num_microbatches=4,
    *,
    recompute="none",
    cuts=None,
    **options,
) -> pk.Pipeline:
    """A pipeline for classification, cut evenly unless ``cuts`` are given."""
    plan = make_plan(model, num_ranks, num_microbatches, schedule, cuts, recompute)
    options = {
        "loss": F.cross_entropy,
        "seed": 3,
        "deadline_seconds": DEADLINE_SECONDS,
        **options,
    }
    return pk.Pipeline(model, plan, **options)
