"""Losses in which a row's term depends on other rows: a pipeline computes them per microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.device.accelerators import generators_kept
from penstock.engine.model import microbatches, tree
from penstock.engine.model.batches import IGNORED
from penstock.engine.model.spine import evaluation_mode, run_spine, spine_of
from penstock.training.profiler.alone import Sample

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 3e-2


def mixed_rows(model: nn.Module, sample: Sample) -> str | None:
    """A warning if the loss of a sample is neither the mean nor the sum of those of its halves.

    Args:
        model: it is run in evaluation mode, in which rows do not meet in batch norm.
        sample: with fewer than two rows, without a loss, or where the model does not take half of
            the rows, nothing can be said.
    """
    if sample.loss is None or sample.num_rows < 2:
        return None
    inputs, targets = (microbatches.split(part, 2) for part in (sample.inputs, sample.targets))
    try:
        with (
            evaluation_mode(model),
            torch.no_grad(),
            generators_kept(tensor.device for tensor in tree.tensors(sample.inputs)),
        ):
            layers = [layer.module for layer in spine_of(model)]
            whole = _loss(layers, sample, sample.inputs, sample.targets)
            halves = [_loss(layers, sample, *half) for half in zip(inputs, targets, strict=True)]
    except Exception:  # a model may refuse so few rows in any way, and nobody has asked for them
        return None
    tolerance = _TOLERANCE.get(whole.dtype, _LOW_PRECISION)
    whole, both = whole.double().cpu(), torch.stack(halves).double().cpu()
    for weights in _weights(inputs, targets):
        # Where a half has no labels, its mean over them is no number, and counts for nothing.
        expected = torch.where(weights > 0, both * weights, 0.0).sum()
        if torch.allclose(whole, expected, rtol=tolerance, atol=tolerance):
            return None
    return (
        f"the loss of the sample is {float(whole):.4g}, but those of its halves are "
        f"{float(both[0]):.4g} and {float(both[1]):.4g}, and it is neither their mean nor their "
        "sum: the term of a row depends on other rows, as in a contrastive loss with negatives of "
        "the batch. A pipeline computes the loss of each microbatch for itself, so it trains "
        "something else. Take larger microbatches, as many rows as the loss should see, or a loss "
        "of single rows; where rows only count differently, give Pipeline(…, weight=…)"
    )


def _loss(layers: Sequence[nn.Module], sample: Sample, inputs: Any, targets: Any) -> Tensor:
    assert sample.loss is not None
    # Layers may work in place on what they are given.
    own = tree.replace(Tensor, Tensor.clone, inputs)
    return sample.loss(run_spine(layers, own), targets)


def _weights(inputs: list[Any], targets: list[Any]) -> Iterator[Tensor]:
    """Factors on the losses of two halves: of a mean over rows, a sum, and a mean over labels."""
    rows = [microbatches.num_rows(half, "inputs") for half in inputs]
    yield torch.tensor(rows).double() / sum(rows)
    yield torch.ones(2).double()
    for first in (0, 1):  # a causal language model has no label for the first word
        counts = [_num_labels(half, first) for half in targets]
        if sum(counts):
            yield torch.tensor(counts).double() / sum(counts)


def _num_labels(targets: Any, first: int) -> int:
    """Labels that a loss does not leave out, in sequences from the position ``first`` on."""
    labels = (tensor for tensor in tree.tensors(targets) if not tensor.is_floating_point())
    sequences = (tensor[:, first:] if tensor.dim() > 1 else tensor for tensor in labels)
    return sum(int((tensor != IGNORED).sum()) for tensor in sequences)
