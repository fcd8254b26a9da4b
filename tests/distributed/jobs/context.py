"""Every process is a context rank; it trains, and reports what differs from one device.

``python context.py CASE SIZES TRANSPORT FOLDER`` in a job. ``SIZES`` are pipe × data × context. The
case is a schedule, or ``killed``: then the last process ends in the middle of a step, and the
others say what they were told.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import penstock as pk
import tests.kit.tracing  # noqa: F401 - is loaded once for all ranks
from penstock.base.errors import RunError
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.groups import net_loss
from tests.kit.one_device import same
from tests.numerics.test_context import TOLERANCE, Words, context_plan, words
from tests.numerics.test_meshes import momentum

CLIP = 0.05


def pipeline_of(model, schedule, sizes, transport):
    plan = context_plan(model, sizes[0], 4, sizes[2], schedule, copies=sizes[1])
    return pk.Pipeline(
        model, plan, loss=net_loss, optimizer=momentum, clip_norm=CLIP, seed=3,
        transport=transport, deadline_seconds=300,
    )  # fmt: skip


def differences(schedule, sizes, transport, folder):
    model = capture(Words(), words(0)[0], granularity="block", verify=False)
    theirs = copy.deepcopy(model)
    batches = [words(seed, rows=8) for seed in range(3)]
    with pipeline_of(model, schedule, sizes, transport) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
        state = pipeline.gather_state_dict()
        pipeline.save(folder / "run", background=False)
        pipeline.step(*batches[0])
        pipeline.load(folder / "run")
        again = pipeline.gather_state_dict()
        outputs = pipeline.evaluate(batches[0][0])
    if dist.get_rank():
        return  # rank 0 knows what all have
    one = SingleDevice(theirs, 4, net_loss, partial(momentum, clip_norm=CLIP), seed=3)
    expected = torch.stack([one.step(*batch) for batch in batches])
    if not same(torch.stack(losses), expected, TOLERANCE):
        yield "losses"
    for key, value in theirs.state_dict().items():
        if not same(state[key], value, TOLERANCE):
            yield key
        if not torch.equal(state[key], again[key]):
            yield f"{key} again"
    if not same(outputs, theirs.eval()(batches[0][0]), TOLERANCE):
        yield "outputs"


def killed(sizes, transport):
    model = capture(Words(), words(0)[0], granularity="block", verify=False)
    calls, last = [], dist.get_rank() == dist.get_world_size() - 1

    def die(*_):
        calls.append(None)
        if last and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    model.original.blocks[-1].mlp[0].register_forward_hook(die)
    pipeline = pipeline_of(model, "1f1b", sizes, transport)
    start = time.monotonic()
    try:
        for seed in range(9):
            start = time.monotonic()
            pipeline.step(*words(seed, rows=8))
    except RunError as error:
        return {"told": str(error), "seconds": time.monotonic() - start}
    return {"told": "", "seconds": 0.0}


if __name__ == "__main__":
    _, case, text, transport, folder = sys.argv
    dist.init_process_group("gloo")
    place, numbers = Path(folder), [*map(int, text.split("x"))]
    report = place / f"report-{dist.get_rank()}.json"
    if case == "killed":
        report.write_text(json.dumps(killed(numbers, transport)))
        os._exit(0)
    report.write_text(json.dumps([*differences(case, numbers, transport, place)]))
    dist.destroy_process_group()
