"""Running modules a second time as if it were the first, and autocast, which is part of that.

Recomputing activations repeats a forward. What the first run changed must not change twice (the
running statistics of a BatchNorm, the number of batches it saw), and what it read must be read
again as it was: buffers that are updated and used (the vectors of a spectral norm), and autocast.

Several modules may hold one buffer: a layer of a captured model holds what its code writes, beside
the module inside that the buffer belongs to. They are given the same copy, or what one writes the
other would not read.

A buffer may also be read by some layers and overwritten by others, for another microbatch, before
the second run. Whoever overwrites it has its old value and leaves that to those that have read it.

What a module keeps elsewhere, in plain attributes, is not protected.

Autocast remembers the copies of weights that it has made: in one place for the whole process, all
of which any thread forgets that leaves autocast. A weight that a forward uses several times, as
those of recurrent layers are, would then be copied anew in the middle of it, and its gradients be
summed in another order. So in a process, forwards under autocast take turns. Where ranks wait for
each other within a forward, as the members of a group do, they cannot take turns: they remember no
casts instead, and a weight that is used twice is cast twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from penstock.base.errors import InputError
from penstock.engine.device.accelerators import device_kinds
from penstock.engine.device.crossing import copy_of
from penstock.engine.model import tree

_TURN = threading.RLock()  # a backward under autocast may run forwards again


def autocast_here() -> dict[str, torch.dtype]:
    """Device types for which this thread has autocast on, and the dtype of each."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in device_kinds()
        if torch.is_autocast_enabled(device)
    }


@contextmanager
def remembering_no_casts() -> Iterator[None]:
    """A context in which this thread's forwards under autocast take no turns."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def autocasting(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """A context with autocast on for some device types and off for all others. Only where it is on
    does one wait for a turn, and weights are cast anew.

    Args:
        dtypes: by device type, what to cast to.
    """
    here = autocast_here()
    if not dtypes and not here:
        yield
        return
    # Within another region, switching off and back again forgets nothing: that needs no turn.
    takes_turns = dtypes and torch.is_autocast_cache_enabled()
    with _TURN if takes_turns else nullcontext(), ExitStack() as stack:
        for device in here.keys() - dtypes.keys():
            stack.enter_context(torch.autocast(device, enabled=False))
        for device, dtype in dtypes.items():
            stack.enter_context(torch.autocast(device, dtype))
        if dtypes:
            # Within the caller's region, which may last for many updates, nothing would be
            # forgotten, and forwards would go on with casts of old weights.
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
        yield


Run = Callable[[Any, dict[str, Any]], tuple[Any, bool, dict[str, Any]]]
"""From a layer's input and the skips it recalls to (output, whether it drew, stashed skips)."""


@dataclass
class Former:
    """The value that a buffer had; ``None`` as long as it still has it."""

    value: Tensor | None = None


class Formers:
    """Keeps what buffers were before first runs changed them, for those that read them then."""

    def __init__(self) -> None:
        self._unchanged = WeakIdKeyDictionary()

    def read(self, buffer: Tensor) -> Former:
        """A note for whoever reads a buffer, to find its value later."""
        if buffer not in self._unchanged:
            self._unchanged[buffer] = Former()
        former: Former = self._unchanged[buffer]
        return former

    def changed(self, buffer: Tensor, value: Tensor) -> None:
        """Tell those who have read a buffer what it was."""
        self.read(buffer).value = value
        del self._unchanged[buffer]


@dataclass
class Past:
    """The circumstances of a first run, for the second.

    Attributes:
        buffers: (module, name, value before) of each; a buffer that several modules hold has one
            value.
        autocast: device types for which autocast was on, with their dtypes.
    """

    buffers: list[tuple[nn.Module, str, Former]] = field(default_factory=list)
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)


SavedBuffer = tuple[nn.Module, str, Tensor, Tensor]
"""(module, name, buffer, a copy of its value); one copy for all places of a buffer."""


def saved_buffers(modules: Iterable[nn.Module]) -> list[SavedBuffer]:
    """The buffers of modules, not of those inside them, with copies of their values.

    They are kept by name, since a layer may put a new tensor in the place of its buffer.
    """
    held = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    values = _copies(buffer for _, _, buffer in held)
    return [(module, name, buffer, values[id(buffer)]) for module, name, buffer in held]


def _copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A copy of each tensor, by the original's ``id``."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return {key: copy_of(tensor.detach()) for key, tensor in distinct.items()}


def put_back(buffers: Iterable[SavedBuffer]) -> None:
    """Give modules back their buffers, with the values that were saved."""
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            if not torch.equal(buffer, before):  # other ranks may read it just now
                buffer.copy_(before)
            setattr(module, name, buffer)


