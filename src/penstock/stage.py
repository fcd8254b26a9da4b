"""A stage: some consecutive layers, and what they keep between forward and backward.

A stage knows nothing of schedules, ranks or threads. Its interface is one function per kind of
compute op.

Autograd graphs never cross a stage's border: inputs come in detached, outputs go out detached, and
gradients are handed over by hand. Of the outputs only the graph edge is kept, not the values, so a
sent output does not occupy memory until its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock import tree
from penstock.errors import InputError
from penstock.randomness import LayerStreams, NoDraws
from penstock.spine import NamedLayer

Criterion = Callable[[Any], Tensor]
"""From a stage's output to the loss of that microbatch."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
"""What may pass between stages beside tensors: it can hold none."""


class Stashed(NamedTuple):
    """What one microbatch leaves behind until its backward."""

    inputs: list[Any]
    outputs: list[GradientEdge | None]
    drew: bool


class Stage:
    """Consecutive layers of a model.

    Args:
        index: the stage's number.
        layers: at least one.
        first_layer: index of the first of them in the whole model.
        streams: where layers draw random numbers.
    """

    def __init__(
        self, index: int, layers: Sequence[NamedLayer], first_layer: int, streams: LayerStreams
    ) -> None:
        if not layers:
            raise InputError(f"stage {index} has no layers")
        self.index = index
        self.layers = tuple(layers)
        self._first_layer = first_layer
        self._streams = streams
        self._stash: dict[int, Stashed] = {}

    def forward(
        self, microbatch: int, inputs: Any, step: int = 0, criterion: Criterion | None = None
    ) -> Any:
        """Run the layers on one microbatch; keep what backward needs if gradients are enabled.

        Args:
            microbatch: its number, by which ``backward`` finds what was kept.
            inputs: a tensor or nested tensors; detached here.
            step: the minibatch's number, for random streams.
            criterion: turns the output into the loss; given to the last stage.

        Returns:
            The output, or the loss if there is a criterion, detached.
        """
        leaves, structure = tree.flatten(inputs)
        training = torch.is_grad_enabled()
        pairs = [tree.cut(leaf, training and self._first_layer > 0) for leaf in leaves]
        value, drew = self._run_layers(
            tree.unflatten([pair[1] for pair in pairs], structure), step, microbatch, criterion
        )
        if criterion is not None:
            # A scalar out of a fused loss can be a view that keeps a full-size tensor alive.
            value = _scalar(value, training).clone()
        outputs, structure = tree.flatten(value)
        if training:
            edges = [_edge(output) for output in outputs]
            self._stash[microbatch] = Stashed([pair[0] for pair in pairs], edges, drew)
        return tree.unflatten([self._detached(output) for output in outputs], structure)

    def _run_layers(
        self, value: Any, step: int, microbatch: int, criterion: Criterion | None
    ) -> tuple[Any, bool]:
        """The output of the layers, and of the criterion; and whether any drew."""
        runs: list[tuple[Callable[[Any], Any], bool]] = [
            (layer.module, layer.module.training) for layer in self.layers
        ]
        if criterion is not None:
            runs.append((criterion, True))
        drew = False
        for index, (run, mode) in enumerate(runs, start=self._first_layer):
            with self._streams.stream(index, mode, step, microbatch) as stream:
                value = run(value)
            self._streams.learn(index, mode, stream)
            drew = drew or (stream is not None and stream.drew)
        return value, drew

    def _detached(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.detach()
        if isinstance(output, _PLAIN):
            return output
        raise InputError(
            f"stage {self.index} returned a {type(output).__name__}, whose tensors (if any) cannot "
            "be seen; return tensors nested in tuples, lists and dicts, or register the class with "
            "torch.utils._pytree"
        )

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Full backward of one microbatch: accumulates into ``.grad`` of the parameters.

        Args:
            microbatch: one that ``forward`` has run.
            gradients: one per leaf of the output, ``None`` where nothing flows back.

        Returns:
            One gradient per leaf of the input, ``None`` where there is none.
        """
        stashed = self._stash.pop(microbatch)
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(stashed.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:
            edges, seeds = zip(*pairs, strict=True)
            with NoDraws() if stashed.drew else contextlib.nullcontext():
                torch.autograd.backward(edges, seeds)
        return [leaf.grad if isinstance(leaf, Tensor) else None for leaf in stashed.inputs]

    def forget(self) -> None:
        """Drop what unfinished microbatches have left, after a failed step."""
        self._stash.clear()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter once."""
        seen: set[int] = set()
        for layer in self.layers:
            for parameter in layer.module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers under the keys that the unsplit model gives them."""
        return {
            f"{layer.prefix}.{key}" if layer.prefix else key: value
            for layer in self.layers
            for key, value in layer.module.state_dict().items()
        }


def _edge(output: Any) -> GradientEdge | None:
    return (
        get_gradient_edge(output) if isinstance(output, Tensor) and output.requires_grad else None
    )


def _scalar(loss: Any, training: bool) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss must be one number, but it has {what}; reduce it to a scalar")
    if training and not loss.requires_grad:
        raise InputError(
            "the loss has no gradient: it was detached or depends on no trained parameter; compute "
            "it from the output with differentiable operations"
        )
    return loss.reshape(())
