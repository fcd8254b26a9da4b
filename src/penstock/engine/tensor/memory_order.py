"""In which order the dimensions of a value lie in memory, kept where members hand values around.

Dropout draws in the order of memory, and kernels are chosen by it: what has been divided or put
together must lie as the whole value does on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def memory_order(value: Tensor) -> list[int]:
    """The dimensions, the outermost in memory first.

    A dimension of one number tells nothing of its place beside another with the same stride, except
    that it is the inner one.
    """
    strides, sizes = [*value.stride()], [*value.shape]
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))


def put_back(value: Tensor, order: Sequence[int]) -> Tensor:
    """What has the dimensions of ``permute(order)``, in the places where they were."""
    places = [order.index(dim) for dim in range(len(order))]
    # A view could not be overwritten where a function of autograd gives it.
    return value if places == sorted(places) else value.permute(places).detach()


def dense_copy(value: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """A copy without gaps, of which the dimensions lie in an order; by default in that of the
    value."""
    order = memory_order(value) if order is None else [*order]
    return put_back(value.permute(order).clone(memory_format=torch.contiguous_format), order)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts one behind another along a dimension, lying as the first one does, which is the largest
    and the same for all who join them."""
    order = memory_order(parts[0])
    return put_back(torch.cat([part.permute(order) for part in parts], order.index(dim)), order)
