"""A plan of Penstock's, performed by ``torch.distributed.pipelining``, and its weights taken back.

    python examples/torch_pipelining.py

Penstock cuts the model and builds the schedule; two processes of torch's runtime train by its CSV
for a few steps and save their parts with ``torch.distributed.checkpoint``; a pipeline loads them
and evaluates the whole.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import penstock as pk
from penstock.interop.torch_checkpoints import load_dcp
from penstock.planning.handover import module_fqns_per_model_part, to_torch_csv

MICROBATCHES, ROWS, STEPS = 8, 64, 30


def build_model() -> nn.Sequential:
    """Says in which of four quadrants the sum of two points lies."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, 4),
    )  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    points = torch.randn(ROWS, 4, generator=generator)
    totals = points[:, :2] + points[:, 2:]
    return points, (totals[:, 0] > 0).long() * 2 + (totals[:, 1] > 0).long()


def train_with_torch(rank: int, plan: pk.Plan, folder: Path) -> None:
    """What one of the processes does; of Penstock it has the names of modules, and a CSV."""
    torch.set_num_threads(1)
    address = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model, parts = build_model(), module_fqns_per_model_part(plan)
    stages, own = [], {}
    for number, names in enumerate(parts):
        if plan.stages[number].rank == rank:
            modules = nn.Sequential(*(model.get_submodule(name) for name in names))
            stages.append(PipelineStage(modules, number, len(parts), torch.device("cpu")))
            own |= {f"{name}.": model.get_submodule(name) for name in names}
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=F.cross_entropy)
    runtime._load_csv(str(folder / "schedule.csv"))
    weights = [value for module in own.values() for value in module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for step in range(STEPS):
        points, quadrants = batch(step)
        is_first = any(stage.is_first for stage in stages)
        is_last = any(stage.is_last for stage in stages)
        runtime.step(*([points] if is_first else []), target=quadrants if is_last else None)
        optimizer.step()
        optimizer.zero_grad()
    state = {key: value for key, value in model.state_dict().items() if key.startswith((*own,))}
    dcp.save(state, checkpoint_id=folder / "weights")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedule", default="zb-v", help="any that flushes")
    name = parser.parse_args().schedule
    model = build_model()
    points, quadrants = batch(-1)
    graph = pk.profile(
        model, points[:8], loss=F.cross_entropy, targets=quadrants[:8], repeats=3, ranks=0
    )
    stages = pk.schedules.build(name, num_ranks=2, num_microbatches=MICROBATCHES).num_stages
    cluster = pk.Cluster.local(2)
    wanted = {"schedule": name, "stages": stages, "recompute": "never"}
    plan = pk.plan(graph, cluster, microbatches=MICROBATCHES, **wanted)
    print(plan)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        (folder / "schedule.csv").write_text(to_torch_csv(plan.build_schedule()))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.spawn(train_with_torch, (plan, folder), nprocs=2)
        with pk.Pipeline(model, plan) as pipeline:
            load_dcp(pipeline, folder / "weights")
            right = (pipeline.evaluate(points).argmax(-1) == quadrants).float().mean()
    print(f"trained by torch, evaluated by Penstock: {right:.0%} right")


if __name__ == "__main__":
    main()
