"""A model's layers as functions that can be run one by one, with skips handed along, and timed
passes through them: whole, with a split backward, recomputing; and through all of them as one, for
comparison with pipelines that run in turns with the model."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError, ModelError
from penstock.base.units import count_of
from penstock.engine.model import tree
from penstock.engine.model.spine import NamedLayer, Skip, run_layer, spine_of
from penstock.engine.run.recipe import Loss
from penstock.engine.stage.deferral import Deferral
from penstock.engine.stage.microbatch_graph import MicrobatchGraph, cut, edges, scalar
from penstock.training.profiler.alone.conditions import (
    Clock,
    Sample,
    clock_of,
    device_of,
    undisturbed,
)

RunLayer = Callable[[Any], Any]
"""Takes what the layer before gave, and gives what this one gives."""


class Carried(NamedTuple):
    """A value that crosses a cut while skips are open: the layer's output, and the skips by key."""

    value: Any
    skips: dict[str, Skip]


def runs_of(layers: Sequence[NamedLayer], loss: Loss | None, targets: Any) -> list[RunLayer]:
    """The layers as functions that name themselves when they fail; the last goes on to the loss."""
    runs: list[RunLayer] = [partial(_run_named, layer, _run_of(layer)) for layer in layers]
    if loss is not None:
        runs[-1] = partial(_judged, runs[-1], loss, targets)
    return runs


class JudgedRun(NamedTuple):
    """The last layer, and the loss behind it.

    Attributes:
        last: the layer as a function.
        loss, targets: of one microbatch.
    """

    last: RunLayer
    loss: Loss
    targets: Any

    @classmethod
    def of(cls, layers: Sequence[NamedLayer], sample: Sample) -> JudgedRun | None:
        """That of a model, if the sample has a loss."""
        if sample.loss is None:
            return None
        return cls(
            partial(_run_named, layers[-1], _run_of(layers[-1])), sample.loss, sample.targets
        )


def _judged(last: RunLayer, loss: Loss, targets: Any, value: Any) -> Tensor:
    """The loss of what the last layer makes of a value.

    Raises:
        InputError: it raises, or is no number.
    """
    outputs = without_skips(last(value))
    try:
        judged = loss(outputs, targets)
    except Exception as error:
        raise InputError(
            f"the loss failed on outputs {tree.shapes(outputs)} and targets "
            f"{tree.shapes(targets)}: {type(error).__name__}: {error}; it is a function of "
            "(outputs, targets) of one microbatch"
        ) from error
    return scalar(judged, training=False)


def in_one(runs: Sequence[RunLayer]) -> RunLayer:
    """All layers as one function, without a cut between them."""

    def run_all(value: Any) -> Any:
        for run in runs:
            value = run(value)
        return value

    return run_all


class HandedOn(NamedTuple):
    """Bytes that a layer hands on.

    Attributes:
        output: to the next layer.
        skips: past the next layer, by the name of the layer that takes them.
    """

    output: int
    skips: dict[str, int]


def handed_on(layers: Sequence[NamedLayer], index: int, output: Any, is_loss: bool) -> HandedOn:
    """The bytes of a layer's result that it made itself; it may pass on those of others.

    Args:
        index: the layer's position among them.
        output: what the layer's function gave.
        is_loss: whether ``output`` is the loss that follows the last layer.
    """
    layer, value = layers[index], without_skips(output)
    if not is_loss and hasattr(layer.module, "readers") and index + 1 < len(layers):
        return _handed_on_by_captured(layer.module, index, layers[index + 1].name, value)
    takers = {key: other.name for other in layers for key in other.recalls}
    skips = output.skips if isinstance(output, Carried) else {}
    sizes: Counter[str] = Counter()
    for key in layer.stashes if skips else ():
        sizes[takers[key]] += num_bytes(skips[key].value)
    return HandedOn(num_bytes(value), dict(sizes))


def _handed_on_by_captured(module: Any, index: int, following: str, value: Any) -> HandedOn:
    """A captured layer passes on what others made; each value travels to its last reader."""
    leaves, _ = tree.flatten(value)
    # What the first one passes on is the model's own input.
    own = range(len(leaves)) if index == 0 else module.produces
    sizes: Counter[str] = Counter()
    for position in own:
        sizes[module.readers[position]] += num_bytes(leaves[position])
    return HandedOn(sizes.pop(following, 0), {name: size for name, size in sizes.items() if size})


def num_bytes(value: Any) -> int:
    """The bytes of all tensors in a value."""
    return sum(tensor.nbytes for tensor in tree.tensors(value))


def without_skips(value: Any) -> Any:
    return value.value if isinstance(value, Carried) else value


def _run_of(layer: NamedLayer) -> RunLayer:
    if layer.stashes or layer.recalls:
        return partial(_run_with_skips, layer)
    return partial(_run_beside_skips, layer.module)


def _run_beside_skips(module: nn.Module, value: Any) -> Any:
    if isinstance(value, Carried):
        return Carried(module(value.value), value.skips)
    return module(value)


def _run_with_skips(layer: NamedLayer, value: Any) -> Any:
    skips = dict(value.skips) if isinstance(value, Carried) else {}
    output = run_layer(layer, without_skips(value), skips)
    return Carried(output, skips) if skips else output


