"""Every process is a tensor rank of a mesh; it trains, and reports what differs from one device.

``python meshes.py SCHEDULE SIZES TRANSPORT WHERE FOLDER`` in a job; ``WHERE`` is ``cpu`` or
``emu``, accelerators in software.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
from penstock.base.errors import InputError
from tests.kit.accelerator import collectives
from tests.kit.accelerator.devices import register
from tests.kit.groups import make_net, net_loss
from tests.kit.one_device import same
from tests.numerics.test_meshes import (
    CLIP,
    TOLERANCE,
    batches,
    mesh,
    momentum,
    of_sizes,
    on_one_device,
)


def planned(model, schedule, sizes):
    if "," in sizes:  # tensor ranks of each stage; else pipe × data × tensor
        return of_sizes(model, schedule, (1, 1), [int(size) for size in sizes.split(",")])
    return mesh(model, schedule, *(int(size) for size in sizes.split("x")))


def differences(schedule, sizes, transport, where, folder):
    torch.manual_seed(dist.get_rank())
    uneven = "," in sizes
    model = make_net()
    # What a member has built beside the first, or of weights that an earlier stage has, too.
    others = [model.head.logits.weight] if uneven else [*model.parameters()]
    if dist.get_rank() >= int(sizes.split(",")[0]) if uneven else dist.get_rank() % 2:
        with torch.no_grad():
            for parameter in others:
                parameter.add_(1.0)
    plan = planned(model, schedule, sizes)
    with pk.Pipeline(
        model,
        plan,
        loss=net_loss,
        optimizer=momentum,
        clip_norm=CLIP,
        seed=3,
        transport=transport,
        devices=[f"emu:{seat}" for seat in range(plan.num_seats)] if where == "emu" else "cpu",
        deadline_seconds=300,
    ) as pipeline:
        yield from kept_in_vain(model, pipeline)
        first, *rest = batches()
        losses = [pipeline.step(*first), *pipeline.steps(rest)]
        state = pipeline.gather_state_dict()
        pipeline.save(folder / "run", background=False)
        pipeline.step(*first)
        pipeline.load(folder / "run")
        again = pipeline.gather_state_dict()
        if pipeline.timeline.num_ranks != plan.num_ranks:
            yield "timeline"
    if dist.get_rank():
        return  # rank 0 knows what all have
    expected, theirs = on_one_device()
    if not same(torch.stack(losses).cpu(), expected, TOLERANCE):
        yield "losses"
    for key, value in theirs.state_dict().items():
        if not same(state[key].cpu(), value, TOLERANCE):
            yield key
        if not torch.equal(state[key], again[key]):
            yield f"{key} again"


def kept_in_vain(model, pipeline):
    """What this process keeps of its stages' layers beside what it trains, or gives for whole."""
    own = [tensor for stage in pipeline.stages.values() for tensor in stage.parameters()]
    trained = {tensor.data_ptr() for tensor in own}
    keys = {key for stage in pipeline.stages.values() for key in stage.state_dict()}
    held = {key: tensor for key, tensor in model.named_parameters() if key in keys}
    in_parts = [key for key, tensor in held.items() if tensor.is_meta]
    yield from (
        f"whole {key}"
        for key, tensor in held.items()
        if key not in in_parts and tensor.data_ptr() not in trained
    )
    try:
        pipeline.state_dict()
    except InputError as error:
        assert in_parts and "gather_state_dict()" in str(error)
    else:
        yield from in_parts


if __name__ == "__main__":
    _, schedule, sizes, transport, where, folder = sys.argv
    if where == "emu":
        register()
        collectives.register()
    dist.init_process_group("gloo")
    place = Path(folder)
    found = [*differences(schedule, sizes, transport, where, place)]
    if where == "emu":
        torch.get_device_module().check()
    report = place / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps({"differences": found}))
    dist.destroy_process_group()
