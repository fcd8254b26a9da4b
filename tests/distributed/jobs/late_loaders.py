"""A loader raises while another rank's is late: who gives up must not hide what was first.

    torchrun ... late_loaders.py TRANSPORT FOLDER

Each rank reports what it was told: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock as pk
from penstock.base.errors import RunError
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.training import sgd

DEADLINE_SECONDS = 2.0


def batches(rank: int):
    """Of rank 1 it raises at the third one; there rank 0 is late, longer than others wait."""
    yield make_batch(8)
    yield make_batch(8)
    if rank == 1:
        raise OSError("disk gone")
    if rank == 0:
        time.sleep(2 * DEADLINE_SECONDS)
    yield make_batch(8)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = make_mlp()
    pipeline = pk.Pipeline(
        model, make_plan(model, num_ranks, 4, "zb-v"), loss=F.cross_entropy, optimizer=sgd,
        transport=sys.argv[1], deadline_seconds=DEADLINE_SECONDS, startup_seconds=60,
    )  # fmt: skip
    for _ in range(2):  # from now on the shorter deadline holds
        pipeline.step(*make_batch(8))
    dist.barrier()
    told = "nothing"
    try:
        with pipeline:
            for _ in pipeline.steps(batches(rank)):
                pass
    except (OSError, RunError) as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()  # whoever keeps the store stays until all have heard
    Path(sys.argv[-1], f"report-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
