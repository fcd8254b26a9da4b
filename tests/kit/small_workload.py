"""A workload that trains in milliseconds."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from penstock.trial import Workload
from tests.kit.helpers import make_batch, make_mlp


def workload() -> Workload:
    return Workload(
        build_model=make_mlp,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batches=lambda: (make_batch(8, seed=step) for step in itertools.count()),
        held_out=make_batch(8, seed=99),
        name="small",
    )


def nothing() -> str:
    return "not a workload"
