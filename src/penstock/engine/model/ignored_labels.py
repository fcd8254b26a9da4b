"""Labels that losses leave out: a mean over the others is no mean over rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.device.accelerators import is_on_host
from penstock.engine.model import tree

IGNORED = -100
"""What ``torch``'s losses and ``transformers`` leave out unless somebody says otherwise."""

REMEDY = "weight=lambda labels: (labels != -100).sum()"

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


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
