"""Cutting a minibatch into microbatches, so that the loss stays that of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock import tree
from penstock.errors import InputError
from penstock.values import one_of

Weight = Callable[[Any], float]
"""How many terms of the loss's mean the targets of one microbatch contribute."""


class Microbatches(list[Any]):
    """A minibatch that is cut already: one value per microbatch, whose shapes may differ."""


def num_rows(value: Any, what: str) -> int:
    """Rows of a minibatch: the first dimension, which all its tensors share.

    Raises:
        InputError: no tensor, a tensor without rows, or tensors that disagree.
    """
    tensors = tree.tensors(value)
    if not tensors:
        raise InputError(f"{what} hold no tensor")
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if None in counts:
        raise InputError(f"{what} hold a tensor without dimensions; the first one must be the rows")
    if len(counts) > 1:
        raise InputError(
            f"{what} disagree in their number of rows: {sorted(count or 0 for count in counts)}"
        )
    rows = counts.pop()
    if not rows:
        raise InputError(f"{what} have no rows")
    return rows


def split(value: Any, num_microbatches: int) -> list[Any]:
    """Cut into microbatches whose sizes differ by at most one row, the larger ones first.

    Each has memory of its own: a first layer may work in place, which must reach neither the
    caller's data nor the other microbatches that are in flight.
    """
    leaves, structure = tree.flatten(value)
    pieces = [
        _owned(leaf.tensor_split(num_microbatches))
        if isinstance(leaf, Tensor)
        else [leaf] * num_microbatches
        for leaf in leaves
    ]
    return [tree.unflatten(list(parts), structure) for parts in zip(*pieces, strict=True)]


def _owned(pieces: tuple[Tensor, ...]) -> list[Tensor]:
    # A clone made in inference mode could not be used for training.
    with torch.inference_mode(False):
        return [piece.clone() for piece in pieces]


def join(values: list[Any]) -> Any:
    """Undo ``split`` on outputs: rows one after the other.

    Raises:
        InputError: outputs without rows, or that differ in more than their rows.
    """
    flattened = [tree.flatten(value) for value in values]
    structure = flattened[0][1]
    if any(other != structure for _, other in flattened):
        raise InputError("the outputs of the microbatches are nested in different ways")
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree.unflatten([_joined(column) for column in columns], structure)


def _joined(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        if not first.dim():
            raise InputError("an output is a tensor without rows; microbatches cannot be joined")
        return torch.cat(column)
    if any(other != first for other in column):
        raise InputError(f"an output that is no tensor differs between microbatches: {column}")
    return first


@dataclass(frozen=True)
class Weighting:
    """How much each microbatch counts.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its terms.
        weight: how many terms of the mean the targets of a microbatch hold; rows by default.

    Raises:
        InputError: another reduction, or a weight for a sum.
    """

    reduction: str = "mean"
    weight: Weight | None = None

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))
        if self.weight is not None and self.reduction == "sum":
            raise InputError("weight is for reduction='mean'; a sum needs none")

    def of(self, targets: list[Any]) -> list[float]:
        """The factor on each microbatch's loss such that their sum is the minibatch's loss.

        A mean over the minibatch is the mean over microbatches weighted by their number of terms.
        A sum needs no weights.

        Raises:
            InputError: ``weight`` gave a negative count, or only zeros.
        """
        if self.reduction == "sum":
            return [1.0] * len(targets)
        if self.weight is None:
            counts = [float(num_rows(part, "targets")) for part in targets]
        else:
            counts = [float(self.weight(part)) for part in targets]
        total = sum(counts)
        if not 0 < total < math.inf or min(counts) < 0:
            raise InputError(f"the weights of the microbatches are {counts}; they must count terms")
        return [count / total for count in counts]
