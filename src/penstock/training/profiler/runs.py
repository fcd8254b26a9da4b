"""Runs a copy of a model for a few steps, alone and as a pipeline in every mode, and says by which
factor the pipeline's ranks are slower than their layers alone.

The planner's own ``Candidate`` says how long a step takes if passes take so many times longer, and
the factor with which it says what was measured is the answer.
"""

from __future__ import annotations

import copy
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.units import format_bytes
from penstock.core.cluster import Cluster
from penstock.core.cluster.local import host_memory_bytes
from penstock.core.graph import Contention, LayerGraph, Mode
from penstock.core.schedule import Kind
from penstock.core.timing.timeline import Timeline
from penstock.engine.model import tree
from penstock.engine.model.microbatches import Microbatches
from penstock.engine.model.optimizer_factory import OptimizerFactory
from penstock.planning.planner import plan
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.task import Task
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from penstock.training.profiler.alone import Alone, Sample, measure_uncut

FAMILIES: dict[Mode, str] = {"whole": "1f1b", "split": "zb-h1", "stream": "pipedream"}
"""The schedule that stands for each mode."""

_WARM_UP = 1  # it makes the optimizer's state
# Weights, gradients and optimizer state, of which a stream keeps several versions.
_COPIES = 8
_MOST_STEPS = 40
_ENOUGH_SECONDS = 0.1


class Effort(NamedTuple):
    """How much is run in one turn, however long it takes.

    Attributes:
        microbatches_per_rank: of a minibatch.
        warm_up_microbatches: of the first one, which does not count; 0 for as many as the others.
        steps: minibatches with a flush, that one included.
        streamed: minibatches of a stream; the first, and those in which it fills and drains, do not
            count.
        warm_up_passes: through the layers alone, which do not count.
        passes: through the layers alone, which do.
        stays: whether a pipeline stays open for the next turn, if that is by the same plan; then it
            is warm.
    """

    microbatches_per_rank: int
    warm_up_microbatches: int
    steps: int
    streamed: int
    warm_up_passes: int
    passes: int
    stays: bool


USUAL = Effort(4, 0, steps=3, streamed=5, warm_up_passes=1, passes=2, stays=False)

SHORT = Effort(2, 1, steps=2, streamed=4, warm_up_passes=0, passes=1, stays=True)
"""Where a microbatch takes so long that what a turn has to warm up is little beside it."""


class Ran(NamedTuple):
    """The seconds of training by a plan; medians over some minibatches.

    Attributes:
        step_seconds: one minibatch.
        update_seconds: one update of each stage, summed over stages.
        cpu_seconds: processor time of a minibatch, of all threads of this process.
    """

    step_seconds: float
    update_seconds: float
    cpu_seconds: float


