"""Whether what a stage makes is finite, looked at before any weight learns from it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.engine.device.accelerators import is_on_host

REMEDY = "Lower the learning rate, clip gradients, or look at this minibatch"


class NotFinite(ArithmeticError):
    """A value or a gradient is infinite, or not a number.

    Args:
        microbatch: the one whose graph it has come through.
        name: what it is.
        value: the number that it has.
    """

    def __init__(self, microbatch: int, name: str, value: complex) -> None:
        super().__init__(
            f"{name} is {value}; nothing has been learned through it. {REMEDY}; what is meant to "
            "be infinite, such as a mask, is given without requires_grad, or with stop_at_nan=False"
        )
        self.microbatch = microbatch


def check_finite(microbatch: int, name: str, tensors: Iterable[Tensor | None]) -> None:
    """Look at tensors in main memory; on an accelerator the host would have to wait for them.

    Raises:
        NotFinite: one of them holds what is infinite or not a number; arguments as for it.
    """
    for tensor in tensors:
        if tensor is not None and (value := _not_finite(tensor)) is not None:
            raise NotFinite(microbatch, name, value)


def _not_finite(tensor: Tensor) -> complex | None:
    """The first such number in a tensor."""
    has_some = tensor.is_floating_point() or tensor.is_complex()
    if not has_some or not is_on_host(tensor.device):
        return None
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    values = values.detach()
    # A sum is read off in one pass; of large numbers it may be infinite, and they are not.
    if bool(values.sum().isfinite()):
        return None
    wrong = values[~values.isfinite()]
    return wrong[0].item() if wrong.numel() else None
