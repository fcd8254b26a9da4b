"""What a stage's passes were traced under, and what of it has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import ModelError
from penstock.base.values import shown
from penstock.engine.model.spine import NamedLayer

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MODE = "training"
"""Passes are traced for each mode."""


class NotedAttribute(NamedTuple):
    """An attribute of a module as it was."""

    owner: str
    attributes: dict[str, Any]
    name: str
    value: Any


class Conditions:
    """What passes cannot see of layers once these are traced: hooks, and attributes by which their
    code may decide.

    Args:
        layers: as they are now.
    """

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        self._hooks: list[tuple[str, dict[Any, Any]]] = []
        self._noted: list[NotedAttribute] = []
        self._trained: list[tuple[str, dict[str, Any], str, bool]] = []
        seen: set[int] = set()
        for layer in layers:
            for name, module in layer.module.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                owner = f"layer {layer.name!r}" + (f", module {name!r}," if name else "")
                self._note(owner, vars(module))

    def _note(self, owner: str, attributes: dict[str, Any]) -> None:
        self._hooks += [(owner, attributes[kind]) for kind in _HOOKS if kind in attributes]
        self._noted += [
            NotedAttribute(owner, attributes, name, value)
            for name, value in attributes.items()
            if type(value) in _PLAIN and name != _MODE
        ]
        self._trained += [
            (owner, attributes["_parameters"], name, parameter.requires_grad)
            for name, parameter in attributes["_parameters"].items()
            if isinstance(parameter, Tensor)
        ]

    def check(self) -> None:
        """Look whether passes still do what the layers would.

        Raises:
            ModelError: they do not.
        """
        for owner, hooks in self._hooks:
            if hooks:
                raise ModelError(
                    f"{owner} has the hook {next(iter(hooks.values()))!r}, which compiled passes "
                    "do not call; remove it, or leave compile=… out"
                )
        for owner, attributes, name, value in self._noted:
            now = attributes.get(name, value)
            if now is not value and now != value:
                raise _changed(owner, f"its attribute {name!r} was {shown(value)}", shown(now))
        for owner, parameters, name, wanted in self._trained:
            if parameters[name].requires_grad is not wanted:
                state = "trained" if wanted else "frozen"
                raise _changed(owner, f"its parameter {name!r} was {state}", "not")


def _changed(owner: str, before: str, now: str) -> ModelError:
    return ModelError(
        f"of {owner} {before} when its passes were traced, and is {now} now, which they would not "
        "see; build a new Pipeline, or leave compile=… out"
    )
