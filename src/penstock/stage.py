"""A stage: some consecutive layers, and what they keep between forward and backward.

A stage knows nothing of schedules, ranks or threads. Its interface is one function per kind of
compute op.

Autograd graphs never cross a stage's border: inputs come in detached, outputs go out detached, and
gradients are handed over by hand. Of the outputs only the graph edge is kept, not the values, so a
sent output does not occupy memory until its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock import tree
from penstock.errors import InputError
from penstock.randomness import LayerStreams
from penstock.spine import NamedLayer

Criterion = Callable[[Any], Tensor]
"""From a stage's output to the loss of that microbatch."""


class Stashed(NamedTuple):
    """What one microbatch leaves behind until its backward."""

    inputs: list[Any]
    outputs: list[GradientEdge | None]


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
        # An in-place first layer would overwrite the leaf whose gradient is wanted.
        self._copies_input = first_layer > 0 and any(
            getattr(module, "inplace", False) for module in self.layers[0].module.modules()
        )

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
        leaves = [_detached(leaf, training and self._first_layer > 0) for leaf in leaves]
        value = tree.unflatten(leaves, structure)
        if self._copies_input:
            value = tree.replace(Tensor, Tensor.clone, value)
        value = self._run_layers(value, step, microbatch)
        if criterion is not None:
            # A scalar out of a fused loss can be a view that keeps a full-size tensor alive.
            value = _scalar(criterion(value)).clone()
        outputs, structure = tree.flatten(value)
        if training:
            self._stash[microbatch] = Stashed(leaves, [_edge(output) for output in outputs])
        return tree.unflatten([_detached(output, False) for output in outputs], structure)

    def _run_layers(self, value: Any, step: int, microbatch: int) -> Any:
        for index, layer in enumerate(self.layers, start=self._first_layer):
            mode = layer.module.training
            with self._streams.stream(index, mode, step, microbatch) as stream:
                value = layer.module(value)
            self._streams.learn(index, mode, stream)
        return value

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


def _detached(leaf: Any, wants_gradient: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    if wants_gradient and (leaf.is_floating_point() or leaf.is_complex()):
        leaf.requires_grad_()
    return leaf


def _edge(output: Any) -> GradientEdge | None:
    return (
        get_gradient_edge(output) if isinstance(output, Tensor) and output.requires_grad else None
    )


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss must be one number, but it has {what}; reduce it to a scalar")
    return loss.reshape(())
