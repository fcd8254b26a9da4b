"""Short real runs of a model's copy, in every mode in which ranks work."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from penstock import tree
from penstock.graph import Mode
from penstock.microbatches import Microbatches
from penstock.pipeline import Pipeline
from penstock.planner import Plan
from penstock.profiler import OptimizerFactory, Sample
from penstock.schedule import Kind
from penstock.timeline import Timeline

FAMILIES: dict[Mode, str] = {"whole": "1f1b", "split": "zb-h1", "stream": "pipedream"}
"""The schedule that stands for each mode."""

NUM_ROUNDS = 2
NUM_RUNS = len(FAMILIES) * NUM_ROUNDS

_WARM_UP = 1  # it makes the optimizer's state
_LEAST_STEPS, _MOST_STEPS = 3, 40
_ENOUGH_SECONDS = 0.2


@dataclass
class Run:
    """What a plan took.

    Attributes:
        plan: that was run.
        steps: seconds of its minibatches.
        updates: of its stages.
    """

    plan: Plan
    steps: list[float] = field(default_factory=list)
    updates: dict[int, list[float]] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Of a minibatch."""
        return statistics.median(self.steps)

    @property
    def update_seconds(self) -> float:
        """Of an update of every stage, one after another."""
        return sum(map(statistics.median, self.updates.values()))

    def note(self, timeline: Timeline) -> None:
        """Gather updates."""
        for span in timeline.spans:
            if span.op.kind is Kind.UPDATE:
                self.updates.setdefault(span.op.stage, []).append(span.end - span.start)


class Runner:
    """Trains a copy of a model on one microbatch, again and again.

    Args:
        model: with a spine.
        sample: one microbatch.
        optimizer: as for ``Pipeline``.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, optimizer: OptimizerFactory | None
    ) -> None:
        self._model = copy.deepcopy(model)
        self._sample = sample
        self._optimizer = optimizer

    def run(self, run: Run) -> None:
        """Some steps more of a plan.

        Raises:
            PenstockError: it cannot be run.
        """
        plan, sample = run.plan, self._sample
        inputs = Microbatches([sample.inputs] * plan.num_microbatches)
        # Without a loss anything with rows will do.
        target = sample.inputs if sample.loss is None else sample.targets
        targets = Microbatches([target] * plan.num_microbatches)
        with Pipeline(
            self._model,
            plan,
            loss=sample.loss or _size_of,
            optimizer=self._optimizer,
            # What a copy learns from one microbatch is nobody's concern.
            stop_at_nan=False,
        ) as pipeline:
            if plan.versions.asynchronous:
                _stream(pipeline, run, inputs, targets)
            else:
                _steps(pipeline, run, inputs, targets)


def _size_of(output: Any, _: Any) -> Tensor:
    """A loss where there is none."""
    sizes = [one.float().mean() for one in tree.tensors(output) if one.requires_grad]
    return sum(sizes[1:], start=sizes[0])


def _steps(pipeline: Pipeline, run: Run, inputs: Microbatches, targets: Microbatches) -> None:
    for is_warm in _laps():
        start = time.perf_counter()
        pipeline.step(inputs, targets)
        if is_warm:
            run.steps.append(time.perf_counter() - start)
            run.note(pipeline.timeline)


def _stream(pipeline: Pipeline, run: Run, inputs: Microbatches, targets: Microbatches) -> None:
    ends = []
    for _ in pipeline.steps((inputs, targets) for _ in _laps()):
        ends.append(time.perf_counter())
    # Without those in which the pipeline fills and drains.
    run.steps += [stop - start for start, stop in pairwise(ends)][_WARM_UP:-1]
    run.note(pipeline.timeline)


def _laps() -> Iterator[bool]:
    """Until it has been enough: whether the warm-up is over."""
    start = time.perf_counter()
    for number in range(_WARM_UP + _MOST_STEPS):
        is_warm = number >= _WARM_UP
        if number == _WARM_UP:
            start = time.perf_counter()
        enough = number >= _WARM_UP + _LEAST_STEPS
        if enough and time.perf_counter() - start > _ENOUGH_SECONDS:
            return
        yield is_warm
