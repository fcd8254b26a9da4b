"""Where gradients of a stage that comes and goes are added up: in one buffer, as its weights lie.

Autograd makes a tensor for each weight and microbatch, and frees it once it is added. Where freed
memory goes back to the system at once, as a budget demands, all of its pages are new each time, and
in virtual machines a new page costs more than what is computed with it. So whoever knows how a
gradient is computed asks here where to write it: the first one goes where it stays, the others, one
after the other, into a piece of memory that all of a rank's stages share.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.core.schedule.residence import whole_pages
from penstock.engine.masters import gradient_dtype
from penstock.engine.weights.buffers import MemoryBuffer, SwapGroup, TensorPlace

_LEAST_SHARE = 0.75
"""Of a stage's bytes whose gradients can be written anywhere; others are made first, and copied."""


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class SpareGradient:
    """Memory for one gradient at a time, as large as the largest so far. It takes the place of what
    autograd would make for as long, so it counts as little as that."""

    def __init__(self) -> None:
        self._buffer: MemoryBuffer | None = None

    def like(self, weight: Tensor) -> Tensor:
        """Memory for a gradient of this weight, with anything in it."""
        size = whole_pages(_bytes_of([weight]))
        if self._buffer is None or self._buffer.num_bytes < size:
            self._buffer = MemoryBuffer(size)
        return self._buffer.tensor(0, weight.dtype, weight.size(), weight.stride())

    def free(self) -> None:
        """Give the memory back."""
        self._buffer = None


class GradientSlots:
    """Where gradients of one stage's weights are added up.

    Args:
        weights: those that are trained; their gradients lie in a buffer as they do in theirs.
        spare: for gradients that are added to others.

    Attributes:
        buffer: has the gradients, as long as they are being added up there.
    """

    def __init__(self, weights: SwapGroup, spare: SpareGradient) -> None:
        self.buffer: MemoryBuffer | None = None
        self._places = {id(place.tensor): place for place in weights.places}
        self._spare = spare

    @classmethod
    def of(
        cls, weights: SwapGroup, modules: Iterable[nn.Module], spare: SpareGradient
    ) -> GradientSlots | None:
        """The slots of a stage, if most of its gradients can be written anywhere.

        Args:
            modules: all that the stage consists of.
        """
        linear = {id(own._parameters["weight"]) for own in modules if type(own) is nn.Linear}
        written = [
            place.tensor
            for place in weights.places
            if id(place.tensor) in linear and place.stride == (place.size[1], 1)
        ]
        enough = _bytes_of(written) >= _LEAST_SHARE * _bytes_of(weights.tensors)
        return cls(weights, spare) if enough else None

    @property
    def fit(self) -> bool:
        """Whether gradients are as large as their weights: an optimizer may want larger ones."""
        weights = (place.tensor for place in self._places.values())
        return all(gradient_dtype(weight) is weight.dtype for weight in weights)

    def memory_for(self, weight: Tensor) -> Tensor | None:
        """Where the next gradient of a weight is to be written: where it stays, if it is the first;
        ``None`` if that is not known here."""
        place = self._places.get(id(weight))
        if place is None:
            return None
        if weight.grad is not None:
            return self._spare.like(weight)
        return None if self.buffer is None else self._slot(self.buffer, place)

    @staticmethod
    def _slot(buffer: MemoryBuffer, place: TensorPlace) -> Tensor:
        return buffer.tensor(place.offset, place.tensor.dtype, place.size, place.stride)

    def gather(self) -> None:
        """Move gradients that somebody else has made to where they are added up from now on."""
        if self.buffer is None:
            return
        with torch.no_grad():
            for place in self._places.values():
                gradient = place.tensor.grad
                if gradient is None or gradient.data_ptr() == self.buffer.start + place.offset:
                    continue
                slot = self._slot(self.buffer, place)
                place.tensor.grad = slot.copy_(gradient)

    def hand_over(self, gradients: SwapGroup) -> bool:
        """Let a group have the buffer, if its tensors are the gradients in it, and all of them;
        whether they are."""
        buffer = self.buffer
        if buffer is None or buffer.num_bytes < gradients.num_bytes or not gradients.is_in(buffer):
            return False
        gradients.buffer, self.buffer = buffer, None
        return True
