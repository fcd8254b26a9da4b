"""A long training; every rank reports what it holds as time goes by.

torchrun ... long_run.py steps NUM_STEPS FOLDER
torchrun ... long_run.py stream NUM_MINIBATCHES FOLDER
torchrun ... long_run.py live NUM_FRAMES FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as F

import penstock as pk
from tests.kit.helpers import make_batch, make_mlp, make_plan
from tests.kit.live import live_plan, stream_of
from tests.soak.late import late_plan

NUM_LOOKS = 20


def look():
    """(resident bytes, messages in shared memory, other open descriptors, threads, seconds) of this
    process now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    segments = sum(name.startswith("/memfd:penstock") for name in opened)
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "segments": segments,
        "descriptors": len(opened) - segments,
        "threads": threading.active_count(),
        "seconds": time.monotonic(),
    }


def batches(count):
    # A few minibatches over and over, of different sizes.
    kept = [make_batch(rows, seed=rows) for rows in (8, 9, 12, 5)]
    return (kept[number % len(kept)] for number in range(count))


def live_losses(model, num_ranks, count):
    """Of every frame of a live stream."""
    plan = live_plan(model, num_ranks)
    with stream_of(model, plan, loss=F.cross_entropy, optimizer=sgd) as stream:
        first = os.environ["RANK"] == "0"
        frame = make_batch(8, seed=8)
        for result in stream.over(repeat(frame, count) if first else None):
            yield result.loss


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def trained_losses(way, model, num_ranks, count):
    """Of every minibatch."""
    plan = late_plan(model, num_ranks) if way == "stream" else make_plan(model, num_ranks, 4)
    with pk.Pipeline(model, plan, loss=F.cross_entropy, optimizer=sgd, seed=0) as pipeline:
        if way == "stream":
            yield from pipeline.steps(batches(count))
        else:
            yield from (pipeline.step(*batch) for batch in batches(count))


def main():
    way, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[-1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_mlp()
    num_ranks = int(os.environ["WORLD_SIZE"])
    looks = []
    if way == "live":
        losses = live_losses(model, num_ranks, count)
    else:
        losses = trained_losses(way, model, num_ranks, count)
    for number, loss in enumerate(losses):
        assert bool(loss.isfinite())
        if number % (count // NUM_LOOKS) == 0:
            looks.append(look())
    rank = os.environ["RANK"]
    (folder / f"report-{rank}.json").write_text(json.dumps({"looks": looks, "count": count}))


if __name__ == "__main__":
    main()
