"""Four ranks train and load only rows that they compute with: two replicas, a stage, a last one.

    torchrun ... own_rows.py FOLDER

Each rank reports its losses, which rows it loaded, and what it was refused: ``report-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import penstock as pk
from penstock.base.errors import InputError
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, sgd

NUM_ROWS = 40


class Noted(Dataset):
    """Notes which rows were asked for."""

    def __init__(self):
        self.inputs, self.targets = make_batch(NUM_ROWS)
        self.loaded = []

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.inputs[index], self.targets[index]


def pipeline_of(**options) -> pk.Pipeline:
    model = make_mlp(0.0)
    given = {"loss": F.cross_entropy, "optimizer": sgd, "deadline_seconds": DEADLINE_SECONDS}
    return pk.Pipeline(model, replicated(model, (2, 1, 1), 4), **given, **options)


def loader_of(rows, workers=0) -> DataLoader:
    """Minibatches of 15, 15 and 10 rows, in the same order on all ranks."""
    order = torch.Generator().manual_seed(0)
    return DataLoader(rows, batch_size=15, shuffle=True, generator=order, num_workers=workers)


def refused(**options) -> str:
    with pipeline_of(**options) as pipeline:
        try:
            pipeline.own_rows(Noted())
        except InputError as error:
            return str(error)
    return ""


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with pipeline_of() as pipeline:
        expected = [float(pipeline.step(*batch)) for batch in loader_of(Noted())]
    noted = Noted()
    with pipeline_of(compare_data=False) as pipeline:
        losses = [float(pipeline.step(*batch)) for batch in loader_of(pipeline.own_rows(noted))]
    with pipeline_of(compare_data=False) as pipeline:
        beside = loader_of(pipeline.own_rows(Noted()), workers=1)
        in_workers = [float(pipeline.step(*batch)) for batch in beside]
    report = {
        "expected": expected,
        "losses": losses,
        "in workers": in_workers,
        "loaded": noted.loaded,
        "compared": refused(),
        "weighed": refused(compare_data=False, weight=len),
    }
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