class Runner:
    """Trains a copy of a model on one microbatch, again and again.

    Args:
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
        self._open = ExitStack()
        self._pipeline: Pipeline | None = None

    @property
    def updates(self) -> bool:
        """Whether weights are updated."""
        return self._optimizer is not None

    def alone(self, num_threads: int, effort: Effort) -> Alone:
        """Time the same microbatch through all layers in this thread, while no rank works."""
        return measure_uncut(
            self._model,
            self._sample,
            num_threads,
            warm_up=effort.warm_up_passes,
            at_least=effort.passes,
        )

    def run(self, plan: Plan, effort: Effort) -> Ran:
        """Time a few minibatches of training by a plan.

        Raises:
            PenstockError: the plan cannot be run.
        """
        sample = self._sample
        inputs = Microbatches([sample.inputs] * plan.num_microbatches)
        # Without a loss anything with rows will do.
        target = sample.inputs if sample.loss is None else sample.targets
        targets = Microbatches([target] * plan.num_microbatches)
        pipeline, self._pipeline = self._pipeline, None
        is_warm = pipeline is not None and pipeline.plan.schedule == plan.schedule
        if pipeline is None or not is_warm:
            self.close()
            pipeline = self._open.enter_context(self._opened(plan))
        with self._open.pop_all() as opened:
            if plan.versions.asynchronous:
                ran = _stream(pipeline, inputs, targets, effort)
            else:
                ran = _steps(pipeline, inputs, targets, effort, is_warm=is_warm)
            if effort.stays:
                self._open, self._pipeline = opened.pop_all(), pipeline
        return ran

    def close(self) -> None:
        """End the pipeline that is open, if one is."""
        self._pipeline = None
        self._open.close()

    def _opened(self, plan: Plan) -> Pipeline:
        return Pipeline(
            self._model,
            plan,
            loss=self._sample.loss or _size_of,
            optimizer=self._optimizer,
            # What a copy learns from one microbatch is nobody's concern.
            stop_at_nan=False,
        )


def _check_memory(model: nn.Module) -> None:
    needed = _COPIES * sum(parameter.nbytes for parameter in model.parameters())
    memory = host_memory_bytes()
    if memory and needed > memory:
        raise MemoryError(
            f"a copy of the model with its versions may need {format_bytes(needed)}, and the "
            f"machine has {format_bytes(memory)}"
        )


def _size_of(output: Any, _: Any) -> Tensor:
    """Stands in for a loss."""
    sizes = [leaf.float().mean() for leaf in tree.tensors(output) if leaf.requires_grad]
    if not sizes:
        raise InputError("the output needs no gradient; give loss and targets")
    return sum(sizes[1:], start=sizes[0])


def _steps(
    pipeline: Pipeline,
    inputs: Microbatches,
    targets: Microbatches,
    effort: Effort,
    *,
    is_warm: bool,
) -> Ran:
    steps, cpus, updates = [], [], UpdateTimes()
    few = effort.warm_up_microbatches or len(inputs)
    warm_up = 0 if is_warm else _WARM_UP
    for counts in _laps(effort.steps - _WARM_UP + warm_up, warm_up):
        count = len(inputs) if counts else few
        start, cpu = time.perf_counter(), time.process_time()
        pipeline.step(Microbatches(inputs[:count]), Microbatches(targets[:count]))
        if counts:
            steps.append(time.perf_counter() - start)
            cpus.append(time.process_time() - cpu)
            updates.note(pipeline.timeline)
        if not pipeline.trains:  # as an optimizer would leave them
            _clear_gradients(pipeline)
    return Ran(statistics.median(steps), updates.seconds, statistics.median(cpus))


def _clear_gradients(pipeline: Pipeline) -> None:
    for stage in pipeline.stages.values():
        for parameter in stage.parameters():
            parameter.grad = None


def _stream(pipeline: Pipeline, inputs: Microbatches, targets: Microbatches, effort: Effort) -> Ran:
    ends, cpus, updates = list[float](), list[float](), UpdateTimes()
    for _ in pipeline.steps((inputs, targets) for _ in _laps(effort.streamed)):
        ends.append(time.perf_counter())
        cpus.append(time.process_time())
    # Without those in which the pipeline fills and drains.
    gaps, cpu_gaps = (
        [stop - start for start, stop in pairwise(stamps)][_WARM_UP:-1] for stamps in (ends, cpus)
    )
    updates.note(pipeline.timeline)
    return Ran(statistics.median(gaps), updates.seconds, statistics.median(cpu_gaps))


class UpdateTimes:
    """Collects the seconds of optimizer steps from timelines."""

    def __init__(self) -> None:
        self._of_stage: dict[int, list[float]] = {}

    def note(self, timeline: Timeline) -> None:
        """Remember the updates of a timeline."""
        for span in timeline.spans:
            if span.op.kind is Kind.UPDATE:
                self._of_stage.setdefault(span.op.stage, []).append(span.end - span.start)

    @property
    def seconds(self) -> float:
        """The median update of each stage, summed over stages."""
        return sum(map(statistics.median, self._of_stage.values()))


def _laps(at_least: int, warm_up: int = _WARM_UP) -> Iterator[bool]:
    """Yield whether the warm-up is over, until enough has been measured.

    Args:
        at_least: how many laps there are however long they take, the warm-up included.
    """
    start = time.perf_counter()
    for number in range(warm_up + _MOST_STEPS):
        if number == warm_up:
            start = time.perf_counter()
        if number >= at_least and time.perf_counter() - start > _ENOUGH_SECONDS:
            return
        yield number >= warm_up


_FACTORS = [0.1 * 1.002**power for power in range(3500)]  # up to about 100
# Where a host does not tell its memory, its devices would not count as sharing it.
_PLENTY_BYTES = 1 << 62


class Factors(NamedTuple):
    """How many times longer passes and updates took in a pipeline than alone.

    Attributes:
        passes: forwards and backwards.
        updates: optimizer steps.
        by_cpu: forwards and backwards, by processor time. That leaves out that ranks wait for each
            other, for the interpreter and for other programs.
    """

    passes: float
    updates: float
    by_cpu: float


class Lap(NamedTuple):
    """The seconds of a pipeline, and of the layers alone right before and after it."""

    alone: Alone
    ran: Ran


def crowd(num_ranks: int) -> Cluster:
    """A cluster of so many ranks of this machine."""
    return replace(Cluster.local(num_ranks, kind="cpu"), memory_bytes=_PLENTY_BYTES)


def plan_of(graph: LayerGraph, mode: Mode, num_ranks: int, microbatches_per_rank: int = 4) -> Plan:
    """The plan whose pipeline is measured for a mode."""
    return plan(
        graph,
        crowd(num_ranks),
        microbatches=microbatches_per_rank * num_ranks,
        schedule=FAMILIES[mode],
        stages=num_ranks,
        recompute="never",
    )


def factors_of(graph: LayerGraph, made: Plan, lap: Lap) -> Factors:
    """The factors with which the planner predicts what was measured.

    Args:
        made: what was run, by ``plan_of``.
    """
    planned = sum(layer.update_seconds for layer in graph.layers)
    updates = lap.ran.update_seconds / planned if planned and lap.ran.update_seconds else 1.0
    graph = paced(graph, lap.alone)

    def predicted_seconds(passes: float) -> float:
        return _candidate(graph, made, passes, updates).seconds

    place = bisect_left(_FACTORS[:-1], lap.ran.step_seconds, key=predicted_seconds)
    alone = made.num_microbatches * lap.alone.cpu_seconds
    by_cpu = (lap.ran.cpu_seconds - planned) / alone if alone else 1.0
    return Factors(_FACTORS[place], updates, max(by_cpu, _FACTORS[0]))


def _candidate(graph: LayerGraph, made: Plan, passes: float, updates: float) -> Candidate:
    contention = Contention(
        whole=passes, split=passes, stream=passes, update=updates, stream_update=updates
    )
    task = Task(replace(graph, contention=contention), crowd(made.num_ranks), made.num_microbatches)
    ranks = tuple(range(made.num_ranks))
    setting = Offer(made.schedule, ranks, made.versions, recompute="never").setting(task)
    cuts = accumulate((len(stage.layers) for stage in made.stages), initial=0)
    return with_cuts(task, setting, tuple(cuts))


def paced(graph: LayerGraph, alone: Alone) -> LayerGraph:
    """The profile with its passes scaled to what a pass through all layers took now.

    Args:
        graph: says how the time divides among layers.
        alone: says how much it is in all.
    """
    forward = sum(layer.forward_seconds for layer in graph.layers)
    backward = sum(layer.backward_seconds for layer in graph.layers)
    ahead = alone.forward_seconds / forward if forward and alone.forward_seconds else 1.0
    back = alone.backward_seconds / backward if backward and alone.backward_seconds else 1.0
    return replace(
        graph,
        layers=tuple(layer.paced(ahead, back) for layer in graph.layers),
        other_sizes=tuple(
            replace(other, layers=tuple(layer.paced(ahead, back) for layer in other.layers))
            for other in graph.other_sizes
        ),
    )
