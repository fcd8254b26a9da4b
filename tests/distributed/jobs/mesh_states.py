"""Weights of a mesh go through torch's own distributed checkpoints, and come back.

``python mesh_states.py SIZES FOLDER`` in a job; ``SIZES`` is pipe x data x tensor. Each process
reports what is not as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import penstock as pk
from penstock.base.errors import InputError
from penstock.interop.torch_checkpoints import load_dcp, save_dcp
from tests.kit.groups import SPLITS, make_net, net_loss
from tests.numerics.test_meshes import UNEVEN_SPLITS, batches, mesh, momentum

OPTIONS = {"loss": net_loss, "optimizer": momentum, "deadline_seconds": 300}


def unequal(what, ours, theirs):
    return [f"{what}: {key}" for key, value in theirs.items() if not torch.equal(ours[key], value)]


def trained_by_threads(folder, came):
    """Weights that a single process has trained and saved; and what it makes of those that came."""
    model = make_net()
    plan = mesh(model, "1f1b", 1, 1, 2)
    with pk.Pipeline(model, plan, transport="threads", **OPTIONS) as pipeline:
        pipeline.step(*batches()[1])
        dcp.save(pipeline.dtensor_state_dict(), checkpoint_id=folder, no_dist=True)
        own = {key: value.clone() for key, value in pipeline.state_dict().items()}
        state = pipeline.dtensor_state_dict()
        dcp.load(state, checkpoint_id=came, no_dist=True)
        pipeline.load_dtensor_state_dict(state)
        return own, {key: value.clone() for key, value in model.state_dict().items()}


def refused(pipeline, state, key):
    try:
        pipeline.load_dtensor_state_dict({**state, key: torch.zeros(1)})
    except InputError as error:
        return key not in str(error)
    return True


def differences(sizes, folder):
    model = make_net()
    splits = UNEVEN_SPLITS if sizes[2] == 3 else SPLITS
    plan = mesh(model, "1f1b", *sizes, splits=splits)
    first, *rest = batches()
    ours, theirs = folder / "ours", folder / "theirs"
    with pk.Pipeline(model, plan, **OPTIONS) as pipeline:
        pipeline.step(*first)
        state = pipeline.dtensor_state_dict()
        before = pipeline.gather_state_dict()
        save_dcp(pipeline, ours)
        whole = {key: value.full_tensor() for key, value in state.items()}
        if dist.get_rank() == 0:
            yield from unequal("given", {**before, **whole}, before)
        some = next(iter(state.values()))
        if not isinstance(some, DTensor) or some.device_mesh.mesh_dim_names != ("data", "tensor"):
            yield "no mesh"
        if not any(value.to_local().numel() < value.numel() for value in state.values()):
            yield "nothing is divided"
        pipeline.step(*rest[0])
        load_dcp(pipeline, ours)
        again = pipeline.gather_state_dict()
        if dist.get_rank() == 0:
            yield from unequal("loaded", again, before)
            expected, of_threads = trained_by_threads(theirs, ours)
            yield from unequal("loaded by threads", of_threads, before)
        dist.barrier()
        dcp.load(state, checkpoint_id=theirs)
        pipeline.load_dtensor_state_dict(state)
        from_threads = pipeline.gather_state_dict()
        if dist.get_rank() == 0:
            yield from unequal("saved by threads", from_threads, expected)
        if refused(pipeline, state, next(iter(state))):
            yield "another shape"


def main() -> None:
    _, sizes, name = sys.argv
    dist.init_process_group("gloo")
    folder = Path(name)
    found = [*differences([int(size) for size in sizes.split("x")], folder)]
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
