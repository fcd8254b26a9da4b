"""Copies of tensors with the strides that they had, and parameters that go to another device.

``Tensor.to`` and ``Tensor.clone`` pack a view that leaves gaps (``x[:, :1]``) or repeats itself
(``x.expand(…)``) densely. Kernels are chosen by strides, and another kernel sums in another order
or, under autocast, rounds elsewhere: what is computed from a tensor must depend neither on where
the tensor came from, nor on whether it was copied so that a layer may overwrite it.

A parameter stays the object that it is wherever its values go, so that whoever holds it (an
optimizer, a layer that is tied to another one) still does. ``Module.to`` says so of the kinds of
device that torch knows by itself, whose tensors take ``.data`` of each other. Of all others, and of
``meta``, it makes new parameters, and ties are broken; here the implementation behind the object is
exchanged instead, as ``Module.to`` does it under ``torch.__future__``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.base.errors import RunError

_MOST_SPREAD = 8
_ALWAYS_SPREAD_BYTES = 2**24
PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Classes whose tensors are nothing but memory and strides."""


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """A tensor on a device: itself if it is there, else a copy with its strides.

    What lies between the tensor's first and last element is copied, too. If that is far more than
    the tensor (see ``_spreads_far``), the copy is dense. Gradients flow through a dense copy only.
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
    return needs_history or _spreads_far(tensor)


def span(tensor: Tensor) -> int:
    """How many elements lie from the tensor's first to its last one in memory."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _spreads_far(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie over more than 16 MiB and more than eight times its size, as
    a column of a large table, so that a copy with its gaps would waste memory."""
    length = span(tensor)
    return length > _MOST_SPREAD * tensor.numel() and (
        length * tensor.element_size() > _ALWAYS_SPREAD_BYTES
    )


def give_memory(tensor: Tensor, values: Tensor) -> None:
    """Let a tensor have other values, in the memory in which these lie, on whichever device.

    It stays the object that it is, with its class, attributes and hooks, and whether it is trained.
    A gradient on another device than the values must be taken away before.
    """
    if torch._has_compatible_shallow_copy_type(tensor, values):
        tensor.data = values
        return
    if tensor.requires_grad and tensor.is_leaf:
        _refuse_backwards(tensor, values.device)
    # Values that have a count of versions of their own, as under ``.data``.
    other = values.data.requires_grad_(tensor.requires_grad)
    # ``swap_tensors`` of torch would also refuse what has weak references, as all weights of
    # recurrent layers have.
    torch._C._swap_tensor_impl(tensor, other)
    # Autograd calls hooks by what was exchanged; setting them tells it.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def _refuse_backwards(tensor: Tensor, device: torch.device) -> None:
    """Let backwards of graphs that were built up to now fail: their gradients would get lost."""
    message = (
        f"a backward ends in a parameter of shape {tuple(tensor.shape)} that has gone from "
        f"{tensor.device} to {device} since its graph was built; call backward before Penstock "
        "moves the model, or compute the loss anew"
    )

    def refuse(_: object) -> NoReturn:
        raise RunError(message)

    get_gradient_edge(tensor).node.register_prehook(refuse)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of its own with the strides of the original; gradients flow through it.

    A copy is as long as what lies between the original's first and last element. If that is more
    than 16 MiB and more than eight times its elements (a column of a memory-mapped table), or if
    the tensor has no strides, the copy is what ``clone`` gives.
    """
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
        return tensor.clone()
    if tensor.is_contiguous() or _spreads_far(tensor):
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
