"""Two pipelines side by side, each of two ranks that have several stages; each process reports what
differs from one device.

    torchrun ... side_by_side.py FOLDER
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.one_device import OneDevice
from tests.kit.reducing import side_by_side
from tests.kit.training import adamw

STEPS = 3
WAYS = (
    ("owners", {}),
    ("all-reduce", {}),
    ("sharded", {}),
    ("fully-sharded", {"gathered_for": "step"}),
    ("fully-sharded", {"gathered_for": "use"}),
)


def furthest(schedule, way, how) -> float:
    """The largest difference of a loss, an output or a weight."""
    model, alone = (make_mlp(dropout=0.0, dtype=torch.float64) for _ in range(2))
    plan = side_by_side(model, schedule, 2, 2, 8).with_reducer(way, **how)
    options = {"loss": F.cross_entropy, "optimizer": adamw, "clip_norm": 0.1}
    reference = OneDevice(alone, plan.num_microbatches, optimizer=adamw, clip_norm=0.1)
    far = 0.0
    with pk.Pipeline(model, plan, deadline_seconds=300, **options) as pipeline:
        for step in range(STEPS):
            batch = make_batch(16, torch.float64, step)
            far = max(far, abs(pipeline.step(*batch) - reference.step(*batch)).item())
            with torch.no_grad():
                there = alone(batch[0][:7])
            far = max(far, (pipeline.evaluate(batch[0][:7]) - there).abs().max().item())
        state = pipeline.gather_state_dict()
    own = alone.state_dict()
    assert state.keys() == own.keys()
    return max(far, *((state[key] - weight).abs().max().item() for key, weight in own.items()))


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    wrong = []
    for schedule, (way, how) in product(("interleaved-1f1b", "zb-v"), WAYS):
        far = furthest(schedule, way, how)
        if not far < 1e-12:
            wrong.append(f"{schedule}, {way} {how}: {far}")
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
