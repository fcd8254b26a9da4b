"""Two ranks do what ordinary loops do, and compare it with one device.

    torchrun ... loops.py TRANSPORT FOLDER

Each rank reports what is not as it should be: ``report-<rank>.json``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

import penstock as pk
from penstock.base.errors import InputError, RunError
from penstock.interop.loggers import CSVLogger
from penstock.trial.reference.single_device import SingleDevice
from tests.kit import training
from tests.kit.helpers import Lambda, make_batch, make_mlp
from tests.kit.one_device import OneDevice
from tests.kit.training import momentum


def model_of_batches() -> torch.nn.Module:
    """Takes a dictionary."""
    return torch.nn.Sequential(Lambda(lambda batch: batch["x"] * batch["factor"]), *make_mlp(0.0))


def batch_of(seed: int) -> dict[str, object]:
    inputs, labels = make_batch(9, seed=seed)
    return {"x": inputs, "factor": 2, "labels": labels}


class Run:
    """Has what a run of wandb has."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append(numbers)


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


def pipeline_of(model: torch.nn.Module, transport: str, **options) -> pk.Pipeline:
    options = {"optimizer": momentum, "transport": transport, **options}
    # The first rank has a stage without a scheduler, and all the same it comes to every meeting.
    return training.pipeline_of(model, "1f1b", dist.get_world_size(), cuts=[1], **options)


class OneRankStops(pk.Callback):
    """Wants to stop on the last rank only, at the second evaluation."""

    def on_evaluate(self, step, loss, pipeline):
        return dist.get_rank() == dist.get_world_size() - 1 and step >= 4


def fitted(transport: str, folder: Path) -> Iterator[str]:
    """Batches with labels, a scheduler that waits, loggers, and an end that all find together."""
    ours, theirs = model_of_batches(), model_of_batches()
    reference = OneDevice(theirs, 4, optimizer=momentum)
    their_scheduler = plateau(reference.optimizer)
    loader = [batch_of(seed) for seed in range(2)]
    log, run = folder / f"log-{dist.get_rank()}.csv", Run()
    with pipeline_of(ours, transport, lr_scheduler=plateau) as pipeline:
        result = pk.fit(
            pipeline, loader, epochs=9, evaluate=[batch_of(9)], progress=False,
            callbacks=[OneRankStops(), CSVLogger(log)], watch=run,
        )  # fmt: skip
        weights = pipeline.gather_state_dict()
        rates = pipeline.optimizers.learning_rates
    if (result.num_steps, result.stopped) != (4, True):
        yield f"ended with {result}"
    for step in range(4):
        reference.step({**loader[step % 2]}, loader[step % 2]["labels"])
        if step % 2:
            with torch.no_grad():
                held_out = reference.loss(theirs(batch_of(9)), batch_of(9)["labels"])
            their_scheduler.step(float(held_out))
            ours_held_out = result.held_out[step // 2][1]
            if not torch.allclose(ours_held_out, held_out):
                yield f"held-out loss {ours_held_out} instead of {held_out}"
    if any(not torch.equal(weights[key], value) for key, value in theirs.state_dict().items()):
        yield "weights"
    if {*rates} - {reference.optimizer.param_groups[0]["lr"]}:
        yield f"learning rates {rates}"
    if log.exists() != (dist.get_rank() == 0):
        yield "who logs"
    if bool(run.rows) != (dist.get_rank() == 0):
        yield "who watches"
    memory = {f"memory_bytes/rank {rank}" for rank in range(dist.get_world_size())}
    if run.rows and not {"rows_per_second", "flops_per_second", "bubble", *memory} <= {
        *run.rows[1]
    }:
        yield f"what is watched: {run.rows[1]}"


def refused(transport: str) -> Iterator[str]:
    """What differs between ranks is said, and every rank hears it."""
    rank = dist.get_rank()
    for what, message in (
        (lambda it: it.schedulers.step(1.0 + rank), "steps its schedulers with"),
        (lambda it: it.gather_state_dict(rank=rank), "calls gather_state_dict(rank="),
    ):
        with pipeline_of(model_of_batches(), transport, lr_scheduler=plateau) as pipeline:
            try:
                what(pipeline)
            except RunError as error:
                if message not in str(error):
                    yield str(error)
            else:
                yield f"not refused: {message}"
        dist.barrier()
    with pipeline_of(model_of_batches(), transport) as pipeline:
        try:
            pipeline.gather_state_dict(rank=2)
        except InputError as error:
            if "may be 1 at most" not in str(error):
                yield str(error)
        loss = copy.deepcopy(pipeline.step(batch_of(1)))
        if type(loss) is not torch.Tensor:
            yield "a copy of a loss"


class Branches(torch.nn.Module):
    """No chain, and another one in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 8)
        self.dropout = torch.nn.Dropout(0.4)
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, value):
        value = self.dropout(torch.tanh(self.first(value)))
        return self.head(self.left(value) * F.dropout(self.right(value), 0.2, self.training))


def evaluated_between_epochs(transport: str) -> Iterator[str]:
    """A captured model, trained, evaluated in both ways, and trained again."""
    ours = pk.capture(Branches(), make_batch(4)[0])
    theirs = copy.deepcopy(ours)
    reference = SingleDevice(theirs, 4, F.cross_entropy, momentum, seed=3)
    held_out = make_batch(9, seed=9)
    with pipeline_of(ours, transport) as pipeline:
        for epoch in range(3):
            batch = make_batch(9, seed=epoch)
            if not torch.allclose(pipeline.step(*batch), reference.step(*batch)):
                yield f"loss of epoch {epoch}"
            expected = reference.evaluate(held_out[0])
            if not torch.allclose(pipeline.evaluate(held_out[0]), expected, atol=1e-6):
                yield f"outputs behind epoch {epoch}"
            if epoch:
                judged = pipeline.evaluate_loss(*held_out)
                if not torch.allclose(judged, F.cross_entropy(expected, held_out[1])):
                    yield f"held-out loss behind epoch {epoch}"
        weights = pipeline.gather_state_dict()
    if any(not torch.equal(weights[key], value) for key, value in theirs.state_dict().items()):
        yield "weights of a captured model"


def main(transport: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [
        *fitted(transport, Path(folder)),
        *refused(transport),
        *evaluated_between_epochs(transport),
    ]
    Path(folder, f"report-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
