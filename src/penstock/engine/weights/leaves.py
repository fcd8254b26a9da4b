"""Other tensors in the place of a model's parameters, for the time of a pass.

Nothing is copied: the dictionaries in which modules keep their parameters are changed and restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from penstock.base.errors import ModelError

Leaves = list[nn.Parameter]
"""One for each trained parameter."""


class _Socket(NamedTuple):
    """Where a module holds a parameter."""

    holder: dict[str, nn.Parameter | None]
    name: str
    number: int


class Sockets:
    """Where the trained parameters of some modules are held.

    Args:
        modules: each once.

    Attributes:
        live: the trained parameters, each once.

    Raises:
        ModelError: a parameter is of a class of its own, or has hooks, which leaves would not have.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self.find()

    def find(self) -> None:
        """Look again at what is trained: layers may be frozen and freed."""
        self.live: Leaves = []
        self._names: list[str] = []
        self._places: list[_Socket] = []
        numbers: dict[int, int] = {}
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue  # what never changes has one version
                _check(parameter, f"{type(module).__name__}.{name}")
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(self.live)
                    self.live.append(parameter)
                    self._names.append(f"{type(module).__name__}.{name}")
                self._places.append(_Socket(module._parameters, name, numbers[id(parameter)]))

    def leaves(self) -> Leaves:
        """Parameters of their own with the memory that the live ones have now. Each has a version
        counter of its own, so that autograd does not mind what becomes of the live one."""
        return [nn.Parameter(live.data) for live in self.live]

    @contextmanager
    def holding(self, leaves: Leaves | None) -> Iterator[None]:
        """Modules compute with the leaves; with the live parameters if there are none."""
        if leaves is None:
            yield
            return
        for holder, name, number in self._places:
            holder[name] = leaves[number]
        try:
            yield
        finally:
            for holder, name, number in self._places:
                holder[name] = self.live[number]
        for leaf, name in zip(leaves, self._names, strict=True):
            if leaf._version:
                raise ModelError(
                    f"a forward has written into {name}, of which there are several versions; do "
                    "it between streams, or choose a synchronous schedule"
                )

    @contextmanager
    def gathering(self, leaves: Leaves | None) -> Iterator[None]:
        """What is added to the gradients of leaves is added to those of the live parameters."""
        if leaves is None:
            yield
            return
        for live, leaf in zip(self.live, leaves, strict=True):
            leaf.grad, live.grad = live.grad, None
        bypassed = None
        try:
            yield
        finally:
            for live, leaf, name in zip(self.live, leaves, self._names, strict=True):
                bypassed = name if live.grad is not None else bypassed
                live.grad, leaf.grad = leaf.grad, None
        if bypassed is not None:
            raise ModelError(
                f"a layer computes with {bypassed} through a reference of its own, so that it does "
                "not see the version that it should; read it as an attribute of its module, or "
                "choose a synchronous schedule"
            )


def _check(parameter: nn.Parameter, name: str) -> None:
    """Raise ``ModelError`` where leaves could not stand for a parameter."""
    if type(parameter) is not nn.Parameter:
        raise ModelError(
            f"{name} is a {type(parameter).__name__}; only plain parameters can have versions, so "
            "choose a synchronous schedule"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ModelError(
            f"{name} has hooks, which would not see the gradients of its versions; remove them, or "
            "choose a synchronous schedule"
        )
