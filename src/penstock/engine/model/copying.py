"""Copies of tensors from which layers compute what they would from the originals, to the bit.

``Tensor.clone`` packs a view that leaves gaps (``x[:, :1]``) or repeats itself (``x.expand(…)``)
densely. Kernels are chosen by strides, and another kernel sums in another order or, under autocast,
rounds elsewhere. Who copies so that a layer may overwrite its input must not change its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.engine.device.crossing import PLAIN_TENSORS, span, spreads_far


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of its own with the strides of the original; gradients flow through it.

    A copy is as long as what lies between the original's first and last element. If that is more
    than 16 MiB and more than eight times its elements (a column of a memory-mapped table), or if
    the tensor has no strides, the copy is what ``clone`` gives.
    """
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
        return tensor.clone()
    if tensor.is_contiguous() or spreads_far(tensor):
        return tensor.clone()
    if torch.is_grad_enabled() and tensor.requires_grad:
        copied: Tensor = _Copy.apply(tensor)  # type: ignore[no-untyped-call]
        return copied
    return _with_gaps(tensor)


def _with_gaps(tensor: Tensor) -> Tensor:
    # What lies in the gaps is copied, too: so that one way serves views that overlap themselves.
    memory = tensor.as_strided((span(tensor),), (1,)).clone()
    # A view of it could not be overwritten where a function of autograd gives it.
    return memory.as_strided(tensor.shape, tensor.stride()).detach()


class _Copy(torch.autograd.Function):
    """``_with_gaps`` as a function of autograd; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _with_gaps(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]
