"""Gradients of shared weights as flat buffers in main memory, for those who sum plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.base.errors import RunError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""In the order in which frames count them (``summation.frames.ITEM_BYTES``)."""


class Placed(NamedTuple):
    """Where a parameter's gradient lies.

    Attributes:
        place: the parameter's number among those that are shared.
        dtype: the number of its buffer.
        start, stop: its numbers there.
    """

    place: int
    dtype: int
    start: int
    stop: int


class FlatLayout:
    """Where each gradient lies in the buffer of its type: the last parameter's first, since its
    gradient is.

    Args:
        parameters: those that are shared.
        frozen: places of those that are not trained.

    Raises:
        RunError: a parameter has numbers that nobody sums so.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], frozen: Sequence[int]) -> None:
        self.counts = [0] * len(DTYPES)
        self.placed: list[Placed] = []
        for place, parameter in reversed([*enumerate(parameters)]):
            if place in frozen:
                continue
            if parameter.dtype not in DTYPES:
                raise RunError(
                    f"gradients of type {parameter.dtype} can't be summed so; plan with "
                    "reducer='owners'"
                )
            dtype = DTYPES.index(parameter.dtype)
            start = self.counts[dtype]
            self.counts[dtype] = start + parameter.numel()
            self.placed.append(Placed(place, dtype, start, self.counts[dtype]))


class FlatBuffers:
    """A buffer for each type of number that a layout has."""

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self.tensors = {
            dtype: torch.empty(count, dtype=DTYPES[dtype])
            for dtype, count in enumerate(layout.counts)
            if count
        }

    @cached_property
    def numbers(self) -> dict[int, NDArray[Any]]:
        """The same memory for numpy, which takes bfloat16 for 16 bits."""
        return {dtype: _as_numbers(tensor) for dtype, tensor in self.tensors.items()}

    def copy(self, placed: Placed, parameters: Sequence[nn.Parameter]) -> bool:
        """Copy one parameter's gradient in.

        Returns:
            Whether it has one. Otherwise there stands −0, which changes no sum: x + −0 is x, and
            where nobody has one, nobody looks at the sum.

        Raises:
            RunError: the gradient is sparse.
        """
        place, dtype, start, stop = placed
        gradient = parameters[place].grad
        if start == stop:
            return gradient is not None
        room = self.tensors[dtype][start:stop]
        if gradient is None:
            room.fill_(-0.0)
            return False
        if gradient.layout is not torch.strided:
            raise RunError("sparse gradients can't be summed between processes; use sparse=False")
        room.copy_(gradient.detach().reshape(-1))
        return True

    def put(self, parameters: Sequence[nn.Parameter], absent: frozenset[int], divisor: int) -> None:
        """Make sums the parameters' gradients.

        Args:
            absent: places of parameters for which nobody had a gradient.
            divisor: what sums are divided by.
        """
        if divisor > 1:
            for tensor in self.tensors.values():
                tensor.div_(divisor)
        for place, dtype, start, stop in self._layout.placed:
            parameter = parameters[place]
            if place in absent:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter.detach())
            if start < stop:
                shaped = self.tensors[dtype][start:stop].view(parameter.shape)
                parameter.grad.detach().copy_(shaped)


def _as_numbers(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    numbers: NDArray[Any] = tensor.numpy()
    return numbers
