"""Taking back an update: weights, gradients and the optimizer as they were, to the bit.

``load_state_dict`` would not do: it casts state to the dtype of its parameter, so master weights in
float32 over parameters in bfloat16 would come back rounded. Here tensors get their values back in
place, and lists and dictionaries their items.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

GiveBack = Callable[[], Any]
"""Gives a value back as it was: the same object, with its contents of then."""


class Undo:
    """What it takes to take back an optimizer's next step.

    Args:
        optimizer: the one that will step. All that it keeps in tensors, lists, dictionaries, tuples
            and plain values is remembered, and likewise of optimizers inside of it. An optimizer
            with a ``state_dict`` of its own may keep more: what that tells is remembered as well.
        parameters: what it may change, values and gradients.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        own = {id(parameter): parameter for parameter in parameters}
        in_groups = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._optimizer = optimizer
        tells = _has_state_of_its_own(optimizer)
        self._own_state = copy.deepcopy(optimizer.state_dict()) if tells else None
        # Gradients are cloned, since some optimizers work in their memory.
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in own.values()]
        memory = _Memory()
        self._give_back = [memory.of(value) for value in ({**own, **in_groups}, optimizer)]

    def take_back(self) -> None:
        """Make everything what it was."""
        if self._own_state is not None:
            self._optimizer.load_state_dict(self._own_state)
        with torch.no_grad():
            for give_back in self._give_back:
                give_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _has_state_of_its_own(optimizer: Optimizer) -> bool:
    """Whether an optimizer says itself what it must be given back."""
    kind = type(optimizer)
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
    )


class _Memory:
    """Remembers nested values, each object once."""

    def __init__(self) -> None:
        self._known: dict[int, GiveBack] = {}

    def of(self, value: Any) -> GiveBack:
        """Remember a value; other kinds of object than those below are given back as they are."""
        if id(value) not in self._known:
            # What holds itself finds itself remembered already.
            self._known[id(value)] = lambda: value
            self._known[id(value)] = self._remembered(value)
        return self._known[id(value)]

    def _remembered(self, value: Any) -> GiveBack:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, Optimizer):
            return self._object(value)
        if isinstance(value, dict):
            return self._dictionary(value)
        if isinstance(value, list | deque):
            return self._sequence(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        return lambda: value

    def _object(self, value: Any) -> GiveBack:
        attributes = self.of(vars(value))

        def give_back() -> Any:
            attributes()
            return value

        return give_back

    def _dictionary(self, value: dict[Any, Any]) -> GiveBack:
        items = [(key, self.of(item)) for key, item in value.items()]

        def give_back() -> dict[Any, Any]:
            then = {key: item() for key, item in items}
            value.clear()
            value.update(then)
            return value

        return give_back

    def _sequence(self, value: list[Any] | deque[Any]) -> GiveBack:
        items = [self.of(item) for item in value]

        def give_back() -> list[Any] | deque[Any]:
            then = [item() for item in items]
            value.clear()
            value.extend(then)
            return value

        return give_back

    def _tuple(self, value: tuple[Any, ...]) -> GiveBack:
        items = [self.of(item) for item in value]

        def give_back() -> tuple[Any, ...]:
            for item in items:
                item()
            return value

        return give_back


def _tensor(value: Tensor) -> GiveBack:
    then = value.detach().clone()

    def give_back() -> Tensor:
        value.copy_(then)
        return value

    return give_back
