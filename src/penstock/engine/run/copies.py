"""Copies of modules, for ranks of one process that run the same ones at the same time.

A copy has parameters of its own, since gradients are made in several threads at once, and
attributes of its own, since a forward may keep something in them for a while. Everything else is
the model's: buffers, and hooks, whenever they are registered.

Buffers of the model that are on another device than the copy are copied. Those are buffers of
modules that several ranks run, which no forward may write; where the copy's rank alone runs a
module, the model's own buffers are on its device.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.engine.device.crossing import moved
from penstock.engine.model.spine import NamedLayer

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"}
_HOOKS = tuple(
    name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)
)
_SHARED = ("_buffers", "_non_persistent_buffers_set", *_HOOKS)

_MISSING = object()


@dataclass
class _Pair:
    """A module of the model and its copy.

    Attributes:
        layer: the name of the layer that it belongs to.
        original: the model's.
        copied: the copy.
        then: the original's attributes when a pipeline last let go of it.
        parts: what the original consisted of when it was copied.
    """

    layer: str
    original: nn.Module
    copied: nn.Module
    then: Mapping[str, Any] = field(init=False)
    parts: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.then = _attributes(self.original)
        self.parts = _parts(self.original)


class _Copied(NamedTuple):
    """A copy of a buffer on another device; with each of them, how often it had been written."""

    original: Tensor
    original_version: int | None
    value: Tensor
    value_version: int | None

    def is_that_of(self, buffer: Tensor) -> bool:
        """Whether it still is a copy of this buffer, as far as version counters tell."""
        versions = _version(buffer), _version(self.value)
        return (
            buffer is self.original
            and None not in versions
            and versions == (self.original_version, self.value_version)
        )


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been written; ``None`` where nobody counts."""
    return None if tensor.is_inference() else tensor._version


class ModuleCopies:
    """The copies of one rank.

    Args:
        parameters: the model's, of which the rank needs copies.
        device: of the rank; buffers of the model that are elsewhere are copied to it when they have
            changed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._device = device
        self._parameters = [(parameter, _copy_of(parameter)) for parameter in parameters]
        self._pairs: list[_Pair] = []
        self._roots: list[nn.Module] = []
        self._copied: dict[int, _Copied] = {}

    @property
    def divided(self) -> frozenset[int]:
        """The ids of those of the model's tensors of which the rank has parts only."""
        return frozenset()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Copies of layers."""
        return tuple(self._roots)

    def of(self, layer: NamedLayer) -> nn.Module:
        """The copy of a layer's module.

        Raises:
            ModelError: it cannot be copied.
        """
        originals = [*layer.module.modules()]
        try:
            copied: nn.Module = copy.deepcopy(layer.module, self._memo(originals))
        except Exception as error:
            raise ModelError(
                f"layer {layer.name!r} must be copied, since several ranks run it, but that fails "
                f"({type(error).__name__}: {error}); let copy.deepcopy work on it, use processes "
                "(torchrun), or choose a schedule or cuts that leave it on one rank"
            ) from error
        self._roots.append(copied)
        known = {id(pair.original) for pair in self._pairs}
        pairs = [
            _Pair(layer.name, theirs, ours)
            for theirs, ours in zip(originals, copied.modules(), strict=True)
            if id(theirs) not in known
        ]
        self._pairs += pairs
        self._share(pairs)
        return copied

    def share(self) -> None:
        """Let copies have what the model's own modules have now."""
        self._share(self._pairs)
        held = {id(buffer) for pair in self._pairs for buffer in pair.original._buffers.values()}
        self._copied = {key: copied for key, copied in self._copied.items() if key in held}

    def follow(self) -> None:
        """Let copies follow what the caller has done to the model since ``let_go``: training mode,
        attributes, hooks, what is frozen, and weights that were loaded or changed by hand.

        Raises:
            ModelError: a module has got other parameters or modules, or an attribute that cannot be
                copied.
        """
        if not self._pairs and not self._parameters:
            return  # what follows takes time even where there is nothing to do
        self._follow_attributes()
        self.share()
        with torch.no_grad():
            for parameter, own in self._parameters:
                _follow(parameter, own)

    def let_go(self) -> None:
        """The caller may change the model from now on."""
        for pair in self._pairs:
            pair.then = _attributes(pair.original)

    def _follow_attributes(self) -> None:
        for pair in self._pairs:
            if _parts(pair.original) != pair.parts:
                raise ModelError(
                    f"layer {pair.layer!r} has got other modules or parameters since the Pipeline "
                    "was built; change the model before, or build a new Pipeline"
                )
            ours, now = vars(pair.copied), _attributes(pair.original)
            ours["training"] = pair.original.training
            for name in pair.then.keys() - now.keys():
                ours.pop(name, None)
            for name, value in now.items():
                if pair.then.get(name, _MISSING) is not value:
                    ours[name] = self._own(value, f"attribute {name!r} of layer {pair.layer!r}")

    def _own(self, value: Any, which: str) -> Any:
        if isinstance(value, Tensor) and not value.is_leaf:
            return value
        try:
            return copy.deepcopy(value, self._memo(pair.original for pair in self._pairs))
        except Exception as error:
            raise ModelError(
                f"the {which} has changed, and cannot be copied to where another rank runs the "
                f"layer ({type(error).__name__}: {error}); change it before the Pipeline is built"
            ) from error

    def _memo(self, originals: Iterable[nn.Module]) -> dict[int, Any]:
        """A memo for ``copy.deepcopy`` of things not to copy: those that copies share with these
        modules, and those of which there is a copy already."""
        return {
            **{id(kept): kept for module in originals for kept in _shared(module)},
            **{id(pair.original): pair.copied for pair in self._pairs},
            **{id(theirs): ours for theirs, ours in self._parameters},
        }

    def _share(self, pairs: Iterable[_Pair]) -> None:
        """Give copies the buffers and hooks that the originals have now."""
        copies = {id(pair.original): pair.copied for pair in self._pairs}
        own = partial(_hook_of_copy, copies)
        for pair in pairs:
            theirs, ours = vars(pair.original), vars(pair.copied)
            for name in _SHARED:
                if name in theirs:
                    ours[name] = theirs[name]
            if any(map(self._is_elsewhere, theirs["_buffers"].values())):
                ours["_buffers"] = {
                    name: self._here(buffer) if self._is_elsewhere(buffer) else buffer
                    for name, buffer in theirs["_buffers"].items()
                }
            for name in _HOOKS:
                if theirs.get(name):
                    ours[name] = _hooks_of_copy(theirs[name], own)

    def _is_elsewhere(self, buffer: Tensor | None) -> bool:
        return buffer is not None and buffer.device != self._device

    def _here(self, buffer: Tensor) -> Tensor:
        """A copy of a buffer on the rank's device; the last one, unless either has changed."""
        copied = self._copied.get(id(buffer))
        if copied is None or not copied.is_that_of(buffer):
            there = moved(buffer, self._device)
            copied = self._copied[id(buffer)] = _Copied(
                buffer, _version(buffer), there, _version(there)
            )
        return copied.value


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    own = copy.deepcopy(parameter, {})
    # What optimizers may be told by it, such as that it shall not decay.
    vars(own).update(vars(parameter))
    _follow_hooks(parameter, own)
    return own


