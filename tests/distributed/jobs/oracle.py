"""torch's own pipeline schedules on the same weights give the same gradients."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan

PEERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def torch_gradients(model, schedule: str, num_microbatches: int, batch) -> dict[str, torch.Tensor]:
    """Gradients of this rank's stage, by torch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plan = make_plan(model, size, num_microbatches)
    names = plan.stages[rank].layers
    own = nn.Sequential(*(model[int(name)] for name in names))
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    peer = PEERS[schedule](stage, num_microbatches, loss_fn=F.cross_entropy)
    inputs, targets = batch
    peer.step(*([inputs] if rank == 0 else []), target=targets if rank == size - 1 else None)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differences(schedule: str, num_microbatches: int) -> list[str]:
    """Names of the parameters whose gradients differ by a single bit."""
    ours = make_mlp(dropout=0.0)
    for module in ours:
        if isinstance(module, nn.ReLU):
            module.inplace = False  # torch's stages cannot begin with an in-place layer
    theirs = copy.deepcopy(ours)
    batch = make_batch(2 * num_microbatches)
    expected = torch_gradients(theirs, schedule, num_microbatches, batch)
    plan = make_plan(ours, dist.get_world_size(), num_microbatches, schedule)
    with pk.Pipeline(ours, plan, loss=F.cross_entropy, deadline_seconds=300) as pipeline:
        pipeline.step(*batch)
        own = [f"{name}." for stage in plan.stages[dist.get_rank() :][:1] for name in stage.layers]
    return [
        f"{schedule} m={num_microbatches}: {name}"
        for name, parameter in ours.named_parameters()
        if name.startswith(tuple(own)) and not torch.equal(parameter.grad, expected[name])
    ]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [
        difference
        for schedule in PEERS
        for num_microbatches in (4, 8)  # powers of two: torch scales by 1/m where we weight
        for difference in differences(schedule, num_microbatches)
    ]
    report = Path(sys.argv[-1]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps({"differences": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
