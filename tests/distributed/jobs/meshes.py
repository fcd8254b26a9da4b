"""Every process is a tensor rank of a mesh; it trains, and reports what differs from one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
from penstock.errors import InputError
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
    untied_on_one_device,
)


def differences(schedule, sizes, transport, folder):
    torch.manual_seed(dist.get_rank())
    uneven = "," in sizes  # tensor ranks of each stage; else pipe × data × tensor
    model = make_net(tied=not uneven)
    if not uneven and dist.get_rank() % 2:  # what another member has built does not count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    if uneven:
        plan = of_sizes(model, schedule, (1, 1), [int(size) for size in sizes.split(",")])
    else:
        plan = mesh(model, schedule, *(int(size) for size in sizes.split("x")))
    with pk.Pipeline(
        model,
        plan,
        loss=net_loss,
        optimizer=momentum,
        clip_norm=CLIP,
        seed=3,
        transport=transport,
        deadline_seconds=60,
    ) as pipeline:
        first, *rest = batches()
        losses = [pipeline.step(*first), *pipeline.steps(rest)]
        state = pipeline.state_dict(whole=True)
        pipeline.save(folder / "run", background=False)
        pipeline.step(*first)
        pipeline.load(folder / "run")
        again = pipeline.state_dict(whole=True)
        try:
            pipeline.state_dict()
        except InputError as error:
            assert "whole=True" in str(error)
        else:
            yield "state_dict() of parts"
        if pipeline.timeline.num_ranks != plan.num_ranks:
            yield "timeline"
    expected, theirs = untied_on_one_device() if uneven else on_one_device()
    if not same(torch.stack(losses), expected, TOLERANCE):
        yield "losses"
    if dist.get_rank() == 0:
        wanted = theirs.state_dict()
        yield from (key for key in wanted if not same(state[key], wanted[key], TOLERANCE))
        yield from (f"{key} again" for key in wanted if not torch.equal(state[key], again[key]))


if __name__ == "__main__":
    _, schedule, sizes, transport, folder = sys.argv
    dist.init_process_group("gloo")
    place = Path(folder)
    found = [*differences(schedule, sizes, transport, place)]
    report = place / f"report-{dist.get_rank()}.json"
    report.write_text(json.dumps({"differences": found}))
    dist.destroy_process_group()
