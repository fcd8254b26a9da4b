"""Every rank on the accelerator of its number on this host, and beside it all ranks as threads on
the CPU, or a single rank on that accelerator; then compares what it holds."""

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
from tests.kit.on_devices import EMULATED, Places, hardware

CASES = {
    "1f1b": {},
    "zb-v": {"clip_norm": 0.1},
    "chimera": {},
    "gpipe": {"clip_norm": 0.1, "post_validate": True},
}


def trained(schedule: str, num_ranks: int, kind: str | None, places: Places, **options):
    """The losses of some steps, the outputs of an evaluation, and the pipeline's weights."""
    model = make_mlp()
    plan = make_plan(model, num_ranks, 4, schedule)
    if kind is not None:
        planned = tuple(pk.Device(name=f"{kind}{rank}", kind=kind) for rank in range(num_ranks))
        plan = replace(plan, devices=planned)
    options = {"loss": F.cross_entropy, "optimizer": places.optimizer, "seed": 3, **options}
    with pk.Pipeline(model, plan, **options) as pipeline:
        losses = [pipeline.step(*make_batch(seed=step)) for step in range(2)]
        losses += pipeline.steps(make_batch(seed=step) for step in range(2))
        outputs = pipeline.evaluate(make_batch()[0])
        state = pipeline.state_dict()
    return [value.cpu() for value in [*losses, outputs]], state


def differences(transport: str, places: Places) -> list[str]:
    """What is not as equal as it must be, or not where it should be."""
    found = []
    (own,) = places.of(dist.get_rank())
    for schedule, options in CASES.items():
        ours, state = trained(schedule, 2, "gpu", places, transport=transport, **options)
        alone = {**options, "transport": "threads"}
        if places.on_cpu:
            theirs, whole = trained(schedule, 2, "cpu", places, **alone)
        else:
            theirs, whole = trained("1f1b", 1, None, places, devices=own, **alone)
        if not all(map(places.are_equal, ours, theirs)):
            found.append(f"{schedule}: losses or outputs")
        on = {str(value.device) for value in state.values()}
        if on != {own}:
            found.append(f"{schedule}: on {on}")
        for key, value in state.items():
            if not places.are_equal(value.cpu(), whole[key].cpu()):
                found.append(f"{schedule}: {key}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    transport, kind, folder = sys.argv[1:]
    if kind == EMULATED.kind:
        register()
    dist.init_process_group("gloo")
    places = EMULATED if kind == EMULATED.kind else hardware(kind, 2)
    report = Path(folder) / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps(differences(transport, places)))


if __name__ == "__main__":
    main()
