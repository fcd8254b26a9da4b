"""Timed passes through a model, layer by layer: whole, with a split backward, and recomputing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.model import tree
from penstock.engine.stage.deferral import Deferral
from penstock.engine.stage.microbatch_graph import MicrobatchGraph, cut, edges
from penstock.training.profiler.alone.chain import RunLayer
from penstock.training.profiler.alone.clock import Clock

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
