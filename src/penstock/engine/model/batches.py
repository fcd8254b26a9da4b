"""Batches as loaders give them, parted into inputs and targets, and labels that losses leave out.

The collators of ``transformers`` give one mapping per minibatch, with the labels among what the
model takes; others give dataclasses. Here they become what the rest of the package knows: a value
for the first stage, and one for the loss. Where a loss leaves labels out, a mean over the others is
no mean over rows (``IgnoredLabels``).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import shown
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.model import tree
from penstock.engine.model.microbatches import Microbatches

IGNORED = -100
"""The label that ``torch``'s losses and ``transformers`` leave out unless told otherwise."""

REMEDY = "weight=lambda labels: (labels != -100).sum()"

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


LABELS = "labels"
"""The key of the targets, unless somebody says otherwise: that of ``transformers``' collators."""


def model_loss(outputs: Any, targets: Any = None) -> Tensor:
    """The loss that a model has computed itself, for ``loss=pk.model_loss``.

    With it, ``step(batch)`` gives the model whole batches, labels included, and what the labels
    are only decides how much each microbatch counts (see ``weight`` of ``Pipeline``).

    Args:
        outputs: of the model: a mapping with the key ``loss`` or an object with that attribute,
            such as the outputs of ``transformers``; a tuple that begins with the loss; or the loss
            itself.
        targets: not used; losses are functions of both.

    Raises:
        InputError: there is no tensor in that place.
    """
    loss = outputs
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor):
        raise InputError(
            f"pk.model_loss finds no loss in what the model gave, a {type(outputs).__name__}; let "
            "the model return one under 'loss' (those of transformers do if they get labels, also "
            "when they are captured), or give loss=… a function of (outputs, targets)"
        )
    return loss


def plain(value: Any, name: str) -> Any:
    """A value whose containers torch's tree helpers know: other mappings, and dataclasses, become
    dictionaries.

    What is no tensor goes to every microbatch as it is.

    Args:
        name: of the value, for errors, as ``"inputs"``.

    Raises:
        InputError: an array or a list of texts, which no microbatch may have all of.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Microbatches):
        return Microbatches(plain(part, name) for part in value)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        raise InputError(
            f"{name} hold a list of texts, {shown(value)}, which cannot be cut into microbatches; "
            "leave it out, or give tensors"
        )
    leaves, structure = tree.flatten(value)
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return value
    if tree.is_leaf(structure):
        return _opened(value, name)
    return tree.unflatten([plain(leaf, name) for leaf in leaves], structure)


def _opened(leaf: Any, name: str) -> Any:
    """A value that torch takes for one, although it may hold others."""
    if isinstance(leaf, np.ndarray):
        raise InputError(
            f"{name} hold an array of numpy, which cannot be cut into microbatches; give "
            "torch.from_numpy(array)"
        )
    if isinstance(leaf, Mapping):
        return {key: plain(value, name) for key, value in leaf.items()}
    if _is_dataclass(leaf):
        return {field.name: plain(getattr(leaf, field.name), name) for field in fields(leaf)}
    return leaf


def parted_if_inside(batch: Any, loss: Any, model: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a mapping or dataclass that has the labels inside; all else has no
    targets.

    Args:
        loss: from (output, targets) to a number.
        model: may say what it takes.
    """
    if not (isinstance(batch, Mapping) or _is_dataclass(batch)):
        return batch, None
    return BatchSplit.by(LABELS, loss, model).parted(batch, "the batch")


def is_batch(value: Any) -> bool:
    """Whether a value is one batch, and no loader of batches. A list is one if a tensor stands in
    it, as in the pairs that ``torch.utils.data`` makes."""
    if isinstance(value, list) and not isinstance(value, Microbatches):
        return any(isinstance(item, Tensor) for item in value)
    known = isinstance(value, Tensor | Mapping | tuple | Microbatches)
    return known or _is_dataclass(value)


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


