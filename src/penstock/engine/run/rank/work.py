"""A rank's work at hand: of a stream, what passes between stages and to other ranks; of a
minibatch, what steps take from it and leave behind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import InputError, StageError
from penstock.base.values import shown
from penstock.core.schedule import Op
from penstock.engine.device.crossing import copy_of
from penstock.engine.device.queue import DeviceQueue
from penstock.engine.model import tree
from penstock.engine.model.batches import IGNORED, REMEDY, all_ignored
from penstock.engine.run.minibatch import (
    FrameListener,
    Minibatch,
    StateMark,
    StepResult,
    StreamPosition,
)
from penstock.engine.run.rank.program import SkipChannel
from penstock.engine.run.recipe import Recipe
from penstock.engine.stage import microbatch_graph
from penstock.engine.stage.microbatch_graph import Gradients
from penstock.engine.stage.protocol import Criterion, LossOfTargets
from penstock.engine.transport import Edge, Transport
from penstock.engine.weights.store import WeightStore


class PendingGradient(NamedTuple):
    """Gradients that one rank has sent to another, which may still be on their way.

    Attributes:
        edge: the way that it went.
        unit: what it belongs to.
        value: the gradients of the leaves of one value, ``None`` where nothing flows back.
    """

    edge: Edge
    unit: int
    value: Gradients


class PendingValues:
    """Values and gradients that one op has made, until the op that needs them comes, here or on
    another rank.

    Units count from the beginning of the stream, so that segments take up each other's messages.

    Args:
        transport: to the other ranks.
        number: tells the messages of this attempt at a stream from all others.
        remembers: whether gradients are remembered while they are on their way, so that a stream
            can be saved with them: a stage takes them two frames later for each stage between.

    Attributes:
        number: as given.
        values: the inputs of forwards, by stage and unit.
        gradients: those of stages' outputs, by stage and unit.
    """

    def __init__(self, transport: Transport, number: int, *, remembers: bool = False) -> None:
        self.number = number
        self.values: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Gradients] = {}
        self._transport = transport
        self._skips: dict[tuple[int, int, bool], Any] = {}
        self._remembers = remembers
        self._on_their_way: dict[Edge, deque[PendingGradient]] = {}

    def send(self, edge: Edge, unit: int, value: Any) -> None:
        """Hand something to another rank."""
        self._transport.send(edge, self.number + unit, value)
        if self._remembers and edge.source > edge.target:
            under_way = self._on_their_way.get(edge)
            if under_way is None:
                under_way = deque(maxlen=2 * (edge.source - edge.target))
                self._on_their_way[edge] = under_way
            under_way.append(PendingGradient(edge, unit, value))

    @property
    def pending_gradients(self) -> list[PendingGradient]:
        """Those on their way back to other ranks, where that is remembered."""
        return [sent for under_way in self._on_their_way.values() for sent in under_way]

    def receive(self, edge: Edge, unit: int, waiting: str) -> Any:
        """Wait for something from another rank; ``waiting`` says for what, in errors."""
        return self._transport.recv(edge, self.number + unit, waiting)

    def skips(self, channels: Iterable[SkipChannel], unit: int) -> dict[str, Any]:
        """Values that come over some channels, by the keys of the skips."""
        return {channel.route.key: self._take(channel, unit) for channel in channels}

    def hand_skips(
        self, channels: Iterable[SkipChannel], unit: int, skips: Mapping[str, Any]
    ) -> None:
        """Let skips, or their gradients, go where their channels lead."""
        for channel in channels:
            value = skips[channel.route.key]
            if channel.edge is None:
                self._skips[channel.route.number, unit, channel.backward] = value
            else:
                # The chain carries the same microbatch there later, so nobody waits for it.
                self.send(channel.edge, unit, value)

    def _take(self, channel: SkipChannel, unit: int) -> Any:
        if channel.edge is None:
            return self._skips.pop((channel.route.number, unit, channel.backward))
        return self.receive(channel.edge, unit, channel.waiting)


_THE_LOSS_IS = "the loss is "
_MOST_SEEDS = 64
_MOST_FRAMES = 1 << 12
"""How many microbatches back errors name frames: more than are ever under way."""


class AwaitedMark(NamedTuple):
    """A mark, and by stage how many updates of the stream are the last of its minibatch."""

    mark: StateMark
    num_updates: Mapping[int, int]


class StreamState:
    """The state of one stream of minibatches between them; dropped when it ends.

    The worker begins one with each synchronous minibatch, or with the first of several that
    overlap.

    Args:
        pending: what passes between stages.

    Attributes:
        pending: as given.
        marks: of minibatches up to the one at hand, behind whose last update the state is wanted.
        frames: of a live stream, the number that the caller knows each of the last microbatches by.
    """

    def __init__(self, pending: PendingValues) -> None:
        self.pending = pending
        self.marks: list[AwaitedMark] = []
        self.frames: dict[int, int] = {}

    def take_in(
        self, minibatch: Minibatch, position: StreamPosition, stores: Mapping[int, WeightStore]
    ) -> None:
        """Note what a minibatch is known by, and what is wanted behind it.

        Args:
            stores: of stages whose weights have versions.
        """
        if minibatch.frame is not None:
            self.frames[position.first] = minibatch.frame
            self.frames.pop(position.first - _MOST_FRAMES, None)
        if minibatch.mark is not None:
            end = position.first + minibatch.num_microbatches
            counts = {
                stage: 1 if position.synchronous else store.updates_until(position.index, end)
                for stage, store in stores.items()
            }
            self.marks.append(AwaitedMark(minibatch.mark, counts))
            for stage, count in counts.items():
                if stores[stage].num_updates == count:  # nothing of it is under way
                    minibatch.mark.updated(stage)


class LossGradients:
    """The gradients with which backwards begin, made once for each weight, scale, dtype and
    device; a rank keeps them from minibatch to minibatch."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def of(self, loss: Tensor, weight: float, scale: float | None) -> Tensor:
        """That of a loss which counts with a weight, and is multiplied by a scale."""
        kind = weight, scale, loss.dtype, loss.device
        made = self._made.get(kind)
        if made is None or made._version:  # a backward of the user's may have overwritten it
            if len(self._made) >= _MOST_SEEDS:  # minibatches of many sizes weigh differently
                self._made.clear()
            made = torch.full_like(loss, weight)
            self._made[kind] = made = made if scale is None else made * scale
        return made


