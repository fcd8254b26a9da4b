"""A pipeline's memory of its training steps, for those who ask after them: timelines, peaks, norms,
and of what minibatches were made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.op import Activations
from penstock.core.timing.timeline import Timeline
from penstock.engine.model import tree
from penstock.engine.model.flops import count_flops, without_values
from penstock.engine.model.microbatches import join_slices, num_rows
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.engine.run.outcome import MinibatchOutcome, Peak, timeline
from penstock.engine.weights.store import HeldVersions


class Work(NamedTuple):
    """The work in a training step.

    Attributes:
        rows: of its inputs.
        tokens: numbers in the first of its inputs that holds whole numbers and has a second
            dimension, padding included; ``None`` if there is none.
        flops: floating-point operations of the model's forward and backward, as torch counts them,
            whatever the plan runs again; ``None`` if they cannot be counted on tensors without
            values.
    """

    rows: int
    tokens: int | None
    flops: int | None


class _MinibatchSize(NamedTuple):
    """Of a minibatch: its rows, its tokens, and the numbers in its first tensor."""

    rows: int
    tokens: int | None
    numbers: int


class WorkLog:
    """Remembers of what minibatches under way are made, until their results are there."""

    def __init__(self) -> None:
        self._under_way: dict[int, _MinibatchSize] = {}
        self._last: _MinibatchSize | None = None
        self._example: Any = None
        self._example_numbers = 0
        self._counted = False
        self._flops: int | None = None

    def begin(self, minibatch: Minibatch) -> None:
        """A minibatch is trained on from now on."""
        self._under_way[minibatch.step] = _size(minibatch)
        if not self._example_numbers:
            first = [without_values(part) for part in minibatch.inputs[: minibatch.num_slices]]
            (self._example,) = join_slices(first, minibatch.num_slices)
            self._example_numbers = tree.tensors(self._example)[0].numel()

    def noting(
        self, minibatches: Iterable[tuple[Minibatch, StreamPosition]]
    ) -> Iterator[tuple[Minibatch, StreamPosition]]:
        """The same minibatches, each of which is trained on as soon as it is taken."""
        for minibatch, position in minibatches:
            self.begin(minibatch)
            yield minibatch, position

    def end(self, step: int) -> None:
        """The results of the minibatch with this number are there."""
        self._last = self._under_way.pop(step, self._last)

    def last(self, modules: Callable[[], Sequence[nn.Module]]) -> Work:
        """Of what the last one was made. Operations are counted once, on one microbatch, and taken
        to grow with the numbers in its first tensor.

        Args:
            modules: gives the model's layers.

        Raises:
            InputError: there has been none.
        """
        if self._last is None:
            raise InputError("no step yet: train on a minibatch")
        if not self._counted:
            self._flops = count_flops(modules(), self._example)
            self._counted, self._example = True, None
        rows, tokens, numbers = self._last
        flops = self._flops and round(self._flops * numbers / self._example_numbers)
        return Work(rows, tokens, flops)


def _size(minibatch: Minibatch) -> _MinibatchSize:
    inputs = minibatch.inputs
    if minibatch.num_slices == 1 and {*map(type, inputs)} == {Tensor}:  # as nearly all are
        shapes = [part.shape for part in inputs]
        numbers = sum([shape.numel() for shape in shapes])
        tokens = numbers if _are_tokens(inputs[0]) else None
        return _MinibatchSize(sum([shape[0] for shape in shapes]), tokens, numbers)
    tensors = [tree.tensors(part) for part in minibatch.inputs]
    rows = sum(num_rows(part, "inputs") for part in minibatch.inputs[:: minibatch.num_slices])
    numbers = sum(own[0].numel() for own in tensors)
    own = enumerate(tensors[0])
    place = next((place for place, tensor in own if _are_tokens(tensor)), None)
    tokens = None if place is None else sum(part[place].numel() for part in tensors)
    return _MinibatchSize(rows, tokens, numbers)


def _are_tokens(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return whole and tensor.dim() > 1


_MOST_REMEMBERED = 256


class History:
    """The last training step and, for the timeline, those of its stream before it.

    Args:
        schedule: the name that timelines bear.
        activations: which ones backwards go through.

    Attributes:
        work: of what minibatches are made.
    """

    def __init__(self, schedule: str, activations: Activations = "own") -> None:
        self._schedule = schedule
        self._activations = activations
        self._last: MinibatchOutcome | None = None
        self._recent: deque[MinibatchOutcome] = deque(maxlen=_MOST_REMEMBERED)
        self._timeline: Timeline | None = None
        self.work = WorkLog()

    def add(self, outcome: MinibatchOutcome) -> None:
        """Remember a step."""
        self._last = outcome
        if outcome.begins:
            self._recent.clear()
        self._recent.append(outcome)
        self._timeline = None

    @property
    def timeline(self) -> Timeline:
        """Measured times since nothing was in flight; made when they are first asked for."""
        steps = [outcome.records for outcome in self._recent if outcome.records is not None]
        if not steps:
            raise InputError("no timeline yet: run a step (and leave record=True)")
        if self._timeline is None:
            self._timeline = timeline(steps, self._schedule, self._activations)
        return self._timeline

    @property
    def held_versions(self) -> tuple[HeldVersions, ...]:
        """The versions of its weights that every rank held."""
        if self._last is None or not self._last.held:
            raise InputError("no versions to tell of: run a plan that never flushes, and record it")
        return self._last.held

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last step; empty before the first."""
        return {} if self._last is None else dict(self._last.metrics)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The most that every rank held in the last step."""
        if self._last is None or not self._last.peaks:
            raise InputError("no peaks yet: give count_memory=True, and run a step")
        return self._last.peaks

    def activation_bytes(self, sizes: Sizes) -> tuple[float, ...]:
        """The most bytes of activations that every rank held: as counted, or else by the order of
        the ops in the timeline.

        Args:
            sizes: what a microbatch keeps at each stage.

        Raises:
            InputError: neither has been recorded yet.
        """
        if self._last is not None and self._last.peaks:
            return tuple(peak.activation_bytes for peak in self._last.peaks)
        return self.timeline.peak_bytes(sizes)

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, before clipping."""
        if self._last is None or self._last.norm is None:
            raise InputError("no norm yet: give clip_norm or a grad_scaler, and run a step")
        return self._last.norm
