"""What trains in a trial: the pipeline, and single devices beside it.

All start from the same weights and see the same minibatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.core.timing.timeline import Timeline
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from penstock.training.profiler.disturbance import QUIET_SHARE, Usage, share_of_others
from penstock.trial.reference.single_device import SingleDevice
from penstock.trial.workload import Batch, Workload

_ENOUGH = 0.5
"""The share of the steps that must be undisturbed, for these to stand for all."""


class Pace(NamedTuple):
    """How fast somebody trains.

    Attributes:
        seconds: of a step, the median.
        others: the most of the cores' time that other programs had meanwhile, where that disturbed
            so many steps that the time says little; otherwise 0.
    """

    seconds: float
    others: float = 0.0


@dataclass
class Contestant:
    """One way to train the workload, and its results so far.

    Attributes:
        name: shown to people.
        model: a copy of its own, trained in place.
        trainer: trains the model.
        num_threads: torch's intra-op threads while it trains.
        seconds: one entry per step, as in ``losses``.
        held_out: (step, loss) of every evaluation.
        timelines: one entry per step, or per stream of steps, if the trainer records them.
        others: one entry per step: the share of the cores' time that other programs had meanwhile;
            empty where nobody looked.
    """

    name: str
    model: nn.Module
    trainer: Pipeline | SingleDevice
    num_threads: int
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; record its loss and its seconds."""
        with intra_op_threads(self.num_threads):
            start = time.perf_counter()
            result = self.trainer.step(*batch)
            assert result is not None  # only a pipeline that was asked to keeps its results
            loss = float(result)
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
            losses = [float(loss) for loss in self.trainer.steps(batches) if loss is not None]
            seconds = time.perf_counter() - start
        self.losses += losses
        self.seconds += [seconds / len(losses)] * len(losses)
        self.timelines.append(self.trainer.timeline)

    @contextmanager
    def taking_turn(self) -> Iterator[None]:
        """Around some steps: note what other programs had of the machine meanwhile."""
        before = Usage.now()
        yield
        share = share_of_others(before, Usage.now())
        self.others += [share] * (len(self.seconds) - len(self.others))

    @property
    def pace(self) -> Pace:
        """How fast it is, by the steps that nobody disturbed, if there are enough of them."""
        if not self.others:
            return Pace(median(self.seconds))
        steps = zip(self.seconds, self.others, strict=True)
        quiet = [seconds for seconds, share in steps if share <= QUIET_SHARE]
        if len(quiet) >= _ENOUGH * len(self.seconds):
            return Pace(median(quiet))
        return Pace(median(self.seconds), max(self.others))

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
        """End the trainer's workers, if it has any."""
        if isinstance(self.trainer, Pipeline):
            bring_back(self.trainer, self.model)
            self.trainer.close()


def bring_back(pipeline: Pipeline, model: nn.Module) -> None:
    """Give a model the weights that have left it, where stages come and go: it is compared."""
    if pipeline.plan.spill is not None:
        model.load_state_dict(pipeline.state_dict(), assign=True)


def pipelined(workload: Workload, plan: Plan) -> Contestant:
    """A contestant that trains the workload as the plan spreads it, in threads."""
    model = workload.build_model()
    trainer = Pipeline(
        model, plan, loss=workload.loss, optimizer=workload.optimizer, transport="threads", seed=0
    )
    return Contestant("pipeline", model, trainer, plan.num_threads)


def on_one_device(workload: Workload, num_microbatches: int, num_threads: int) -> Contestant:
    """A contestant that trains the workload on one device, accumulating over microbatches."""
    model = workload.build_in_layers()
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
