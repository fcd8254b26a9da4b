"""What a caller gives, copied for the ranks that compute with it.

A first layer may work in place, and a loader may use the same memory for its next batch: neither
must reach the other. So every microbatch is copied when the caller gives it, once: in main memory
where it stays there, or straight to the device of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import StageError
from penstock.engine.device.accelerators import is_on_host
from penstock.engine.device.crossing import copy_of, moved
from penstock.engine.device.queue import Landing
from penstock.engine.model import tree


class Giver:
    """Copies microbatches where they are."""

    def given(self, value: Any) -> tuple[Any, torch.Event | None]:
        """A microbatch (or slice) as a rank gets it, and when it is there: ``None`` if it is, or if
        it is behind what the caller has asked of its device.

        Raises:
            StageError: there is no memory for it.
        """
        return _replaced(copy_of, value), None

    def settle(self) -> None:
        """Return when the caller may overwrite all that was given."""


class DeviceGiver(Giver):
    """Copies microbatches to a device.

    Args:
        device: of the ranks that compute with them.
        told: how errors name these ranks' stage and what it is given.
    """

    def __init__(self, device: torch.device, told: str) -> None:
        self._device = device
        self._landing = None if is_on_host(device) else Landing(device)
        self._told = told

    def given(self, value: Any) -> tuple[Any, torch.Event | None]:
        try:
            here = _replaced(self._copied, value)
        except torch.OutOfMemoryError as error:
            raise StageError(f"{self._told}: {type(error).__name__}: {error}") from error
        return here, None if self._landing is None else self._landing.moment()

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device != self._device:
            landing = self._landing
            return moved(tensor, self._device) if landing is None else landing.landed(tensor)
        # On an accelerator by the caller's own stream, behind which ranks begin a minibatch.
        return copy_of(tensor)

    def settle(self) -> None:
        if self._landing is not None:
            self._landing.settle()


def _replaced(copied: Callable[[Tensor], Tensor], value: Any) -> Any:
    if not torch.is_inference_mode_enabled():
        return tree.replace(Tensor, copied, value)
    # A copy made in inference mode could not be used for training.
    with torch.inference_mode(False):
        return tree.replace(Tensor, copied, value)
