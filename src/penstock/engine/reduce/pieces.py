"""Gradients in pieces: cut from parameters, added up, and put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.engine.reduce.slices import OwnedPiece

Pieces = list[Tensor | None]
"""Of each piece of a slice, its numbers; ``None`` where its parameter has no gradient."""


def vector_of(gradient: Tensor | None) -> Tensor | None:
    """A gradient as a vector, without copying where that is possible. What is not dense stays as it
    is: threads can hand it over, and nobody else can."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    return gradient.detach().reshape(-1)


def cut(vector: Tensor | None, piece: OwnedPiece) -> Tensor | None:
    """A piece of a gradient; what is not dense goes whole, as its first piece."""
    if vector is None or vector.layout is torch.strided:
        return None if vector is None else vector[piece.start : piece.stop]
    return vector if piece.start == 0 else None


def added(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, in their order; ``None`` if none is. It is in memory of its
    own: between threads, others read the same tensors."""
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) < 2:
        return there[0].clone() if there else None
    total = torch.add(there[0], there[1])
    for gradient in there[2:]:
        total.add_(gradient)
    return total


def room_for(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A vector for a sum: the memory of the gradient that it replaces, if it is one."""
    gradient = parameter.grad
    if gradient is not None and gradient.is_contiguous():
        return gradient.detach().view(-1)
    return torch.empty(parameter.numel(), dtype=dtype, device=parameter.device)


def keep(vector: Tensor, parameter: nn.Parameter) -> None:
    """Make a sum the gradient, unless it is in its memory already; the order in memory stays."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_contiguous():
        like = parameter.detach() if gradient is None else gradient
        shaped = vector.view(like.shape)
        parameter.grad = torch.empty_like(like, dtype=vector.dtype).copy_(shaped)