def _nobody() -> None:
    """Asks when ops begin."""


class RankWork:
    """One minibatch at work on one rank; its units are numbered from the beginning of the stream.

    Args:
        position: where it stands in its stream.
        stream: what minibatches before it have left.
        seeds: gradients of losses.
        queue: the rank's work on its device; ``None`` where all is done in main memory.
        waited: to be told when what an op has waited for is there.

    Attributes:
        minibatch, position, waited: as given.
        pending: the stream's.
        base_unit: the number in the stream of the first unit of the window.
        result: what comes out of it.
        versions: which version of the weights each op read, where there are several.
        failed_on_trust: the first error that was computed with weights on trust; it counts only if
            the verdict lets these stand.
    """

    def __init__(
        self,
        minibatch: Minibatch,
        position: StreamPosition,
        recipe: Recipe,
        stream: StreamState,
        seeds: LossGradients,
        queue: DeviceQueue | None = None,
        waited: Callable[[], None] = _nobody,
    ) -> None:
        self.minibatch = minibatch
        self.waited = waited
        self.position = position
        self.pending = stream.pending
        self.result = StepResult(number=stream.pending.number + position.index)
        self.versions: dict[Op, int] = {}
        self.failed_on_trust: StageError | None = None
        self._recipe = recipe
        self._queue = queue
        self._marks = stream.marks
        self._seeds = seeds
        self._first_unit = position.first * minibatch.num_slices
        self.base_unit = position.base * minibatch.num_slices

    def unit(self, unit: int) -> int:
        """The number in the stream of a unit that is numbered from the beginning of its window."""
        return self.base_unit + unit

    def numbered(self, op: Op) -> Op:
        """An op with the number of its microbatch in the stream."""
        return Op(op.stage, op.kind, op.microbatch + self.position.base, op.slice)

    def updated(self, stage: int, num_updates: int) -> None:
        """A stage has made so many updates since its stream began."""
        for mark, counts in self._marks:
            if counts[stage] == num_updates:
                mark.updated(stage)

    def input(self, unit: int, *, copied: bool) -> Any:
        """The first stage's input; a copy if the minibatch may have to begin anew or is the
        caller's, since the first layer may overwrite it."""
        number = unit - self._first_unit
        value = self._here(self.minibatch.inputs, self.minibatch.inputs_moments, number)
        return tree.replace(Tensor, copy_of, value) if copied or self.minibatch.lent else value

    def _here(self, values: Sequence[Any], moments: Sequence[torch.Event], number: int) -> Any:
        """A value that the caller has given, on the rank's device."""
        if self._queue is None:
            return values[number]
        here = self._queue.given
        if moments:
            here = partial(self._queue.fetched, moment=moments[number])
        return tree.replace(Tensor, here, values[number])

    def criterion(self, unit: int) -> Criterion | None:
        """From the output of the last stage to the loss; ``None`` where outputs are wanted."""
        loss, metrics = self._recipe.loss, self._recipe.metrics
        if not self._wants_losses or loss is None:
            return None
        number = unit - self._first_unit
        targets = self._here(self.minibatch.targets, self.minibatch.targets_moments, number)
        if self.minibatch.listener is not None and targets is None:
            return None  # nobody has said what this frame should give

        look = None
        if metrics or self.minibatch.listener is not None:
            look = partial(self._look, number, targets)
        return LossOfTargets(loss, targets, look)

    def _look(self, number: int, targets: Any, outputs: Any) -> None:
        """Take from an output what is wanted beside its loss."""
        if self.minibatch.listener is not None:
            self.result.outputs[number] = _own(outputs)
        if not self._recipe.metrics:
            return
        with torch.no_grad():
            for name, metric in self._recipe.metrics.items():
                measured = _number(name, metric(outputs, targets))
                self.result.metrics.setdefault(name, {})[number] = measured

    def keep(self, unit: int, produced: Any) -> None:
        """The loss of the last stage, or its output.

        Raises:
            ArithmeticError: the loss is not finite, and is to stop the run.
        """
        number = unit - self._first_unit
        if self.minibatch.listener is not None:
            self._keep_frame(number, produced, self.minibatch.listener)
        elif not self._wants_losses:
            self.result.outputs[number] = produced
        else:
            self._keep_loss(number, produced)

    @property
    def _wants_losses(self) -> bool:
        return self.minibatch.trains or bool(self.minibatch.targets)

    def _keep_frame(self, number: int, produced: Any, listener: FrameListener) -> None:
        has_loss = number in self.result.outputs  # the criterion has put it there
        if has_loss:
            self._keep_loss(number, produced)
        else:
            self.result.outputs[number] = _own(produced)
        moment = None if self._queue is None else self._queue.moment()
        listener(self.result.outputs[number], produced if has_loss else None, moment)

    def _keep_loss(self, number: int, produced: Tensor) -> None:
        # The mean of no terms is NaN, and counts for nothing.
        minibatch = self.minibatch
        looks = self._recipe.stop_at_nan and minibatch.trains and minibatch.learns
        # On an accelerator the host would have to wait for it.
        if looks and minibatch.weights[number] and (produced.is_cpu or produced.is_meta):
            value = produced.item()
            if not math.isfinite(value):
                remedy = microbatch_graph.NOT_FINITE_REMEDY
                if all_ignored(minibatch.targets[number]):
                    remedy = (
                        f"All labels of this microbatch are {IGNORED}: give Pipeline(…, {REMEDY})"
                    )
                raise ArithmeticError(
                    f"{_THE_LOSS_IS}{value}; no weight has been updated with it. {remedy}"
                )
        self.result.losses[number] = produced

    def seed(self, unit: int, scale: float | None) -> Tensor | None:
        """The gradient of the minibatch's loss with respect to that of a unit, or ``None`` if it
        counts for nothing.

        Args:
            unit: a microbatch or a slice.
            scale: what small gradients are multiplied by so that they survive.
        """
        number = unit - self._first_unit
        weight = self.minibatch.weights[number]
        if weight and not self.position.synchronous and self._recipe.updates == "microbatch":
            weight = 1.0  # it is a minibatch of its own
        weight *= self.minibatch.share
        if not weight or number not in self.result.losses or not self.minibatch.learns:
            return None
        return self._seeds.of(self.result.losses[number], weight, scale)


def is_not_finite(error: BaseException) -> bool:
    """Whether a step failed because a loss is infinite or not a number, and not because a layer
    says so."""
    cause = error.__cause__
    return isinstance(cause, ArithmeticError) and str(cause).startswith(_THE_LOSS_IS)


def _own(outputs: Any) -> Any:
    """Outputs for the caller before the backward: a copy, since the graph needs the values as they
    are, and nothing would notice if they were drawn over through numpy."""
    return tree.replace(Tensor, lambda tensor: copy_of(tensor.detach()), outputs)


def _number(name: str, measured: Any) -> Tensor:
    """The number that a metric gave, as a tensor of its own."""
    remedy = "it must return one number, as a float or a tensor with one element"
    try:
        number = torch.as_tensor(measured).detach()
    except Exception as error:  # there are many things that are no number
        raise InputError(f"the metric {name!r} gave {shown(measured)}; {remedy}") from error
    if number.numel() != 1:
        raise InputError(
            f"the metric {name!r} gave a tensor of shape {tuple(number.shape)}; {remedy}"
        )
    return number.clone()
