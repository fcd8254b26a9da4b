"""Stages that come and go in processes: two ranks, a limit of memory, a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.planning.plans.spilling import Offload, Spill, Tier
from tests.kit.helpers import make_plan
from tests.kit.spilling import make_net, spilled_pipeline, spilled_plan

NUM_STEPS = 6
WIDTH, NUM_LAYERS = 1024, 16


def batch(step, width=16, classes=4):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, width, generator=generator)
    return inputs, torch.randint(0, classes, (8,), generator=generator)


def digest(state):
    total = hashlib.sha256()
    for key in sorted(state):
        total.update(key.encode() + state[key].numpy().tobytes())
    return total.hexdigest()


def train(folder, spill, num_ranks=1, num_steps=NUM_STEPS, **options):
    """Losses and a digest of the weights; goes on from a checkpoint, and writes one a step."""
    cuts = (1, 2, 3) if num_ranks == 2 else None
    given = {"clip_norm": 0.05, **options}
    with spilled_pipeline(
        make_net(), spill, num_ranks=num_ranks, cuts=cuts, options=given
    ) as pipeline:
        first = (pipeline.load(folder) if folder is not None else None) or 0
        losses = []
        for step in range(first, num_steps):
            losses.append(pipeline.step(*batch(step)).item())
            if folder is not None:
                pipeline.save(folder, keep=2, background=False)
                print(step, flush=True)
        state = pipeline.gather_state_dict(rank=0)
        return {"losses": losses, "digest": digest(state) if state else ""}


def interrupted(folder):
    """Trains, and saves behind the third step; the save behind the fourth, in the background, reads
    some of the tier, says so, and is never done, while training goes on."""
    from penstock.engine.weights.data_paths import HostDataPath

    peek = HostDataPath.peek

    def peek_once(self, *arguments):
        peek(self, *arguments)
        print("reading", flush=True)
        threading.Event().wait()

    spill = Spill(tier=Tier(folder=str(folder.parent)))
    with spilled_pipeline(make_net(), spill, options={"clip_norm": 0.05}) as pipeline:
        for step in range(NUM_STEPS):
            pipeline.step(*batch(step))
            if step == 2:
                pipeline.save(folder, background=False)
            elif step == 3:
                HostDataPath.peek = peek_once
                pipeline.save(folder)


def offloaded(offload):
    """Losses, a digest of the weights, and how many bytes of activations left this process."""
    net = make_net()
    plan = make_plan(net, 2, 4)
    if offload is not None:
        plan = plan.offloading(offload)
    options = {"loss": F.cross_entropy, "optimizer": slowly, "clip_norm": 0.05, "seed": 3}
    with pk.Pipeline(net, plan, **options) as pipeline:
        losses = [pipeline.step(*batch(step)).item() for step in range(3)]
        state = pipeline.gather_state_dict()
        leaving = [worker.offloading for worker in pipeline._parts.workers]
        left = [one.transfers.path.space.written_bytes for one in leaving if one is not None]
        return {"losses": losses, "digest": digest(state) if state else "", "left": sum(left)}


def slowly(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def resident(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def capped(folder, way):
    """Train on several times the memory that the system allows from now on."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    layers = nn.Sequential(nn.Linear(2, 2))
    warm = torch.optim.AdamW(layers.parameters())  # loads torch's compiler, which is no model
    layers(torch.ones(2)).sum().backward()
    warm.step()
    each = 4 * WIDTH * (WIDTH + 1)
    allowed = 11 * each  # of 4 × 16 that weights, gradients and state take together
    spare = 60 << 20
    if way != "tight":  # memory that has been given back counts here, too
        resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + allowed + spare,) * 2)
    tier = Tier(folder=str(folder))
    spills = {
        "spilled": Spill(tier=tier),
        "tight": Spill(tier=tier, memory_bytes=2 * each + allowed),
    }
    plan = spilled_plan(model, 2, spills.get(way))
    if way == "tight":  # has room for activations once, and not for twice as much
        kept = {"activation_bytes": each // 8}
        plan = replace(plan, stages=tuple(replace(stage, **kept) for stage in plan.stages))
    options = {"loss": F.cross_entropy, "optimizer": slowly, "init": "per-layer", "seed": 1}
    try:
        with pk.Pipeline(model, plan, **options) as pipeline:
            losses, faults = [], 0
            for step in range(4):
                begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                losses.append(pipeline.step(*batch(step, WIDTH, 9)).item())
                faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun
            slabs = pipeline._parts.workers[0].residence.buffers
            report = {"losses": losses, "peak": slabs.peak_bytes, "allowed": allowed}
            return report | {"faults": faults, "pages": NUM_LAYERS * each // resource.getpagesize()}
    except (PenstockError, RuntimeError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    way, path, *rest = sys.argv[1:]
    if way == "ranks":
        report = train(None, Spill(tier=Tier(folder=path)), num_ranks=2)
        (Path(rest[0]) / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    elif way == "offload":
        report = offloaded(Offload(tier=Tier(folder=path)))
        (Path(rest[0]) / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    elif way == "interrupted":
        interrupted(Path(path))
    elif way == "alone":
        print(json.dumps(train(Path(path), Spill(tier=Tier(folder=str(Path(path).parent))))))
    else:
        print(json.dumps(capped(Path(path), way)))
