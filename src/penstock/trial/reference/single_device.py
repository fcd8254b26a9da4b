"""What a synchronous plan is proven against: the same steps on one device.

It is a plain loop over microbatches and layers without pipeline code. It shares with the pipeline
only how a minibatch is cut and where dropout draws, so that an equal result says something about
everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.model import microbatches
from penstock.engine.model.microbatches import Weight, Weighting
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import Skip, evaluation_mode, run_layer, spine_of


class SingleDevice:
    """Train a model on one device by accumulating over the same microbatches.

    Args:
        model: as given to ``Pipeline``.
        num_microbatches: per minibatch.
        loss: from (output, targets) of a microbatch to a scalar.
        optimizer: makes an optimizer of parameters, or ``None`` to only accumulate gradients.
        seed: seeds dropout; a pipeline with the same seed draws the same.
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its rows.
        weight: how many terms of the mean the targets of a microbatch hold; default: rows.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        seed: int | None = None,
        reduction: str = "mean",
        weight: Weight | None = None,
    ) -> None:
        keep_freed_pages()  # as the pipeline does: neither may win by the allocator
        self._model = model
        self._layers = spine_of(model)
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._optimizer = optimizer(model.parameters()) if optimizer else None
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._weighting = Weighting(reduction, weight)
        self._step = 0

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one minibatch: forward, backward, and the optimizer's step; returns the loss."""
        count = min(self._num_microbatches, microbatches.num_rows(inputs, "inputs"))
        parts = microbatches.split(targets, count)
        weights = self._weighting.of(parts)
        total: Tensor | None = None
        for k, part in enumerate(microbatches.split(inputs, count)):
            output = self._forward(part, k)
            loss = self._run(len(self._layers), partial(self._loss, output), True, parts[k], k)
            if not weights[k]:
                continue  # the mean of no terms is NaN, and NaN · 0 as well
            term = loss * weights[k]
            term.backward()
            total = term.detach() if total is None else total + term.detach()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        assert total is not None
        return total

    def evaluate(self, inputs: Any) -> Any:
        """Run forward only, on all rows at once, in evaluation mode and without gradients."""
        layers = (layer.module for layer in self._layers)
        with evaluation_mode(self._model, *layers), torch.no_grad():
            return self._forward(inputs, 0)

    def _forward(self, value: Any, microbatch: int) -> Any:
        skips: dict[str, Skip] = {}
        for index, layer in enumerate(self._layers):
            run = partial(run_layer, layer, skips=skips)
            value = self._run(index, run, layer.module.training, value, microbatch)
        return value

    def _run(
        self, index: int, run: Callable[[Any], Any], training: bool, value: Any, microbatch: int
    ) -> Any:
        """Run a layer, or the loss as if it were one more, where it draws its random numbers."""
        with self._streams.stream(index, training, self._step, microbatch) as stream:
            result = run(value)
        self._streams.learn(index, training, stream)
        return result
