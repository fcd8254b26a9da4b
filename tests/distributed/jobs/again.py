"""Pipelines one after the other, whose processes build their models with other random numbers."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from tests.kit.helpers import make_plan


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(2)
    gc.disable()  # a closed pipeline leaves nothing open until something is collected
    weights, left = [], []
    for turn in range(3):
        torch.manual_seed(rank)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model[3].weight = model[0].weight
        inputs = torch.ones(8, 4)
        with pk.Pipeline(
            model,
            make_plan(model, 2, 2),
            loss=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            deadline_seconds=300,
        ) as pipeline:
            pipeline.step(inputs, inputs)
            weights.append(model[0].weight.tolist())
        left.append("memfd:penstock" in Path("/proc/self/maps").read_text())
        time.sleep(0.5 * (rank == turn % 2))
    report = {"weights": weights, "left": left, "num_threads": torch.get_num_threads()}
    (Path(sys.argv[-1]) / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
