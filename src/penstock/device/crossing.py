"""Tensors on another device, with the strides that they had.

``Tensor.to`` packs a view that leaves gaps (``x[:, :1]``) or repeats itself (``x.expand(…)``)
densely when it crosses devices. Kernels are chosen by strides, and another kernel sums in another
order: what is computed from a tensor must not depend on where the tensor came from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOST_SPREAD = 8
_ALWAYS_SPREAD_BYTES = 2**24
PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Classes whose tensors are nothing but memory and strides."""


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """A tensor on a device: itself if it is there, else a copy with its strides.

    What lies between the tensor's first and last element is copied, too. If that is far more than
    the tensor (see ``spreads_far``), the copy is dense. Gradients flow through a dense copy only.
    """
    if tensor.device == device:
        return tensor
    if _travels_as_it_is(tensor):
        return tensor.to(device, non_blocking=non_blocking)
    memory = tensor.as_strided((span(tensor),), (1,)).to(device, non_blocking=non_blocking)
    return memory.as_strided(tensor.shape, tensor.stride()).detach()


def _travels_as_it_is(tensor: Tensor) -> bool:
    has_strides = tensor.layout is torch.strided and type(tensor) in PLAIN_TENSORS
    if not has_strides or tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return True
    needs_history = tensor.requires_grad and torch.is_grad_enabled()
    return needs_history or spreads_far(tensor)


def span(tensor: Tensor) -> int:
    """How many elements lie from the tensor's first to its last one in memory."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def spreads_far(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie over more than 16 MiB and more than eight times its size, as
    a column of a large table, so that a copy with its gaps would waste memory."""
    length = span(tensor)
    return length > _MOST_SPREAD * tensor.numel() and (
        length * tensor.element_size() > _ALWAYS_SPREAD_BYTES
    )
