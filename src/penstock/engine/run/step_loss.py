"""The loss that a step gives back: a number, whose gradients have been computed already."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import InputError


class StepLoss(Tensor):
    """A scalar that is as any other, but says what to do to whoever wants to go backward from it.

    Copies and pickles of it are plain tensors, and so is what is computed from it, except for what
    ``loss / 4`` and ``scaler.scale(loss)`` make, from which people go backward, too.
    """

    # What is computed from it is a plain tensor, at the speed of one.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, loss: Tensor | None) -> StepLoss | None:
        """A loss with the sentence; ``None`` stays ``None``."""
        return None if loss is None else loss.detach().as_subclass(cls)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to go backward.

        Raises:
            InputError: always; it says where gradients are made.
        """
        raise InputError(
            "loss.backward() has nothing to do: pipeline.step(…) has gone backward already, and "
            "updated the weights if the pipeline has an optimizer. Leave out loss.backward(), "
            "optimizer.step() and optimizer.zero_grad(); to accumulate gradients over n calls, "
            "write pipeline.step(…, update=False, share=1/n)"
        )

    def __mul__(self, other: Any) -> Any:
        return _still(super().__mul__(other))

    def __rmul__(self, other: Any) -> Any:
        return _still(super().__rmul__(other))

    def __truediv__(self, other: Any) -> Any:
        return _still(super().__truediv__(other))

    def _plainly(self) -> Tensor:
        return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plainly())

    def __format__(self, format_spec: str) -> str:
        return format(self._plainly(), format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plainly().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._plainly(), memo)


def _still(value: Any) -> Any:
    """A loss times a number is a loss; with a gradient of its own, it may go backward."""
    if not isinstance(value, Tensor) or value.requires_grad or value.dim():
        return value
    return value.as_subclass(StepLoss)
