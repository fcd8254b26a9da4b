"""What a stage's passes were traced under, and what of it has changed since."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ModelError
from penstock.base.values import shown
from penstock.engine.model.spine import NamedLayer

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MODE = "training"
"""Passes are traced for each mode."""


_OWN = frozenset(vars(nn.Module()))
"""Attributes in which every module keeps its state and hooks."""

_MOST_ENTRIES = 1000
"""Of a list or a dict that is looked at before each step: what has more is data."""


class NotedValue(NamedTuple):
    """What layers may decide by, as it was: an attribute, or an entry of a list or dict.

    Attributes:
        owner: whose, in words.
        label: which, in words.
        held: what it is in.
        key: there.
        value: as it was.
    """

    owner: str
    label: str
    held: dict[Any, Any] | list[Any]
    key: Any
    value: Any

    def now(self) -> Any:
        """As it is; as it was where it has been taken out."""
        if isinstance(self.held, dict):
            return self.held.get(self.key, self.value)
        return self.held[self.key] if self.key < len(self.held) else self.value


class Conditions:
    """What passes cannot see of layers once these are traced: hooks, and attributes by which their
    code may decide, also of settings that an attribute is: a list, a dict, a dataclass, a
    ``SimpleNamespace``, a configuration of ``transformers``.

    Args:
        layers: as they are now.
    """

    def __init__(self, layers: Sequence[NamedLayer]) -> None:
        self._hooks: list[tuple[str, dict[Any, Any]]] = []
        self._noted: list[NotedValue] = []
        self._trained: list[tuple[str, dict[str, Any], str, bool]] = []
        self._seen: set[int] = set()
        for layer in layers:
            for name, module in layer.module.named_modules():
                if id(module) in self._seen:
                    continue
                self._seen.add(id(module))
                owner = f"layer {layer.name!r}" + (f", module {name!r}," if name else "")
                self._note(owner, vars(module))

    def _note(self, owner: str, attributes: dict[str, Any]) -> None:
        self._hooks += [(owner, attributes[kind]) for kind in _HOOKS if kind in attributes]
        for name, value in attributes.items():
            label = f"its attribute {name!r}"
            if type(value) in _PLAIN and name != _MODE:
                self._noted.append(NotedValue(owner, label, attributes, name, value))
            elif name not in _OWN and id(value) not in self._seen:
                self._seen.add(id(value))
                self._noted += _entries(owner, label, value)
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
        for noted in self._noted:
            now = noted.now()
            if now is not noted.value and (type(now) not in _PLAIN or now != noted.value):
                before = f"{noted.label} was {shown(noted.value)}"
                raise _changed(noted.owner, before, shown(now))
        for owner, parameters, name, wanted in self._trained:
            if parameters[name].requires_grad is not wanted:
                state = "trained" if wanted else "frozen"
                raise _changed(owner, f"its parameter {name!r} was {state}", "not")


def _entries(owner: str, label: str, value: Any) -> list[NotedValue]:
    """The settings that an attribute holds."""
    held = _settings(value)
    if held is None:
        return []
    entries = enumerate(held) if isinstance(held, list) else held.items()
    return [
        NotedValue(owner, f"{key!r} in {label}", held, key, entry)
        for key, entry in entries
        if type(entry) in _PLAIN
    ]


def _settings(value: Any) -> dict[Any, Any] | list[Any] | None:
    """What holds the settings that a value is; ``None`` if it is something else, or data."""
    if isinstance(value, list | dict):
        return value if len(value) <= _MOST_ENTRIES else None
    is_settings = (
        isinstance(value, SimpleNamespace | argparse.Namespace)
        or (is_dataclass(value) and not isinstance(value, type))
        or hasattr(type(value), "to_dict")  # as configurations of transformers have
    )
    return getattr(value, "__dict__", None) if is_settings else None


def _changed(owner: str, before: str, now: str) -> ModelError:
    return ModelError(
        f"of {owner} {before} when its passes were traced, and is {now} now, which they would not "
        "see; build a new Pipeline, or leave compile=… out"
    )
