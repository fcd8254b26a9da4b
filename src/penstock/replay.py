"""Running modules a second time as if it were the first.

Recomputing activations repeats a forward. What the first run changed must not change twice (the
running statistics of a BatchNorm, the number of batches it saw), and what it read must be read
again as it was: buffers that are updated and used (the vectors of a spectral norm), and autocast.

What a module keeps elsewhere, in plain attributes, is not protected. Nor does a second run see the
old value of a buffer that its own first run left alone and that of another microbatch has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from penstock import tree
from penstock.errors import InputError

_DEVICES = ("cpu", "cuda")

Run = Callable[[Any, dict[str, Any]], tuple[Any, bool, dict[str, Any]]]
"""From a layer's input and the skips it recalls to its output, whether it drew, what it stashes."""


@dataclass
class Past:
    """What a second run needs of the first.

    Attributes:
        buffers: (module, name, value before) of those that the first run changed.
        autocast: per device: on or off, and its dtype.
    """

    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)


SavedBuffer = tuple[nn.Module, str, Tensor, Tensor]
"""Where a buffer is, the buffer, and its value then."""


def saved_buffers(modules: Iterable[nn.Module]) -> list[SavedBuffer]:
    """The buffers of modules (of each alone, not of those inside) and copies of their values. By
    name, since a layer may put a new tensor in the place of its buffer."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]


def put_back(buffers: Iterable[SavedBuffer]) -> None:
    """Give modules back their buffers, with the values that were saved."""
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            setattr(module, name, buffer.copy_(before))


@contextmanager
def remembering(modules: Sequence[nn.Module]) -> Iterator[Past]:
    """The first run of modules. When it ends, the yielded value is complete.

    Of the buffers only those are kept that the run changed: it put another tensor in their place,
    or other numbers into them (batch norm does so without counting a version).
    """
    past = Past(
        autocast=[
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _DEVICES
        ]
    )
    before = saved_buffers(modules)
    yield past
    past.buffers = [
        (module, name, value)
        for module, name, buffer, value in before
        if getattr(module, name, None) is not buffer or not torch.equal(buffer, value)
    ]


@contextmanager
def repeating(past: Past) -> Iterator[None]:
    """The second run: modules see copies of their buffers as they were before the first run."""
    now = [(module, name, getattr(module, name)) for module, name, _ in past.buffers]
    with ExitStack() as stack:
        for device, enabled, dtype in past.autocast:
            stack.enter_context(torch.autocast(device, dtype, enabled))
        try:
            for module, name, value in past.buffers:
                setattr(module, name, value.clone())
            yield
        finally:
            for module, name, buffer in now:
                setattr(module, name, buffer)


@contextmanager
def first_run_only(modules: Sequence[nn.Module]) -> Iterator[Past]:
    """A first run of which nothing is kept but what it gives.

    Grad mode stays on, so that every layer and kernel does exactly what it will do in the second.
    """
    with remembering(modules) as past, saved_tensors_hooks(_drop, _refuse):
        yield past


def recomputed(module: nn.Module, run: Run) -> Run:
    """A layer that keeps its input only, and runs again when its backward comes.

    Args:
        module: what ``run`` runs.
        run: does the same when it is called again.
    """
    modules = tuple(module.modules())
    pasts: list[Past] = []

    def first_or_again(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        # The layer may overwrite its input.
        value, recalled = tree.replace(Tensor, Tensor.clone, (value, recalled))
        if pasts:
            with repeating(pasts[0]):
                return run(value, recalled)
        with remembering(modules) as past:
            result = run(value, recalled)
        pasts.append(past)
        return result

    def kept(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        result: tuple[Any, bool, dict[str, Any]] = checkpoint(
            first_or_again, value, recalled, use_reentrant=False, preserve_rng_state=False
        )
        return result

    return kept


def _drop(tensor: Tensor) -> None:
    """Saves nothing for a backward."""


def _refuse(nothing: None) -> Tensor:
    raise InputError(
        "a layer went backward inside its forward, which is kept as its input only; do not "
        "recompute the stage that holds it"
    )
