"""The proof's other half: the same steps on one device, with no pipeline code.

A plain loop over microbatches and layers. It shares with the pipeline only how a minibatch is cut
and where dropout draws, so that an equal result says something about everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from penstock import microbatches
from penstock.microbatches import Weight
from penstock.randomness import LayerStreams
from penstock.spine import spine_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class SingleDevice:
    """Train a model on one device by accumulating over the same microbatches.

    Args:
        model: as given to ``Pipeline``.
        num_microbatches: per minibatch.
        loss: from (output, targets) of a microbatch to a scalar.
        optimizer: makes an optimizer of parameters, or ``None`` to only accumulate gradients.
        seed: of dropout; a pipeline with the same seed draws the same.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its rows.
        weight: how many terms of the mean the targets of a microbatch hold; default: rows.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: OptimizerFactory | None = None,
        seed: int | None = None,
        reduction: str = "mean",
        weight: Weight | None = None,
    ) -> None:
        self._model = model
        self._layers = spine_of(model)
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._optimizer = optimizer(model.parameters()) if optimizer else None
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._reduction = reduction
        self._weight = weight
        self._step = 0

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """One minibatch: forward, backward, and the optimizer's step. Returns its loss."""
        count = min(self._num_microbatches, microbatches.num_rows(inputs, "inputs"))
        parts = microbatches.split(targets, count)
        weights = microbatches.loss_weights(parts, self._reduction, self._weight)
        total: Tensor | None = None
        for k, part in enumerate(microbatches.split(inputs, count)):
            term = self._loss(self._forward(part, k), parts[k]) * weights[k]
            term.backward()  # type: ignore[no-untyped-call]
            total = term.detach() if total is None else total + term.detach()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        assert total is not None
        return total

    def evaluate(self, inputs: Any) -> Any:
        """Forward only, on all rows at once, in evaluation mode and without gradients."""
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.no_grad():
                return self._forward(inputs, 0)
        finally:
            for module in training:
                module.training = True

    def _forward(self, value: Any, microbatch: int) -> Any:
        for index, layer in enumerate(self._layers):
            training = layer.module.training
            with self._streams.stream(index, training, self._step, microbatch) as stream:
                value = layer.module(value)
            self._streams.learn(index, training, stream)
        return value
