"""Copies of groups sum gradients in every way; each process reports what differs from one device.

``python mesh_reducers.py WAYS FOLDER`` in a job of pipe 1 × data 2 × tensor 2, and the two members
of a parameter server if that is the way; ``WAYS`` with commas between. Behind its first step every
run saves, and rank 0 goes on from there alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
from tests.kit.groups import make_net, net_loss
from tests.kit.one_device import same
from tests.numerics.test_meshes import CLIP, TOLERANCE, batches, mesh, momentum, on_one_device

OPTIONS = {"loss": net_loss, "optimizer": momentum, "seed": 3, "deadline_seconds": 300}


def differences(way, folder):
    model = make_net()
    plan = mesh(model, "1f1b", 1, 2, 2).with_reducer(way)
    first, *rest = batches()
    with pk.Pipeline(model, plan, clip_norm=CLIP, **OPTIONS) as pipeline:
        losses = [pipeline.step(*first)]
        pipeline.save(folder, background=False)
        losses += pipeline.steps(rest)
        state = pipeline.gather_state_dict()
    if dist.get_rank():
        return  # rank 0 knows what all have
    expected, theirs = on_one_device()
    if not same(torch.stack(losses), expected, TOLERANCE):
        yield f"{way}: losses"
    alone = make_net()
    with pk.Pipeline(
        alone, mesh(alone, "1f1b", 1, 1, 1), clip_norm=CLIP, transport="threads", **OPTIONS
    ) as pipeline:
        pipeline.load(folder)
        for batch in rest:
            pipeline.step(*batch)
    for key, value in theirs.state_dict().items():
        if not same(state[key], value, TOLERANCE):
            yield f"{way}: {key}"
        if not same(alone.state_dict()[key], value, TOLERANCE):
            yield f"{way}: {key}, gone on from a checkpoint"


def stepped(way, **clips):
    """The weights after a step on whose norm no ranks agree, so that copies keep rows of sums."""
    model = make_net()
    plan = mesh(model, "1f1b", 1, 2, 2).with_reducer(way)
    with pk.Pipeline(model, plan, **clips, **OPTIONS) as pipeline:
        pipeline.step(*batches()[0])
        return pipeline.gather_state_dict()


def main() -> None:
    _, ways, name = sys.argv
    dist.init_process_group("gloo")
    folder = Path(name)
    found = []
    for way in ways.split(","):
        found += differences(way, folder / way)
    for clips in ({}, {"clip_stage_norm": CLIP / 4}) if "sharded" in ways else ():
        by_rows, by_all = stepped("sharded", **clips), stepped("owners", **clips)
        changed = (key for key, value in by_all.items() if not same(by_rows[key], value))
        found += [f"{key} {clips}" for key in changed]
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