def _follow(parameter: nn.Parameter, own: nn.Parameter) -> None:
    if (own.shape, own.dtype) != (parameter.shape, parameter.dtype):
        own.data = parameter.detach().to(own.device, copy=True)
    # Always: a change through ``.data`` leaves no trace.
    own.copy_(parameter)
    own.requires_grad = parameter.requires_grad
    _follow_hooks(parameter, own)


def _follow_hooks(parameter: nn.Parameter, own: nn.Parameter) -> None:
    if own._backward_hooks is not parameter._backward_hooks:
        own._backward_hooks = parameter._backward_hooks


def _shared(module: nn.Module) -> Iterator[Any]:
    """Objects that a module and its copy both have; parameters only if the copy's rank alone uses
    them."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for name, value in vars(module).items():
        # torch refuses to copy tensors that were computed; the next forward computes them anew.
        if name in _SHARED or (isinstance(value, Tensor) and not value.is_leaf):
            yield value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _parts(module: nn.Module) -> tuple[Any, ...]:
    held = (*module._parameters.items(), *module._modules.items())
    return type(module), *((name, id(value)) for name, value in held)


def _hooks_of_copy(hooks: dict[int, Any], own: Callable[[Any], Any]) -> dict[int, Any]:
    """The hooks themselves, so that both modules have what is added or removed at any time; a
    dictionary of its own if the copy needs other ones."""
    mapped = OrderedDict((number, own(hook)) for number, hook in hooks.items())
    return hooks if all(mapped[number] is hook for number, hook in hooks.items()) else mapped


def _hook_of_copy(copies: Mapping[int, nn.Module], hook: Any) -> Any:
    """The same hook, of the copy if it is a method of the original."""
    if isinstance(hook, MethodType) and id(hook.__self__) in copies:
        return MethodType(hook.__func__, copies[id(hook.__self__)])
    if isinstance(hook, partial):
        function = _hook_of_copy(copies, hook.func)
        args = [copies.get(id(argument), argument) for argument in hook.args]
        if function is not hook.func or any(map(is_not, args, hook.args)):
            return partial(function, *args, **hook.keywords)
    return hook
