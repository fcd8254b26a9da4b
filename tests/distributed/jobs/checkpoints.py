"""Ranks that go on from a checkpoint, train, and save.

    torchrun ... checkpoints.py TRANSPORT RUN STEPS FOLDER

Each rank reports the position that it went on from and its losses: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from penstock.base.errors import PenstockError
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import adamw, pipeline_of


def train(run, steps, num_ranks=2, **options):
    """(position at the beginning, losses) of some steps, with a checkpoint at the end."""
    with pipeline_of(
        make_mlp(), "1f1b", num_ranks, optimizer=adamw, clip_norm=1.0, **options
    ) as pipeline:
        position = pipeline.load(run)
        first = position or 0
        losses = [float(pipeline.step(*make_batch(seed=first + step))) for step in range(steps)]
        if steps:
            pipeline.save(run)
    return position, losses


def main() -> None:
    transport, run, steps, folder = sys.argv[1:]
    rank, report = 0, {}
    try:
        if transport == "apart":  # ranks see different folders
            import os

            run, transport = f"{run}/{os.environ['RANK']}", "auto"
        report["position"], report["losses"] = train(run, int(steps), transport=transport)
    except PenstockError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    rank = dist.get_rank()
    (Path(folder) / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
