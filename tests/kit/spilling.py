"""Plans whose stages come and go, without a profile."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core.cluster.parts import Tier
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.planning.plans import Plan, StagePlan
from penstock.planning.plans.spilling import Spill
from tests.kit.training import DEADLINE_SECONDS, adamw

HOST = Tier(kind="host")


def spilled_plan(
    model,
    num_microbatches=4,
    spill=Spill(tier=HOST),  # noqa: B008 - a value
    *,
    num_ranks=1,
    cuts=None,
    recompute="none",
    group=0,
):
    """One stage for each layer, or from cut to cut; the last one runs forward once."""
    layers = spine_of(model)
    borders = [0, *(cuts or range(1, len(layers))), len(layers)]
    count = len(borders) - 1
    return Plan(
        model=spine_fingerprint(layers),
        schedule="spilled",
        options={"stages_per_rank": count // num_ranks, "group": group},
        num_microbatches=num_microbatches,
        spill=spill,
        stages=tuple(
            StagePlan(
                layers=tuple(layer.name for layer in layers[a:b]),
                rank=stage % num_ranks,
                recompute=recompute if stage < count - 1 else "none",
            )
            for stage, (a, b) in enumerate(itertools.pairwise(borders))
        ),
    )


def spilled_pipeline(model, spill=Spill(tier=HOST), *, options=None, **plan):  # noqa: B008
    """A pipeline for classification whose stages come and go, or stay if ``spill`` is ``None``."""
    given = {
        "loss": F.cross_entropy,
        "optimizer": adamw,
        "seed": 3,
        "deadline_seconds": DEADLINE_SECONDS,
        **(options or {}),
    }
    return pk.Pipeline(model, spilled_plan(model, spill=spill, **plan), **given)


def residence_of(pipeline):
    """That of its first rank."""
    return pipeline._parts.workers[0].residence


def make_net(seed=0, frozen=False):
    """Five layers: weights with and without bias, dropout, a norm with statistics."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.Sequential(nn.Linear(32, 48, bias=False), nn.Dropout(0.2), nn.GELU()),
        nn.Sequential(nn.BatchNorm1d(48), nn.Linear(48, 48), nn.Tanh()),
        nn.Linear(48, 40),
        nn.Linear(40, 4),
    )
    if frozen:
        model[1][0].weight.requires_grad_(False)
        model[3].bias.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Reads the weight of another layer."""

    def __init__(self, source):
        super().__init__()
        self.weight = source.weight

    def forward(self, value):
        return value @ self.weight


def make_tied(seed=0):
    """The last layer has the weight of the first."""
    torch.manual_seed(seed)
    first = nn.Linear(16, 24)
    return nn.Sequential(
        first, nn.Linear(24, 24), nn.Dropout(0.2), nn.Tanh(), Tied(first), nn.Linear(16, 4)
    )


class Picky(nn.Module):
    """Fails when it is told to."""

    fails = False

    def forward(self, value):
        if self.fails:
            raise RuntimeError("no")
        return value
