"""Every rank trains slice by slice and, beside it, the whole model; then compares its own stage."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
from penstock.demo import loss
from tests.kit.one_device import OneDevice
from tests.numerics.test_slices import adamw, build_gpt, plan_of, tokens


def differences() -> list[str]:
    """What is not close after some steps; nothing, one hopes."""
    ours = build_gpt()
    theirs = copy.deepcopy(ours)
    reference = OneDevice(theirs, 4, loss, adamw)
    plan = plan_of(ours, dist.get_world_size(), 4, 3)
    found = []
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=adamw, deadline_seconds=300, count_memory=True
    ) as pipeline:
        for step, (rows, length) in enumerate([(7, 11), (4, 8), (1, 5), (9, 11)]):
            batch = tokens(rows, length, step)
            loss_here = pipeline.step(*batch)
            if not torch.allclose(loss_here, reference.step(*batch), rtol=1e-10, atol=1e-10):
                found.append(f"step {step}: loss")
        inputs, _ = tokens(6, 7, 9)
        if not torch.allclose(pipeline.evaluate(inputs), theirs.eval()(inputs), atol=1e-9):
            found.append("outputs")
        if [one.microbatches for one in pipeline.peaks] != list(pipeline.timeline.peak_activations):
            found.append("peaks")
        whole = theirs.state_dict()
        for key, value in pipeline.state_dict().items():
            if not torch.allclose(value, whole[key], rtol=1e-10, atol=1e-10):
                found.append(key)
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = Path(sys.argv[1]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(differences()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
