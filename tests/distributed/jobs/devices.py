"""Every rank on the accelerator of its number on this host, and beside it all ranks as threads on
the CPU; then compares what it holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from msgspec.structs import replace

import penstock as pk
from tests.kit.accelerator.devices import register
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.training import adamw

CASES = {
    "1f1b": {},
    "zb-v": {"clip_norm": 0.1},
    "chimera": {},
    "gpipe": {"clip_norm": 0.1, "post_validate": True},
}


def trained(schedule: str, kind: str, transport: str, **options):
    """The losses of some steps, the outputs of an evaluation, the devices and the pipeline's
    weights."""
    model = make_mlp()
    plan = make_plan(model, 2, 4, schedule)
    places = tuple(pk.Device(name=f"{kind}{rank}", kind=kind) for rank in range(2))
    with pk.Pipeline(
        model,
        replace(plan, devices=places),
        loss=F.cross_entropy,
        optimizer=adamw,
        seed=3,
        transport=transport,
        **options,
    ) as pipeline:
        losses = [pipeline.step(*make_batch(seed=step)) for step in range(2)]
        losses += pipeline.steps(make_batch(seed=step) for step in range(2))
        outputs = pipeline.evaluate(make_batch()[0])
        state = pipeline.state_dict()
    return [value.cpu() for value in [*losses, outputs]], state


def differences(transport: str) -> list[str]:
    """What is not equal to the bit, or not where it should be."""
    found = []
    for schedule, options in CASES.items():
        ours, state = trained(schedule, "gpu", transport, **options)
        theirs, whole = trained(schedule, "cpu", "threads", **options)
        if not all(map(torch.equal, ours, theirs)):
            found.append(f"{schedule}: losses or outputs")
        places = {str(value.device) for value in state.values()}
        if places != {f"emu:{dist.get_rank()}"}:
            found.append(f"{schedule}: on {places}")
        for key, value in state.items():
            if not torch.equal(value.cpu(), whole[key]):
                found.append(f"{schedule}: {key}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo")
    report = Path(sys.argv[2]) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(differences(sys.argv[1])))


if __name__ == "__main__":
    main()