def _run_named(layer: NamedLayer, run: RunLayer, value: Any) -> Any:
    try:
        return run(value)
    except Exception as error:
        given, remedy = without_skips(value), ""
        words = f"an input of shape {tree.shapes(given)}"
        if isinstance(given, list):
            words = f"a list of {count_of(len(given), 'part')}"
            remedy = "; where these are rows, give one tensor of them, as torch.stack(list)"
        raise ModelError(
            f"layer {layer.name!r} ({type(layer.module).__name__}) failed on {words}: "
            f"{type(error).__name__}: {error}{remedy}"
        ) from error


LayerSeconds = list[float]
"""The seconds of every layer."""

_Lap = tuple[Any, Any]


class WholePass(NamedTuple):
    """Seconds of every layer in a forward and a full backward."""

    forward: LayerSeconds
    backward: LayerSeconds


class SplitPass(NamedTuple):
    """Seconds of every layer in a forward and the two halves of a backward."""

    forward: LayerSeconds
    backward_input: LayerSeconds
    backward_weight: LayerSeconds


class Passes:
    """Times passes of one microbatch through a model.

    Layers are timed where they stand in a training step. Between them the graph is cut, as between
    stages, so that the backward of each can be timed by itself.

    Args:
        inputs: the first layer's; they are not overwritten.
        undeferred: ids of the parameters whose gradients are never deferred.

    Attributes:
        num_leaves: for each layer, the tensors of its input of which it gives gradients; known
            after a pass.
    """

    def __init__(
        self, runs: Sequence[RunLayer], inputs: Any, clock: Clock, undeferred: frozenset[int]
    ) -> None:
        self._runs = runs
        self._inputs = inputs
        self._clock = clock
        self._undeferred = undeferred
        self.num_leaves: list[int] = []

    def whole(self) -> WholePass:
        """Time a forward and then a full backward."""
        forward, graphs, seeds = self._forward(lambda: None)
        backward = self._backward(graphs, seeds)
        return WholePass(self._seconds(forward), self._seconds(backward))

    def split(self) -> SplitPass:
        """Time a forward, then the input gradients of all layers, then the weight gradients of all:
        the order of a stage that holds them all."""
        deferrals: list[Deferral] = []

        def deferral() -> Deferral:
            deferrals.append(Deferral(self._undeferred))
            return deferrals[-1]

        forward, graphs, seeds = self._forward(deferral)
        inputs = self._backward(graphs, seeds)
        weights: list[_Lap | None] = []
        for deferral_of_layer in reversed(deferrals):
            start = self._clock.now()
            deferral_of_layer.run()
            weights.append((start, self._clock.now()))
        weights.reverse()
        return SplitPass(self._seconds(forward), self._seconds(inputs), self._seconds(weights))

    def again(self) -> LayerSeconds:
        """Time a forward as it is recomputed: after one that kept nothing.

        A backward follows, untimed: it leaves caches as every other kind of pass does.
        """
        value = self._own_inputs()
        for index, run in enumerate(self._runs):
            _, value = cut(value, index > 0)
            value = run(value)
        del value
        laps, graphs, seeds = self._forward(lambda: None)
        self._backward(graphs, seeds)
        return self._seconds(laps)

    def _own_inputs(self) -> Any:
        """A copy of the inputs: the first layer may overwrite them, and the caller needs them."""
        return tree.replace(Tensor, Tensor.clone, self._inputs)

    def _forward(
        self, deferral_of_layer: Callable[[], Deferral | None]
    ) -> tuple[list[_Lap | None], list[MicrobatchGraph], list[Tensor | None]]:
        laps: list[_Lap | None] = []
        graphs: list[MicrobatchGraph] = []
        now, value = self._clock.now, self._own_inputs()
        for index, run in enumerate(self._runs):
            leaves, value = cut(value, index > 0)
            deferral = deferral_of_layer()
            with deferral or nullcontext():
                start = now()
                value = run(value)
                stop = now()
            laps.append((start, stop))
            graphs.append(MicrobatchGraph(leaves, {}, edges(value), {}, False, deferral))
        self.num_leaves = [_num_gradients(graph.inputs) for graph in graphs]
        seeds = [
            torch.ones_like(leaf) if isinstance(leaf, Tensor) else None
            for leaf in tree.flatten(value)[0]
        ]
        return laps, graphs, seeds

    def _backward(
        self, graphs: list[MicrobatchGraph], gradients: Sequence[Tensor | None]
    ) -> list[_Lap | None]:
        laps: list[_Lap | None] = []
        now = self._clock.now
        while graphs:
            graph = graphs.pop()
            # Where there is nothing to do, finding that out is no cost of the layer.
            flows = any(
                edge is not None and gradient is not None
                for edge, gradient in zip(graph.outputs, gradients, strict=True)
            )
            start = now()
            gradients = graph.backward(gradients, {}).inputs
            laps.append((start, now()) if flows else None)
        return laps[::-1]

    def _seconds(self, laps: Sequence[_Lap | None]) -> LayerSeconds:
        self._clock.settle()
        return [0.0 if lap is None else self._clock.seconds(*lap) for lap in laps]


def _num_gradients(leaves: Sequence[Any]) -> int:
    return sum(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


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