@dataclass(frozen=True)
class BatchSplit:
    """How batches are parted into what the first stage takes and what the loss takes.

    Attributes:
        labels: the key of the targets in batches that have them inside, or several.
        whole: the model computes its loss itself, so batches go in whole.
        taken: names of what the model takes, if it says so; labels among them stay in the inputs.

    Raises:
        InputError: ``labels`` are no keys, or name one twice.
    """

    labels: str | Sequence[str] = LABELS
    whole: bool = False
    taken: Collection[str] = ()

    def __post_init__(self) -> None:
        has_keys = isinstance(self.labels, str | Sequence) and self._keys
        if not has_keys or not all(isinstance(key, str) for key in self._keys):
            raise InputError(
                f"labels is {shown(self.labels)}; give the key of the targets in a batch, as in "
                'labels="labels", or a list of keys'
            )
        if len({*self._keys}) < len(self._keys):
            raise InputError(
                f"labels is {shown(self.labels)}, which names a key twice; name each once"
            )

    @classmethod
    def by(cls, labels: str | Sequence[str], loss: Any, model: Any) -> Self:
        """How batches are parted for a loss and a model, which may say what it takes."""
        return cls(labels, loss is model_loss, getattr(model, "input_names", ()))

    def parted(self, batch: Any, whose: str) -> tuple[Any, Any]:
        """(inputs, targets) of a batch: a pair, or a mapping or dataclass that has both inside.

        Args:
            whose: the batch is, for errors, as ``"minibatch 3 of the loader"``.

        Raises:
            InputError: it is neither, or there are no targets in it.
        """
        if isinstance(batch, Microbatches):
            pairs = [self.parted(part, whose) for part in batch]
            return Microbatches(inputs for inputs, _ in pairs), Microbatches(
                targets for _, targets in pairs
            )
        opened = batch if isinstance(batch, Tensor | tuple | list) else _opened(batch, "inputs")
        if isinstance(opened, dict):
            return self._without_labels(opened), self._targets(opened, whose)
        if self.whole:
            return batch, batch
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise InputError(
                f"{whose} is a {type(batch).__name__}{many}, which says nothing of inputs and "
                "targets; give pairs (inputs, targets), or mappings or dataclasses with the "
                "targets inside, under the key that Pipeline(…, labels=…) names"
            )
        inputs, targets = batch
        return inputs, targets

    def pairs(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each batch of a loader."""
        for number, batch in enumerate(batches):
            yield self.parted(batch, f"minibatch {number} of the loader")

    def inputs_of(self, batch: Any) -> Any:
        """The inputs for the first stage, of a batch of which only outputs are wanted: all of it,
        but labels that the stage would not be given in training."""
        if isinstance(batch, Microbatches):
            return Microbatches(self.inputs_of(part) for part in batch)
        opened = batch if isinstance(batch, Tensor | tuple | list) else _opened(batch, "inputs")
        self._check_labelled(opened)
        return self._without_labels(opened) if isinstance(opened, dict) else batch

    def _check_labelled(self, opened: Any) -> None:
        """Raise ``InputError`` if a model was captured with labels, and these are not there."""
        wanted = [key for key in self._keys if key in self.taken]
        if isinstance(opened, Tensor) and len(self.taken) == 1:
            return
        if isinstance(opened, dict):
            wanted = [key for key in wanted if key not in opened]
        elif not isinstance(opened, Tensor):
            return
        if wanted:
            named = " and ".join(wanted)
            raise InputError(
                f"the model was captured with {named} among its inputs, and takes them without "
                "training, too: add some of their shape, as in "
                f"evaluate({{**batch, {wanted[0]!r}: batch['input_ids']}}), and leave the loss of "
                f"the output alone; or profile the model without {named}, with a loss=… of its own"
            )

    @property
    def _keys(self) -> tuple[str, ...]:
        return (self.labels,) if isinstance(self.labels, str) else tuple(self.labels)

    def _without_labels(self, batch: dict[str, Any]) -> dict[str, Any]:
        stay = self.whole or any(key in self.taken for key in self._keys)
        return {key: value for key, value in batch.items() if stay or key not in self._keys}

    def _targets(self, batch: dict[str, Any], whose: str) -> Any:
        missing = [key for key in self._keys if batch.get(key) is None]
        if missing and self.whole:
            return batch
        if missing:
            empty = [key for key in missing if key in batch]
            if empty:
                raise InputError(
                    f"{' and '.join(empty)} of {whose} is None, so the loss has nothing to compare "
                    "with; give tensors with a row for each row of the inputs"
                )
            raise InputError(
                f"{whose} has {', '.join(map(str, batch)) or 'nothing'}, and no "
                f"{' and no '.join(missing)} for the loss; name the key of its targets, as in "
                'Pipeline(…, labels="labels"), or give pairs (inputs, targets)'
            )
        if isinstance(self.labels, str):
            return batch[self.labels]
        return {key: batch[key] for key in self._keys}


class IgnoredLabels:
    """Warns once if microbatches have different shares of labels that the loss leaves out, while
    each counts by its rows.

    What is on an accelerator is not looked at, since the host would have to wait for it.
    """

    def __init__(self) -> None:
        self._warned = False

    def look(self, targets: Any, parts: Sequence[Any]) -> None:
        """Look at a minibatch.

        Args:
            targets: of all of it.
            parts: those of each microbatch, or of each slice.
        """
        if self._warned or len(parts) < 2 or (isinstance(targets, Tensor) and not _has(targets)):
            return
        shares = {_share(part) for part in parts}
        if len(shares) > 1:
            self._warned = True
            warnings.warn(
                f"some targets are {IGNORED}, which losses leave out, more in some microbatches "
                "than in others, yet each counts by its rows; so this trains (and reports) a mean "
                f"over microbatches, not the mean over all labels. Give Pipeline(…, {REMEDY}) (a "
                "causal language model counts labels[:, 1:]), or weight=len if it should be so",
                RuntimeWarning,
                stacklevel=2,
            )


def all_ignored(targets: Any) -> bool:
    """Whether targets on the host hold labels, and a loss leaves all of them out."""
    labels = [tensor for tensor in tree.tensors(targets) if _may_be_labels(tensor)]
    return bool(labels) and all(bool((tensor == IGNORED).all()) for tensor in labels)


def _share(targets: Any) -> tuple[float, ...]:
    """Which share of each tensor of labels is left out."""
    labels = (tensor for tensor in tree.tensors(targets) if _may_be_labels(tensor))
    return tuple(int((tensor == IGNORED).sum()) / tensor.numel() for tensor in labels)


def _has(targets: Tensor) -> bool:
    return _may_be_labels(targets) and bool((targets == IGNORED).any())


def _may_be_labels(tensor: Tensor) -> bool:
    # Of the types that hold -100; a tensor on meta has no values.
    known = tensor.dtype in _SIGNED and bool(tensor.numel())
    return known and is_on_host(tensor.device) and not tensor.is_meta
