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


def in_turn(runs: Sequence[Run]) -> Run:
    """Layers one after the other as one; where they are several, none recalls or stashes."""
    if len(runs) == 1:
        return runs[0]

    def run(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        drew = False
        for one in runs:
            value, drew_too, _ = one(value, {})
            drew = drew or drew_too
        return value, drew, {}

    return run


def recomputed(modules: Sequence[nn.Module], run: Run, kept: dict[int, Tensor]) -> Run:
    """Layers that keep only what they are given, and run again when their backward comes.

    What they hand on as it was given to them stays the same tensor, not a copy. Whoever comes
    next must not overwrite it; these layers themselves work on a copy of what they are given.

    Args:
        modules: what ``run`` runs.
        run: does the same when it is called again.
        kept: told what is kept, by ``id``.
    """
    every = tuple({id(one): one for module in modules for one in module.modules()}.values())

    def run_now_and_later(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        leaves, structure = tree.flatten((value, recalled))
        kept.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, Tensor))
        pasts: list[Past] = []

        def first_or_again(*given: Any) -> tuple[tuple[Any, bool, dict[str, Any]], dict[int, int]]:
            # The layer may overwrite its input.
            own = [one.clone() if isinstance(one, Tensor) else one for one in given]
            versions = _versions(own)
            if pasts:
                with repeating(pasts[0]):
                    result = run(*tree.unflatten(list(own), structure))
            else:
                with remembering(every) as past:
                    result = run(*tree.unflatten(list(own), structure))
                pasts.append(past)
            now = _versions(own)
            return result, {id(own[at]): at for at in now if now[at] == versions[at]}

        # One by one: what a tuple hides, is kept behind the back of those who watch autograd.
        (output, drew, stashed), as_given = checkpoint(
            first_or_again, *leaves, use_reentrant=False, preserve_rng_state=False
        )

        def original(tensor: Tensor) -> Tensor:
            at = as_given.get(id(tensor))
            return tensor if at is None else leaves[at]

        return tree.replace(Tensor, original, output), drew, stashed

    return run_now_and_later


def _versions(values: Sequence[Any]) -> dict[int, int]:
    """How often each of the tensors among these has been overwritten, by place."""
    return {at: one._version for at, one in enumerate(values) if isinstance(one, Tensor)}


def _drop(tensor: Tensor) -> None:
    """Saves nothing for a backward."""


def _refuse(nothing: None) -> Tensor:
    raise InputError(
        "a layer went backward inside its forward, which is kept as its input only; do not "
        "recompute the stage that holds it"
    )
