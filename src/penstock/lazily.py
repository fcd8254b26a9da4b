"""Names of a package that are loaded when they are first used (PEP 562).

Whoever imports a room waits only for what is used of it: a schedule is simulated without the
planner, and a plan is searched without pictures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, str] = MappingProxyType({})


def loaded_when_used(
    room: str,
    names: Mapping[str, Collection[str]],
    modules: Mapping[str, str] = _NOTHING,
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names are loaded one by one.

    Args:
        room: the package's ``__name__``.
        names: by module, what the package has from it.
        modules: by name, modules that the package has as they are.
    """
    module_of = {name: module for module, held in names.items() for name in held}

    def load(name: str) -> Any:
        if name in modules:
            loaded = importlib.import_module(modules[name])
        elif name in module_of:
            loaded = getattr(importlib.import_module(module_of[name]), name)
        else:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        # The next time, Python finds it without asking here.
        setattr(sys.modules[room], name, loaded)
        return loaded

    return load


def method_loaded_when_used(module: str, function: str) -> Callable[[Any], Any]:
    """A method whose body is a function of a module that is loaded when somebody calls it.

    For a value of a low room that a higher one shows, as a notebook does: the value knows where
    its picture is made, and nothing of how.

    Args:
        module: the full name of the module.
        function: what it calls with the value.
    """

    def method(value: Any) -> Any:
        return getattr(importlib.import_module(module), function)(value)

    return method
