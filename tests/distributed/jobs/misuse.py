"""Two processes are given plans that do not fit: every rank must say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan


def message(model, plan, **options) -> str:
    try:
        pk.Pipeline(model, plan, deadline_seconds=300, **options)
    except pk.errors.InputError as error:
        return str(error)
    return "no error"


def closing_inside(model) -> str:
    """What a rank hears when the first layer of rank 0 closes the pipeline that runs it."""
    with pk.Pipeline(model, make_plan(model, 2, 4), loss=F.cross_entropy) as pipeline:
        model[0].register_forward_pre_hook(lambda *_: pipeline.close())
        try:
            pipeline.step(*make_batch(8))
        except pk.errors.RunError as error:
            return str(error)
    return "no error"


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_mlp()
    report = {
        "too many ranks": message(model, make_plan(model, 3, 4)),
        "different models": message(other := make_mlp()[: 5 + rank], make_plan(other, 2, 4)),
        "different settings": message(
            model, make_plan(model, 2, 4), optimizer=SGD, clip_norm=1.0 + rank
        ),
        "different plans": str(
            pk.Pipeline(model, make_plan(model, 2, 4 + rank)).plan.num_microbatches
        ),
        "a layer closes its pipeline": closing_inside(model),
    }
    (Path(sys.argv[-1]) / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
