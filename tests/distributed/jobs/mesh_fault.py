"""A member of a group is killed in the middle of a step; the others say what they were told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

import penstock as pk
from penstock.base.errors import RunError
from tests.kit.groups import make_net, net_batch, net_loss
from tests.numerics.test_meshes import mesh, momentum


def main(transport, folder):
    dist.init_process_group("gloo")
    rank, calls, model = dist.get_rank(), [], make_net()

    def die(*_):
        calls.append(None)
        if rank == 3 and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[1].mlp.register_forward_hook(die)
    pipeline = pk.Pipeline(
        model,
        mesh(model, "1f1b", 2, 1, 2),
        loss=net_loss,
        optimizer=momentum,
        transport=transport,
        deadline_seconds=300,
    )
    told, start = "", time.monotonic()
    try:
        for seed in range(5):
            start = time.monotonic()
            pipeline.step(*net_batch(8, seed))
    except RunError as error:
        told = str(error)
    report = {"told": told, "seconds": time.monotonic() - start}
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