@contextmanager
def remembering(modules: Sequence[nn.Module], formers: Formers) -> Iterator[Past]:
    """A context for the first run of modules; the yielded value is complete when it ends.

    Copies are kept only of buffers that the run changed: it put another tensor in their place, or
    other numbers into them (batch norm does so without counting a version).

    Args:
        modules: all whose buffers may be read or changed.
        formers: the same for all runs that may change what others read.
    """
    past = Past(autocast=autocast_here())
    before = saved_buffers(modules)
    yield past
    past.buffers = [(module, name, formers.read(buffer)) for module, name, buffer, _ in before]
    changed = {
        id(buffer): (buffer, value)
        for module, name, buffer, value in before
        if getattr(module, name, None) is not buffer or not torch.equal(buffer, value)
    }
    for buffer, value in changed.values():
        formers.changed(buffer, value)


@contextmanager
def repeating(past: Past, formers: Formers) -> Iterator[None]:
    """A context for the second run: modules see copies of their buffers from before the first.

    Args:
        past: what ``remembering`` yielded.
        formers: as in ``remembering``; layers that will run a third time read what copies were.
    """
    then = [
        (module, name, former.value)
        for module, name, former in past.buffers
        if former.value is not None
    ]
    now = [(module, name, getattr(module, name)) for module, name, _ in then]
    with autocasting(past.autocast):
        copies = _copies(value for _, _, value in then)
        try:
            for module, name, value in then:
                setattr(module, name, copies[id(value)])
            yield
        finally:
            for module, name, buffer in now:
                setattr(module, name, buffer)
            for copied in copies.values():
                formers.changed(copied, copied)


@contextmanager
def first_run_only(modules: Sequence[nn.Module], formers: Formers) -> Iterator[Past]:
    """A context for a first run of which only the output is kept; arguments as in ``remembering``.

    Grad mode stays on, so that every layer and kernel does exactly what it will do in the second.
    """
    with remembering(modules, formers) as past, saved_tensors_hooks(_drop, _refuse):
        yield past


def in_turn(runs: Sequence[Run]) -> Run:
    """Layers one after the other as one function; of several, none may recall or stash skips."""
    if len(runs) == 1:
        return runs[0]

    def run_all(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        drew = False
        for run in runs:
            value, drew_too, _ = run(value, {})
            drew = drew or drew_too
        return value, drew, {}

    return run_all


def recomputed(
    modules: Sequence[nn.Module], run: Run, kept: dict[int, Tensor], formers: Formers
) -> Run:
    """Make a run that keeps only what layers are given, and repeats them for their backward.

    What they hand on as it was given to them stays the same tensor, not a copy. Whoever comes
    next must not overwrite it; these layers themselves work on a copy of what they are given.

    Args:
        modules: the modules that ``run`` runs.
        run: does the same when it is called again.
        kept: the tensors that are kept are added to it, by ``id``.
        formers: the same for all runs that may change what others read.
    """
    inside = (inner for module in modules for inner in module.modules())
    every = tuple({id(module): module for module in inside}.values())

    def run_now_and_later(value: Any, recalled: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        leaves, structure = tree.flatten((value, recalled))
        kept.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, Tensor))
        pasts: list[Past] = []

        def first_or_again(*given: Any) -> tuple[tuple[Any, bool, dict[str, Any]], dict[int, int]]:
            # The layer may overwrite its input.
            own = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
            versions = _versions(own)
            if pasts:
                with repeating(pasts[0], formers):
                    result = run(*tree.unflatten(list(own), structure))
            else:
                with remembering(every, formers) as past:
                    result = run(*tree.unflatten(list(own), structure))
                pasts.append(past)
            now = _versions(own)
            untouched = [index for index in now if now[index] == versions[index]]
            return result, {id(own[index]): index for index in untouched}

        # Leaf by leaf: what is inside a tuple would be hidden from hooks on what autograd saves.
        (output, drew, stashed), as_given = checkpoint(
            first_or_again, *leaves, use_reentrant=False, preserve_rng_state=False
        )

        def original(tensor: Tensor) -> Tensor:
            index = as_given.get(id(tensor))
            return tensor if index is None else leaves[index]

        return tree.replace(Tensor, original, output), drew, stashed

    return run_now_and_later


def _versions(values: Sequence[Any]) -> dict[int, int]:
    """How often each tensor among these values has been overwritten, by its index."""
    return {index: leaf._version for index, leaf in enumerate(values) if isinstance(leaf, Tensor)}


def _drop(tensor: Tensor) -> None:
    """Save nothing for a backward."""


def _refuse(nothing: None) -> Tensor:
    raise InputError(
        "a layer went backward inside its forward, which is kept as its input only; do not "
        "recompute the stage that holds it"
    )
