"""All measurements of a model's layers, for one sample after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.engine.device.memory import gauge_of
from penstock.engine.model.spine import NamedLayer
from penstock.engine.stage.deferral import undeferred_parameters
from penstock.training.profiler.alone.chain import HandedOn, RunLayer, handed_on, runs_of
from penstock.training.profiler.alone.clock import clock_of
from penstock.training.profiler.alone.draws import watching_draws
from penstock.training.profiler.alone.flags import flags_of
from penstock.training.profiler.alone.footprint import Footprint, measure_footprints
from penstock.training.profiler.alone.rounds import (
    WARM_UP,
    LayerTimes,
    measure_overheads,
    measure_rounds,
    times_of,
)
from penstock.training.profiler.alone.sample import Sample
from penstock.training.profiler.alone.workspace import measure_workspaces

Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Measured(NamedTuple):
    """What was measured of one layer with one microbatch.

    Attributes:
        times: seconds of its passes.
        footprint: bytes that it keeps for its backward.
        handed_on: bytes that it gives to later layers.
        workspace: bytes that it needs only while it runs.
        flags: what is odd about that, in sentences.
        draws: whether it draws random numbers but by dropout of torch's.
    """

    times: LayerTimes
    footprint: Footprint
    handed_on: HandedOn
    workspace: int
    flags: tuple[str, ...]
    draws: bool


class Bench:
    """Measures a model's layers with any number of samples.

    Args:
        repeats: rounds that count, for each sample.
        num_samples: how many samples there will be, for ``progress``.
        progress: called after each round.

    Attributes:
        clock: the clock of the device.
        num_rounds: of the sample that had fewest; ``repeats`` unless something ended them.
        interrupted: whether somebody has ended them; no more should be measured then.
    """

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        device: torch.device,
        repeats: int,
        num_samples: int,
        progress: Progress | None,
    ) -> None:
        self.clock = clock_of(device)
        self._layers = layers
        self._gauge = gauge_of(device)
        self._repeats = self.num_rounds = repeats
        self.interrupted = False
        self._overheads = measure_overheads(self.clock, device)
        self._num_samples = num_samples
        self._num_measured = 0
        self._done = 0
        self._progress = progress
        modules = [module for layer in layers for module in layer.module.modules()]
        self._undeferred = undeferred_parameters(modules)
        self._trains = [
            any(parameter.requires_grad for parameter in layer.module.parameters())
            for layer in layers
        ]

    def measure(self, sample: Sample) -> list[Measured]:
        """Measure every layer with a sample."""
        runs = runs_of(self._layers, sample.loss, sample.targets)
        given: dict[int, HandedOn] = {}
        draws: dict[int, bool] = {}
        watched = [partial(self._watched, given, draws, sample, *pair) for pair in enumerate(runs)]
        modules = [layer.module for layer in self._layers]
        footprints = measure_footprints(modules, watched, sample.inputs)
        workspaces = [0] * len(runs)
        if self._gauge is not None:
            workspaces = measure_workspaces(runs, sample.inputs, self._gauge)
        rounds = measure_rounds(
            runs, sample.inputs, self.clock, self._repeats, self._undeferred, self._tell
        )
        self.num_rounds = min(self.num_rounds, rounds.num_rounds)
        self.interrupted = rounds.interrupted
        self._num_measured += 1
        if self._done < self._num_measured * self._rounds_of_sample:
            self._advance(self._num_measured * self._rounds_of_sample)
        times = times_of(rounds, self._overheads, self._trains, self.clock.tick_seconds)
        handed = [given[index] for index in range(len(runs))]
        flags = self._flags(times)
        drew = [draws[index] for index in range(len(runs))]
        columns = zip(times, footprints, handed, workspaces, flags, drew, strict=True)
        return [Measured(*row) for row in columns]

    def _watched(
        self,
        given: dict[int, HandedOn],
        draws: dict[int, bool],
        sample: Sample,
        index: int,
        run: RunLayer,
        value: Any,
    ) -> Any:
        with watching_draws(self._layers[index].module) as stream:
            output = run(value)
        draws[index] = stream.drew
        is_loss = sample.loss is not None and index == len(self._layers) - 1
        given[index] = handed_on(self._layers, index, output, is_loss)
        return output

    def _flags(self, times: Sequence[LayerTimes]) -> Iterable[tuple[str, ...]]:
        for own, trains in zip(times, self._trains, strict=True):
            yield tuple(flags_of(own, trains, self._overheads))

    @property
    def _rounds_of_sample(self) -> int:
        return WARM_UP + self._repeats

    def _tell(self) -> None:
        self._advance(self._done + 1)

    def _advance(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._rounds_of_sample * self._num_samples)
