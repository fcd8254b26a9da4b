"""Times the whole model without cuts, for comparison with pipelines that run in turns with it."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from torch import nn

from penstock.engine.model.spine import spine_of
from penstock.training.profiler.alone.chain import in_one, runs_of
from penstock.training.profiler.alone.clock import clock_of
from penstock.training.profiler.alone.conditions import device_of, undisturbed
from penstock.training.profiler.alone.passes import Passes, WholePass
from penstock.training.profiler.alone.sample import Sample

_MOST_PASSES = 20
_ENOUGH_SECONDS = 0.1


class Alone(NamedTuple):
    """How long one microbatch takes through all layers.

    Attributes:
        forward_seconds: a forward.
        backward_seconds: a full backward.
        cpu_seconds: processor time of both, of all threads of this process.
    """

    forward_seconds: float
    backward_seconds: float
    cpu_seconds: float


def measure_uncut(
    model: nn.Module, sample: Sample, num_threads: int, *, warm_up: int = 1, at_least: int = 2
) -> Alone:
    """Time some passes through the whole model after a warm-up, and take medians.

    Nothing is left on the model.

    Args:
        warm_up: passes that do not count: something else has had the caches.
        at_least: how many do, however long they take.

    Raises:
        ModelError: a layer fails on its input.
    """
    layers, device = spine_of(model), device_of(model, sample.inputs)
    with undisturbed(model, num_threads, device):
        run = in_one(runs_of(layers, sample.loss, sample.targets))
        passes = Passes([run], sample.inputs, clock_of(device), frozenset())
        measured: list[tuple[WholePass, float]] = []
        start = time.perf_counter()
        for number in range(warm_up + _MOST_PASSES):
            cpu = time.process_time()
            whole = passes.whole()
            if number >= warm_up:
                measured.append((whole, time.process_time() - cpu))
            enough = time.perf_counter() - start > _ENOUGH_SECONDS
            if len(measured) >= at_least and enough:
                break
    return Alone(
        statistics.median(sum(whole.forward) for whole, _ in measured),
        statistics.median(sum(whole.backward) for whole, _ in measured),
        statistics.median(cpu for _, cpu in measured),
    )
