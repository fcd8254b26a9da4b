"""The reference of a synchronous plan: the same steps on one device.

It is a plain loop over microbatches and layers without pipeline code. It shares with the pipeline,
and with the other loops here, only how a minibatch is cut and where dropout draws, so that an equal
result says something about everything else. Gradients of stages with copies are added as their
ranks add them: each copy those of its own microbatches, and then all in the order of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.summation.tree import SumTree
from penstock.engine.device.memory import keep_freed_pages
from penstock.engine.model import microbatches
from penstock.engine.model.microbatches import Weight, Weighting
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import Skip, evaluation_mode, run_layer, spine_of


class CopiedStage(NamedTuple):
    """A stage with copies.

    Attributes:
        parameters: of the model.
        tree: of the ranks that have a copy.
        rank_of: from (microbatch, microbatches in the minibatch) to the rank that runs it.
    """

    parameters: tuple[nn.Parameter, ...]
    tree: SumTree
    rank_of: Callable[[int, int], int]


class CopiedStages:
    """Keeps the gradients of each copy apart until all microbatches are through.

    Args:
        stages: those with copies; the gradients of other stages are left alone.
    """

    def __init__(self, stages: Sequence[CopiedStage] = ()) -> None:
        self._stages = stages
        self._sums: dict[nn.Parameter, dict[int, Tensor]] = {}

    def gather(self, microbatch: int, count: int) -> None:
        """Take the gradients of a microbatch, which is one of so many."""
        for parameters, _, rank_of in self._stages:
            rank = rank_of(microbatch, count)
            for parameter in parameters:
                if parameter.grad is not None:
                    own = self._sums.setdefault(parameter, {})
                    gradient, parameter.grad = parameter.grad, None
                    own[rank] = own[rank] + gradient if rank in own else gradient

    def add_up(self) -> None:
        """Give parameters the sums over all copies."""
        for parameters, tree, _ in self._stages:
            for parameter in parameters:
                if parameter in self._sums:
                    parameter.grad = folded(tree, self._sums.pop(parameter))


def folded(tree: SumTree, gradients: Mapping[int, Tensor | None]) -> Tensor | None:
    """The sum of the gradients, by rank, that are there; ``None`` if none is."""
    there = {rank: gradient for rank, gradient in gradients.items() if gradient is not None}
    return tree.fold(there, torch.add) if there else None


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
        copied: stages whose gradients are added as those of copies; by default there are none, and
            all are added in the order of microbatches.
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
        copied: Sequence[CopiedStage] = (),
    ) -> None:
        keep_freed_pages()  # as the pipeline does: neither may win by the allocator
        self._model = model
        self._layers = spine_of(model)
        self._num_microbatches = num_microbatches
        self._loss = loss
        self._optimizer = optimizer(model.parameters()) if optimizer else None
        self._streams = LayerStreams(torch.initial_seed() if seed is None else seed)
        self._weighting = Weighting(reduction, weight)
        self._copies = CopiedStages(copied)
        self._step = 0

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one minibatch: forward, backward, and the optimizer's step; returns the loss."""
        cut = cut_minibatch(inputs, targets, self._num_microbatches, self._weighting)
        total: Tensor | None = None
        for k, (part, wanted, share) in enumerate(cut):
            output = self._forward(part, k)
            loss = self._run(len(self._layers), True, partial(self._loss, output), wanted, k)
            if not share:
                continue  # the mean of no terms is NaN, and NaN · 0 as well
            term = loss * share
            term.backward()
            self._copies.gather(k, len(cut))
            total = term.detach() if total is None else total + term.detach()
        self._copies.add_up()
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
            value = self._run(index, layer.module.training, run, value, microbatch)
        return value

    def _run(
        self, layer: int, training: bool, run: Callable[[Any], Any], value: Any, microbatch: int
    ) -> Any:
        return run_where_it_draws(
            self._streams, (self._step, microbatch), layer, training, run, value
        )


def cut_minibatch(
    inputs: Any, targets: Any, num_microbatches: int, weighting: Weighting
) -> list[tuple[Any, Any, float]]:
    """(inputs, targets, share of the loss) of each microbatch; fewer of them where there are fewer
    rows."""
    count = min(num_microbatches, microbatches.num_rows(inputs, "inputs"))
    wanted = microbatches.split(targets, count)
    shares = weighting.of(wanted)
    return list(zip(microbatches.split(inputs, count), wanted, shares, strict=True))


def run_where_it_draws(
    streams: LayerStreams,
    key: tuple[int, int],
    layer: int,
    training: bool,
    run: Callable[[Any], Any],
    value: Any,
) -> Any:
    """Run a layer, or the loss as if it were one more, where it draws its random numbers; ``key``
    is (minibatch, microbatch in it)."""
    with streams.stream(layer, training, *key) as stream:
        result = run(value)
    streams.learn(layer, training, stream)
    return result


def check_cuts(cuts: Sequence[int], num_layers: int) -> None:
    """Raise ``InputError`` unless ``cuts`` are counts of layers that are all layers together."""
    if not cuts or min(cuts) < 1 or sum(cuts) != num_layers:
        raise InputError(
            f"cuts are {list(cuts)}; give how many layers each stage has, at least one, and "
            f"{num_layers} in all"
        )
