"""Every rank trains the pipeline and, beside it, the whole model; then compares its own stages."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp, make_plan, runnable_cases
from tests.kit.one_device import same
from tests.kit.training import adamw

ROWS = (13, 8, 3, 40)  # ragged, too few, and then larger messages


@cache
def one_device(num_microbatches: int, dtype: torch.dtype) -> tuple[list, torch.Tensor, dict]:
    """(loss of each step, outputs, state) of the same training, whatever the schedule."""
    model = make_mlp(dtype=dtype)
    reference = SingleDevice(model, num_microbatches, F.cross_entropy, adamw, seed=3)
    losses = [reference.step(*make_batch(rows, dtype, seed=step)) for step, rows in enumerate(ROWS)]
    return losses, model.eval()(make_batch(9, dtype)[0]), model.state_dict()


def differences(schedule: str, num_microbatches: int, transport: str) -> list[str]:
    """What is not bit-equal after some steps; nothing, one hopes."""
    # Chimera halves the microbatches between two copies of each stage: the sums' order differs.
    dtype, tolerance = (torch.float64, 1e-11) if schedule == "chimera" else (torch.float32, 0.0)
    losses, whole, state = one_device(num_microbatches, dtype)
    ours = make_mlp(dtype=dtype)
    plan = make_plan(ours, dist.get_world_size(), num_microbatches, schedule)
    found = []
    # Ranks disagree about the seed on purpose: rank 0's must win.
    seed = 3 + dist.get_rank()
    with pk.Pipeline(
        ours,
        plan,
        loss=F.cross_entropy,
        optimizer=adamw,
        seed=seed,
        deadline_seconds=300,
        transport=transport,
    ) as pipeline:
        for step, rows in enumerate(ROWS):
            batch = make_batch(rows, dtype, seed=step)
            if not same(pipeline.step(*batch), losses[step], tolerance):
                found.append(f"{schedule} m={num_microbatches} step {step}: loss")
        outputs = pipeline.evaluate(make_batch(9, dtype)[0])
        if not torch.allclose(outputs, whole, rtol=1e-5, atol=1e-6):
            found.append(f"{schedule} m={num_microbatches}: outputs")
        if pipeline.timeline.num_ranks != dist.get_world_size():
            found.append("timeline")
        if not all(pipeline.timeline.by_rank):
            found.append("a rank without spans")
        for key, value in pipeline.state_dict().items():
            if not same(state[key], value, tolerance):
                found.append(f"{schedule} m={num_microbatches}: {key}")
    return found


def main() -> None:
    transport, counts = sys.argv[1], [int(count) for count in sys.argv[2].split(",")]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [
        difference
        for schedule, _, num_microbatches in runnable_cases([dist.get_world_size()], counts)
        for difference in differences(schedule, num_microbatches, transport)
    ]
    report = Path(sys.argv[-1]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps({"differences": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
