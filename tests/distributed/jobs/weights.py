"""Two ranks train, and read weights in every way there is.

    torchrun ... weights.py TRANSPORT FOLDER

Each rank reports what it was warned of, and what is not as on one device: ``report-<rank>.json``.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as pk
from penstock.base.errors import PenstockError
from penstock.trial.reference.single_device import SingleDevice
from tests.kit import training
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import sgd


class Pair(NamedTuple):
    """What a stage hands to the next."""

    hidden: Tensor
    name: str


class Pack(nn.Module):
    def forward(self, value):
        return Pair(value.t().contiguous().t(), "packed")


class Unpack(nn.Module):
    """Wants the strides that its input had."""

    def forward(self, pair):
        assert isinstance(pair, Pair)
        assert pair.name == "packed"
        assert not pair.hidden.is_contiguous()
        return pair.hidden * 1


def warned(read: Callable[[], object]) -> int:
    """How often reading warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return sum("reads weights that this process has not trained" in str(w.message) for w in caught)


def pipeline_of(model: nn.Module, transport: str, schedule: str = "1f1b", **options) -> pk.Pipeline:
    options = {"optimizer": sgd, "transport": transport, **options}
    return training.pipeline_of(model, schedule, dist.get_world_size(), **options)


def reading(transport: str) -> dict[str, object]:
    """Before and after training, after the whole weights were loaded, and after the end."""
    model = make_mlp(0.0)
    inputs, targets = make_batch()
    found: dict[str, object] = {}
    with pipeline_of(model, transport) as pipeline:
        found["before"] = warned(model.state_dict)
        pipeline.step(inputs, targets)
        found["state_dict"] = warned(model.state_dict)
        found["call"] = warned(lambda: model(inputs))
        found["own"] = warned(pipeline.state_dict)
        whole: dict[str, Tensor] = {}
        found["whole"] = warned(lambda: whole.update(pipeline.gather_state_dict(rank=0)))
        found["evaluate"] = warned(lambda: pipeline.evaluate(inputs))
        copied = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        if whole:
            copied.load_state_dict(whole)
        found["copy"] = warned(copied.state_dict)
        pipeline.step(inputs, targets)
    found["after"] = warned(model.state_dict)
    return found


def whole_weights(transport: str) -> list[str]:
    """Those that one device has, in its order, on every rank or on the one that is named."""
    found = []
    for schedule in ("1f1b", "zb-v", "chimera"):
        dtype = torch.float64
        ours, theirs = make_mlp(0.0, dtype), make_mlp(0.0, dtype)
        reference = SingleDevice(theirs, 4, F.cross_entropy, sgd)
        with pipeline_of(ours, transport, schedule) as pipeline:
            for seed in range(2):
                pipeline.step(*make_batch(8, dtype, seed))
                reference.step(*make_batch(8, dtype, seed))
            states = {rank: pipeline.gather_state_dict(rank=rank) for rank in (0, None, 1)}
        for rank, state in states.items():
            expected = theirs.state_dict() if rank in (None, dist.get_rank()) else {}
            if [*state] != [*expected]:
                found.append(f"{schedule}: {[*state]}")
            elif any(not torch.allclose(state[k], expected[k], rtol=1e-11) for k in state):
                found.append(f"{schedule}: values")
    return found


def own_classes(transport: str) -> list[str]:
    """They travel if they are named."""
    told = []
    for types in ((), (Pair,)):
        model = nn.Sequential(nn.Linear(16, 8), Pack(), Unpack(), nn.Linear(8, 4))
        with pipeline_of(model, transport, message_types=types, cuts=[2]) as pipeline:
            try:
                loss = pipeline.step(*make_batch())
                told.append(f"{loss is not None}")
            except PenstockError as error:
                told.append(str(error))
    return told


def main(transport: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {
        "reading": reading(transport),
        "whole": whole_weights(transport),
        "own classes": own_classes(transport),
    }
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
