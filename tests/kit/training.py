"""Optimizers and pipelines as most tests want them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_plan

DEADLINE_SECONDS = 300
"""Nothing waits that long, not even on a machine that stands still for a while."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class EachAlone(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other, as its subclass says."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.update(parameter, self.state[parameter])


class KeepingGradients(EachAlone):
    """Takes gradients away, and keeps them for its next step."""

    def update(self, parameter, state):
        parameter.sub_(state.get("kept", parameter.grad) + parameter.grad, alpha=0.1)
        state["kept"], parameter.grad = parameter.grad, None


def pipeline_of_job(plan, model, **options) -> pk.Pipeline:
    """A pipeline for classification among the ranks of a job."""
    usual = {
        "loss": F.cross_entropy, "optimizer": adamw, "seed": 1,
        "deadline_seconds": DEADLINE_SECONDS, "startup_seconds": DEADLINE_SECONDS,
    }  # fmt: skip
    return pk.Pipeline(model, plan, **usual | options)


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
