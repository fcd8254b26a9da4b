"""Ranks that have rows of their stages' weights, beside one device and beside copies that keep all.

    torchrun ... fully_sharded.py CASE FOLDER

Cases: ``one device`` compares in float64 with plain torch, over schedules and options; ``owners``
with copies that keep all weights; ``checkpoint`` goes on from one layout in another; ``refusals``
asks for what cannot be; ``held`` weighs what ranks keep; ``killed VICTIM HOW`` loses a rank, and
``raises VICTIM`` a layer's value. Each rank reports in ``report-<rank>.json``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.core.schedule import Kind, Op, Schedule
from penstock.planning.plans import Plan
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.one_device import OneDevice
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, adamw

STEPS = 3
DOUBLE = torch.float64
EVERY = ("step", "use")


def plan_for(name: str, model: nn.Module, recompute="none") -> Plan:
    if name == "chimera":
        return make_plan(model, 4, 8, "chimera", recompute=recompute)
    schedule, replicas = name.split()
    plan = replicated(model, tuple(map(int, replicas.split("-"))), 12)
    stages = [replace(stage, recompute=recompute) for stage in plan.stages]
    return replace(plan, schedule=schedule, stages=tuple(stages))


def pipeline_of(plan: Plan, model: nn.Module, **options) -> pk.Pipeline:
    return pk.Pipeline(
        model, plan, **{
            "loss": F.cross_entropy, "optimizer": adamw, "seed": 1,
            "deadline_seconds": 20, "startup_seconds": 30, **options,
        },
    )  # fmt: skip


def one_device() -> list[str]:
    cases = [
        ("gpipe 2-2", "none", {}),
        ("1f1b 2-2", "none", {"clip_norm": 0.1}),
        ("1f1b 3-1", "layers", {}),
        ("1f1b 1-3", "stage", {}),
        
        ("1f1b 4", "none", {"grad_scaler": partial(torch.amp.GradScaler, "cpu", init_scale=64.0)}),
        ("chimera", "none", {}),
    ]
    found = []
    for (name, recompute, options), kept in product(cases, EVERY):
        given = {key: make() if callable(make) else make for key, make in options.items()}
        theirs = {key: make() if callable(make) else make for key, make in options.items()}
        model, alone = (make_mlp(dropout=0.0, dtype=DOUBLE) for _ in range(2))
        plan = plan_for(name, model, recompute).with_reducer("fully-sharded", gathered_for=kept)
        reference = OneDevice(alone, plan.num_microbatches, optimizer=adamw, **theirs)
        far = 0.0
        with pipeline_of(plan, model, **given) as pipeline:
            for step in range(STEPS):
                batch = make_batch(24, DOUBLE, step)
                loss, wanted = pipeline.step(*batch), reference.step(*batch)
                far = max(far, abs(loss - wanted).item())
                with torch.no_grad():
                    there = alone(batch[0][:7])
                far = max(far, (pipeline.evaluate(batch[0][:7]) - there).abs().max().item())
            state = pipeline.gather_state_dict()
        if state.keys() != alone.state_dict().keys():
            found.append(f"{name} {kept}: other keys")
        far = max([far, *((state[key] - own).abs().max().item() for key, own in alone.state_dict().items())])
        if far > 1e-12:
            found.append(f"{name} {recompute} {kept}: {far}")
    return found


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"one device": one_device}[case]()
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
