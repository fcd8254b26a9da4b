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
from penstock.cluster.local import host_memory_bytes
from penstock.errors import InputError
from penstock.graph import Mode
from penstock.microbatches import Microbatches
from penstock.optimizer_factory import OptimizerFactory
from penstock.pipeline import Pipeline
from penstock.planner import Plan
from penstock.planner.table import format_bytes
from penstock.profiler import Sample
from penstock.schedule import Kind
from penstock.timeline import Timeline

FAMILIES: dict[Mode, str] = {"whole": "1f1b", "split": "zb-h1", "stream": "pipedream"}
"""The schedule that stands for each mode."""

NUM_ROUNDS = 2
NUM_RUNS = len(FAMILIES) * NUM_ROUNDS

_WARM_UP = 1  # it makes the optimizer's state
# Weights, gradients and optimizer state, of which a stream keeps several versions.
_COPIES = 8
_LEAST_STEPS, _MOST_STEPS = 3, 40
_ENOUGH_SECONDS, _TOO_MANY_SECONDS = 0.2, 3.0


@dataclass
class Run:
    """What a plan took.

    Attributes:
        plan: that was run.
        rounds: seconds of its minibatches, round by round.
        updates: of its stages.
    """

    plan: Plan
    rounds: list[list[float]] = field(default_factory=list)
    updates: dict[int, list[float]] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Of a minibatch."""
        return statistics.median(seconds for steps in self.rounds for seconds in steps)

    @property
    def disagreement(self) -> float:
        """By what share of the fastest round's usual step the slowest round's is slower."""
        usual = [statistics.median(steps) for steps in self.rounds]
        return max(usual) / min(usual) - 1

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

    Raises:
        MemoryError: there may be none for a copy.
    """

    def __init__(
        self, model: nn.Module, sample: Sample, optimizer: OptimizerFactory | None
    ) -> None:
        _check_memory(model)
        self._model = copy.deepcopy(model)
        self._sample = sample
        self._optimizer = optimizer

    @property
    def updates(self) -> bool:
        """Whether weights are updated."""
        return self._optimizer is not None

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


def _check_memory(model: nn.Module) -> None:
    needed = _COPIES * sum(parameter.nbytes for parameter in model.parameters())
    memory = host_memory_bytes()
    if memory and needed > memory:
        raise MemoryError(
            f"a copy of the model with its versions may need {format_bytes(needed)}, and the "
            f"machine has {format_bytes(memory)}"
        )


def _size_of(output: Any, _: Any) -> Tensor:
    """A loss where there is none."""
    sizes = [one.float().mean() for one in tree.tensors(output) if one.requires_grad]
    if not sizes:
        raise InputError("the output needs no gradient; give loss and targets")
    return sum(sizes[1:], start=sizes[0])


def _steps(pipeline: Pipeline, run: Run, inputs: Microbatches, targets: Microbatches) -> None:
    steps: list[float] = []
    for is_warm in _laps(at_least=2):
        start = time.perf_counter()
        pipeline.step(inputs, targets)
        if is_warm:
            steps.append(time.perf_counter() - start)
            run.note(pipeline.timeline)
    run.rounds.append(steps)


def _stream(pipeline: Pipeline, run: Run, inputs: Microbatches, targets: Microbatches) -> None:
    ends = []
    for _ in pipeline.steps((inputs, targets) for _ in _laps(at_least=4)):
        ends.append(time.perf_counter())
    # Without those in which the pipeline fills and drains.
    run.rounds.append([stop - start for start, stop in pairwise(ends)][_WARM_UP:-1])
    run.note(pipeline.timeline)


def _laps(at_least: int) -> Iterator[bool]:
    """Until it has been enough: whether the warm-up is over.

    Args:
        at_least: so many, however long they take.
    """
    start = time.perf_counter()
    for number in range(_WARM_UP + _MOST_STEPS):
        is_warm = number >= _WARM_UP
        if number == _WARM_UP:
            start = time.perf_counter()
        taken = time.perf_counter() - start
        enough = number >= _WARM_UP + _LEAST_STEPS and taken > _ENOUGH_SECONDS
        if enough or (number >= at_least and taken > _TOO_MANY_SECONDS):
            return
        yield is_warm
