"""A rank is killed, raises or stalls in the middle of a step; the others report how they end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.launch import stall

DEADLINE_SECONDS = 6.0
LONG_SECONDS = 350.0
"""A deadline that must not pass."""


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("boom")


def main() -> None:
    # torchrun ends the survivors of a failed job by this signal; here they must end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    how, victim, transport, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_mlp()
    plan = make_plan(model, dist.get_world_size(), 6)
    pipeline = pk.Pipeline(
        model,
        plan,
        loss=F.cross_entropy,
        deadline_seconds=DEADLINE_SECONDS if how == "stall" else LONG_SECONDS,
        startup_seconds=LONG_SECONDS,
        transport=transport,
    )
    pipeline.step(*make_batch(12))
    if rank == victim:
        first = next(iter(pipeline.stages.values())).layers[0].module
        calls = iter(range(100))
        others = {*range(dist.get_world_size())} - {victim}
        stalled = partial(stall, folder, others, LONG_SECONDS)
        trouble = {"kill": kill, "raise": fail, "stall": stalled}[how]
        first.register_forward_hook(lambda *_: trouble() if next(calls) == 3 else None)
    start = time.monotonic()
    try:
        pipeline.step(*make_batch(12))
    except pk.errors.PenstockError as error:
        report = {
            "kind": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - start,
        }
        (folder / f"report-{rank}.json").write_text(json.dumps(report))
        os._exit(1)


if __name__ == "__main__":
    main()
