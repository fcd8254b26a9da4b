"""Each rank traces a model that names no spine, and hears whether all have traced the same.

    torchrun ... traced_alike.py FOLDER

Each rank reports what it was told where rank 1 has another setting, and where nobody has:
``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import penstock as pk
import tests.kit.tracing  # noqa: F401 - is loaded once for all ranks
from penstock.base.errors import PenstockError
from tests.kit.helpers import make_batch
from tests.kit.training import sgd


class Scaled(nn.Module):
    """No chain. What it multiplies with is in no weight, so that only its graph tells of it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.scale = scale

    def forward(self, value):
        value = torch.relu(self.first(value))
        return self.last(value + self.scale * self.second(value))


def told(scale: float) -> str:
    torch.manual_seed(0)
    model, (inputs, targets) = Scaled(scale), make_batch(8)
    inputs = inputs[:, :6]
    graph = pk.profile(model, inputs[:2])
    plan = pk.plan(graph, pk.Cluster.local(2), microbatches=2)
    try:
        with pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=sgd) as pipeline:
            return repr(pipeline.step(inputs, targets).item())
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    report = [told(0.5 if rank else 0.25), told(0.5)]
    Path(sys.argv[-1], f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main()
