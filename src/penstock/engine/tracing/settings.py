"""Numbers and words that a traced forward reads from its modules: a graph keeps what they were."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.base.errors import ModelError
from penstock.engine.tracing.lines import is_models
from penstock.engine.tracing.unseen import TORCHS_OWN

_MISSING = object()
_WATCHING = threading.Lock()
"""Who watches replaces what all modules have in common, so only one may at a time."""


class Settings:
    """Which attributes a model's code read while it was traced, and what they were.

    Modules that stay whole have none: they are called as they are, and read theirs anew each time.

    Attributes:
        read: by the name of a module and of its attribute, the values that were read; several if
            the two modes differ.
    """

    def __init__(self) -> None:
        self.read: dict[tuple[str, str], list[Any]] = {}

    @contextmanager
    def watching(self, model: nn.Module, calm: Collection[nn.Module]) -> Iterator[None]:
        """A context in which what a model's code reads of its modules is noted, but for what it
        sets itself.

        Args:
            model: the model.
            calm: the modules that stay whole.
        """
        whole = {id(module) for module in calm}
        names = {
            id(module): name for name, module in model.named_modules() if id(module) not in whole
        }
        written: set[tuple[str, str]] = set()
        set_it = nn.Module.__setattr__

        def is_own(module: nn.Module, attribute: str) -> bool:
            known = id(module) in names and attribute not in TORCHS_OWN
            return known and is_models(sys._getframe(2))

        def read(module: nn.Module, attribute: str) -> Any:
            value = object.__getattribute__(module, attribute)
            simple = isinstance(value, bool | int | float | str | None)
            if simple and is_own(module, attribute) and _held(module, attribute) is value:
                values = self.read.setdefault((names[id(module)], attribute), [])
                if not _is_among(value, values):
                    values.append(value)
            return value

        def write(module: nn.Module, attribute: str, value: Any) -> None:
            if is_own(module, attribute):
                written.add((names[id(module)], attribute))
            set_it(module, attribute, value)

        with _WATCHING:
            # Attributes that a module has never come to ``__getattr__``, which tracers replace.
            nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
            nn.Module.__setattr__ = write  # type: ignore[method-assign,assignment]
            try:
                yield
            finally:
                del nn.Module.__getattribute__
                nn.Module.__setattr__ = set_it  # type: ignore[method-assign]
        for key in written & self.read.keys():
            del self.read[key]

    def check(self, captured: nn.Module, model: nn.Module) -> None:
        """See that a model's attributes are what they were.

        Args:
            captured: where somebody may have set attributes that are the model's.
            model: the model that was captured.

        Raises:
            ModelError: one has changed, which no graph would notice.
        """
        for (name, attribute), values in self.read.items():
            holders = _modules_called(name, model)
            # What the capture has of its own, it says in its class.
            own = type(captured).__annotations__
            if not name and attribute in vars(captured) and attribute not in own:
                holders.append(captured)
            for holder in holders:
                now = _held(holder, attribute)
                if now is not _MISSING and not _is_among(now, values):
                    whose = f"{name}.{attribute}" if name else attribute
                    raise ModelError(
                        f"{type(model).__name__}.{whose} is {now!r}, but it was {values[0]!r} when "
                        "the model was captured, and its layers go on with that: the code that "
                        "reads it is in a graph. Set it back, or capture the model again and build "
                        "a new Pipeline; what modules without children hold may change"
                    )


def _modules_called(name: str, model: nn.Module) -> list[nn.Module]:
    """The module of a name, or none; a call asks for a few of what may be thousands."""
    try:
        return [model.get_submodule(name)]
    except AttributeError:
        return []


def _held(module: nn.Module, attribute: str) -> Any:
    """What a module or its class has under a name, without asking a property for it."""
    held = object.__getattribute__(module, "__dict__")
    if attribute in held:
        return held[attribute]
    return inspect.getattr_static(type(module), attribute, _MISSING)


def _is_among(value: Any, values: list[Any]) -> bool:
    # Not a number is equal to nothing, not even to itself.
    return any(value is other or bool(value == other) for other in values)
