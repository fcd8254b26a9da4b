"""Cutting a minibatch into microbatches, and these into slices of their sequence, so that the loss
stays that of one device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.base.values import expect, one_of, shown
from penstock.engine.device.crossing import copy_of
from penstock.engine.model import tree

Weight = Callable[[Any], float]
"""How many terms of the loss's mean the targets of one microbatch contribute."""


class Microbatches(list[Any]):
    """A minibatch that is cut already: one value per microbatch, whose shapes may differ."""


def num_rows(value: Any, name: str) -> int:
    """Rows of a minibatch: the first dimension, which all its tensors share.

    Raises:
        InputError: no tensor, a tensor without rows, or tensors that disagree.
    """
    if type(value) is Tensor and _has_rows(value):  # as nearly all are
        return value.shape[0]
    tensors = tree.tensors(value)
    if not tensors:
        raise InputError(
            f"{name} hold no tensor, but {shown(value)}; give tensors, as torch.tensor(list)"
        )
    check_dense(tensors, name)
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if None in counts:
        raise InputError(f"{name} hold a tensor without dimensions; the first one must be the rows")
    if len(counts) > 1:
        raise InputError(
            f"{name} disagree in their number of rows: {_rows_by_name(value, name)}; all are cut "
            "into microbatches along their first dimension, so expand what is the same for all "
            "rows, as a mask may be, or let the model make it"
        )
    rows = counts.pop()
    if not rows:
        raise InputError(f"{name} have no rows")
    return rows


def _rows_by_name(value: Any, name: str) -> str:
    """Of each number of rows, the first tensor that has it."""
    first: dict[int, str] = {}
    for own, tensor in tree.named_tensors(value, name):
        first.setdefault(tensor.shape[0], f"{tensor.shape[0]} in {own} {tuple(tensor.shape)}")
    return ", ".join(first.values())


