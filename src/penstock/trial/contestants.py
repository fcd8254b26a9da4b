"""Who trains in a trial: the pipeline, and single devices beside it.

All start from the same weights and see the same minibatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.pipeline import Pipeline
from penstock.plans import Plan
from penstock.timing.timeline import Timeline
from penstock.trial.reference.single_device import SingleDevice
from penstock.trial.workload import Batch, Workload


@dataclass
class Contestant:
    """One way to train the workload, and how it has done so far.

    Attributes:
        name: for people.
        model: its own copy; trained in place.
        seconds: of every step.
        losses: of every step.
        held_out: (step, loss) of every evaluation.
        timelines: of every step, or stream of steps, if it records them.
    """

    name: str
    model: nn.Module
    trainer: Pipeline | SingleDevice
    num_threads: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; note its loss and how long it took."""
        with intra_op_threads(self.num_threads):
            start = time.perf_counter()
            told = self.trainer.step(*batch)
            assert told is not None  # only a pipeline that was asked to keeps its results
            loss = float(told)
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        if isinstance(self.trainer, Pipeline):
            self.timelines.append(self.trainer.timeline)
        return loss

    def stream(self, batches: Sequence[Batch]) -> None:
        """Train on minibatches without a flush between them; each counts as an equal share of the
        time."""
        assert isinstance(self.trainer, Pipeline)
        with intra_op_threads(self.num_threads):
            start = time.perf_counter()
            told = [loss for loss in self.trainer.steps(batches) if loss is not None]
            seconds = time.perf_counter() - start
        self.losses += map(float, told)
        self.seconds += [seconds / len(told)] * len(told)
        self.timelines.append(self.trainer.timeline)

    @property
    def flushes(self) -> bool:
        """Whether it trains one minibatch after the other."""
        if isinstance(self.trainer, Pipeline):
            return not self.trainer.plan.versions.asynchronous
        return True

    def evaluate(self, batch: Batch, loss: Callable[[Any, Any], Tensor]) -> float:
        """The loss on held-out data, after the steps so far."""
        inputs, targets = batch
        with intra_op_threads(self.num_threads):
            value = float(loss(self.trainer.evaluate(inputs), targets))
        self.held_out.append((len(self.losses), value))
        return value

    def close(self) -> None:
        """End its workers, if it has any."""
        if isinstance(self.trainer, Pipeline):
            self.trainer.close()


def pipelined(workload: Workload, plan: Plan) -> Contestant:
    """The workload as the plan spreads it, in threads."""
    model = workload.build_model()
    trainer = Pipeline(
        model, plan, loss=workload.loss, optimizer=workload.optimizer, transport="threads", seed=0
    )
    return Contestant("pipeline", model, trainer, plan.num_threads)


def on_one_device(workload: Workload, num_microbatches: int, num_threads: int) -> Contestant:
    """The workload on one device, accumulating over the same microbatches."""
    model = workload.build_model()
    trainer = SingleDevice(model, num_microbatches, workload.loss, workload.optimizer, seed=0)
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    size = "" if num_microbatches > 1 else ", whole batch at once"
    return Contestant(f"one device, {threads}{size}", model, trainer, num_threads)


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many threads inside an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