def _has_rows(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.dim() > 0 and tensor.shape[0] > 0


def check_dense(tensors: Iterable[Tensor], name: str) -> None:
    """Raise ``InputError`` for a sparse or nested tensor, which has no rows to cut and send."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InputError(
                f"{name} hold a tensor that is {kind}, which cannot be cut into microbatches; give "
                "a dense one (to_dense() or to_padded_tensor()), and let the first layer convert it"
            )


def split(value: Any, num_microbatches: int, *, copied: bool = True) -> list[Any]:
    """Cut into microbatches whose sizes differ by at most one row, the larger ones first.

    Each has memory of its own: a first layer may work in place, which must reach neither the
    caller's data nor the other microbatches that are in flight. Unless they are ``copied``, they
    are views.
    """
    return _split(value, num_microbatches, 0, copied=copied)


def _split(value: Any, num_parts: int, dimension: int, *, copied: bool = True) -> list[Any]:
    own = _owned if copied else list
    if isinstance(value, Tensor):
        return own(value.tensor_split(num_parts, dimension))
    leaves, structure = tree.flatten(value)
    pieces = [
        own(leaf.tensor_split(num_parts, dimension))
        if isinstance(leaf, Tensor)
        else [leaf] * num_parts
        for leaf in leaves
    ]
    return [tree.unflatten(list(parts), structure) for parts in zip(*pieces, strict=True)]


def _owned(pieces: tuple[Tensor, ...]) -> list[Tensor]:
    if not torch.is_inference_mode_enabled():
        return [copy_of(piece) for piece in pieces]
    # A copy made in inference mode could not be used for training.
    with torch.inference_mode(False):
        return [copy_of(piece) for piece in pieces]


def sequence_length(value: Any, name: str) -> int:
    """Positions of a microbatch: the second dimension, which all its tensors share.

    Raises:
        InputError: a tensor without a second dimension, or tensors that disagree.
    """
    lengths = {tuple(tensor.shape[1:2]) for tensor in tree.tensors(value)}
    if len(lengths) != 1 or () in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tree.tensors(value))
        raise InputError(
            f"{name} cannot be cut into slices of the sequence: it must be the second dimension of "
            f"every tensor, but their shapes are {shapes}; choose a schedule without slices, or "
            "give [rows, length, …]"
        )
    ((length,),) = lengths
    return length


def split_sequence(value: Any, num_slices: int, name: str, *, copied: bool = True) -> list[Any]:
    """Cut a microbatch into slices whose lengths differ by at most one, the longer ones first.

    Each has memory of its own if they are ``copied``, as in ``split``.

    Raises:
        InputError: tensors without the same second dimension, or with fewer positions than slices.
    """
    if num_slices == 1:
        return [value]
    length = sequence_length(value, name)
    if length < num_slices:
        raise InputError(
            f"{name} have {length} positions, which do not make {num_slices} slices; give longer "
            "sequences, or plan with fewer slices"
        )
    return _split(value, num_slices, 1, copied=copied)


def have_rows_of(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether every output has one row per row of its microbatch, so that they can be joined."""
    return all(
        {*_lengths(output)} <= {num_rows(given, "inputs")}
        for output, given in zip(outputs, inputs, strict=True)
    )


def add_up_to(outputs: Sequence[Any], whole: Any) -> bool:
    """Whether outputs of microbatches have together as many rows as the output for all of them at
    once; that may be several per row of the input."""
    wanted, lengths = _lengths(whole), [_lengths(output) for output in outputs]
    same_number = all(len(own) == len(wanted) for own in lengths)
    return same_number and [sum(column) for column in zip(*lengths, strict=True)] == wanted


def _lengths(output: Any) -> list[int]:
    """The first dimension of every tensor; −1 for one without dimensions."""
    return [tensor.shape[0] if tensor.dim() else -1 for tensor in tree.tensors(output)]


def join(values: list[Any]) -> Any:
    """Undo ``split`` on outputs: rows one after the other.

    Raises:
        InputError: outputs without rows, or that differ in more than their rows.
    """
    return _join(values, 0)


def join_slices(values: list[Any], num_slices: int) -> list[Any]:
    """Undo ``split_sequence`` on outputs of several microbatches: positions one after the other.

    Raises:
        InputError: outputs without positions, or that differ in more than these.
    """
    if num_slices == 1:
        return values
    starts = range(0, len(values), num_slices)
    return [_join(values[start : start + num_slices], 1) for start in starts]


def _join(values: list[Any], dimension: int) -> Any:
    flattened = [tree.flatten(value) for value in values]
    structure = flattened[0][1]
    if any(other != structure for _, other in flattened):
        raise InputError("the outputs of the microbatches are nested in different ways")
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree.unflatten([_joined(column, dimension) for column in columns], structure)


def _joined(column: tuple[Any, ...], dimension: int) -> Any:
    first = column[0]
    without, parts = (("rows", "microbatches"), ("positions", "slices"))[dimension]
    if isinstance(first, Tensor):
        if first.dim() <= dimension:
            raise InputError(f"an output is a tensor without {without}; {parts} cannot be joined")
        return torch.cat(column, dimension)
    if any(other != first for other in column):
        raise InputError(f"an output that is no tensor differs between {parts}: {column}")
    return first


@dataclass(frozen=True)
class Weighting:
    """How much each microbatch counts.

    Attributes:
        reduction: ``"mean"`` or ``"sum"``: what the loss does over its terms.
        weight: how many terms of the mean the targets of a microbatch, or of a slice of one, hold;
            by default rows, or with slices rows × length.

    Raises:
        InputError: another reduction, or a weight for a sum.
    """

    reduction: str = "mean"
    weight: Weight | None = None

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))
        if self.weight is not None:
            remedy = "give a function, as in weight=lambda targets: (targets != -100).sum()"
            expect(self.weight, Callable, "weight", remedy)
        if self.weight is not None and self.reduction == "sum":
            raise InputError("weight is for reduction='mean'; a sum needs none")

    @classmethod
    def of_loss(cls, loss: object, reduction: str, weight: Weight | None) -> Self:
        """The weighting for a loss, which may say itself how it reduces its terms.

        Raises:
            InputError: it sums where a mean is expected, or the other way round.
        """
        weighting = cls(reduction, weight)
        own = getattr(loss, "reduction", None) if isinstance(loss, nn.Module) else None
        if own in {"mean", "sum"} and own != reduction:
            raise InputError(
                f"loss: {type(loss).__name__} has reduction={own!r}, but the pipeline would join "
                f"microbatches as those of a {reduction}; give Pipeline(…, reduction={own!r})"
            )
        by_class = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
        if own == "mean" and by_class and weight is None:
            warnings.warn(
                f"{type(loss).__name__} divides by the weights of the classes that a microbatch "
                "holds, yet each microbatch counts by its rows; so this is not the mean over the "
                "minibatch. Give Pipeline(…, weight=lambda targets: loss.weight[targets].sum())",
                RuntimeWarning,
                stacklevel=3,
            )
        return weighting

    @property
    def counts_rows(self) -> bool:
        """Whether each microbatch counts by its rows, whatever its targets are."""
        return self.reduction == "mean" and self.weight is None

    def of(self, targets: list[Any], sliced: bool = False) -> list[float]:
        """The factor on each microbatch's loss such that their sum is the minibatch's loss.

        A mean over the minibatch is the mean over microbatches weighted by their number of terms.
        A sum needs no weights.

        Args:
            targets: of each microbatch or, if they are ``sliced``, of each slice.

        Raises:
            InputError: ``weight`` raised, or gave no number, a negative count, or only zeros.
        """
        if self.reduction == "sum":
            return [1.0] * len(targets)
        counts = self.terms(targets, sliced)
        total = sum(counts)
        return [count / total for count in counts]

    def terms(self, targets: list[Any], sliced: bool = False) -> list[float]:
        """How many terms of the loss each microbatch has; arguments and errors as for ``of``."""
        if self.weight is None:
            counts = [float(num_rows(part, "targets")) for part in targets]
            if sliced:
                lengths = [sequence_length(part, "targets") for part in targets]
                counts = [rows * length for rows, length in zip(counts, lengths, strict=True)]
        else:
            counts = [_terms(self.weight, *part) for part in enumerate(targets)]
        total = sum(counts)
        if not 0 < total < math.inf or min(counts) < 0:
            raise InputError(f"the weights of the microbatches are {counts}; they must count terms")
        return counts


@lru_cache(maxsize=64)
def shares_of_rows(num_rows: int, num_microbatches: int) -> tuple[float, ...]:
    """The share of its rows that each microbatch of a minibatch has, as ``split`` cuts it: what
    ``Weighting.of`` gives where each counts by its rows."""
    least, more = divmod(num_rows, num_microbatches)
    sizes = [least + (place < more) for place in range(num_microbatches)]
    return tuple(float(size) / float(num_rows) for size in sizes)


def _terms(weight: Weight, index: int, targets: Any) -> float:
    """How many terms the targets of one microbatch count."""
    try:
        return float(weight(targets))
    except Exception as error:
        raise InputError(
            f"weight cannot count the terms of the targets of microbatch {index}: "
            f"{type(error).__name__}: {error}; it must take what the loss takes and give one number"
        ) from error
