"""Names of a package that are loaded when they are first used (PEP 562).

Whoever imports a room waits only for what is used of it: a schedule is simulated without the
planner, and a plan is searched without pictures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
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
            raise _missing(room, name, (*modules, *module_of))
        # The next time, Python finds it without asking here.
        setattr(sys.modules[room], name, loaded)
        return loaded

    return load


def _missing(room: str, name: str, names: Collection[str]) -> AttributeError:
    from penstock.base.arguments import nearest
    from penstock.base.errors import NameMissing

    text = f"module {room!r} has no attribute {name!r}"
    near = None if name.startswith("_") else nearest(name, names)
    if near is None:
        return AttributeError(text)
    return NameMissing(f"{text}; it has {near}, if that is meant")


class ModulesByPublicName:
    """Lets ``import package.name`` find modules that stand deeper in the package.

    The module is the same one by both names, so that its classes are, too. It does without the
    base classes of ``importlib.abc``, which takes as long to load as what ``import penstock`` does.
    """

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._modules = {f"{package}.{name}": module for name, module in modules.items()}
        self._specs: dict[str, ModuleSpec | None] = {}

    def install(self) -> None:
        """Let imports ask here, if nobody else knows a name."""
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a public name, and none for any other."""
        if self._modules.get(name, name) == name:
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by what it can do

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that has the name."""
        module = importlib.import_module(self._modules[spec.name])
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give back the module's own spec, which the import has just replaced: it ran before."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def method_loaded_when_used(module: str, function: str) -> Callable[..., Any]:
    """A method whose body is a function of a module that is loaded when somebody calls it.

    Args:
        module: the full name of the module, of the same room or a lower one.
        function: what it calls with the value, and with whatever the method is given by name.
    """

    def method(value: Any, **given: Any) -> Any:
        return getattr(importlib.import_module(module), function)(value, **given)

    return method


_MODULE_OF: dict[str, str] = {}


def provide(functions: Mapping[str, str]) -> None:
    """Say which modules have the functions that lower rooms ask for by what they do; the package
    itself does so, once, as it is imported. No low room knows the name of a higher one.

    Args:
        functions: by name, the full name of the module.
    """
    _MODULE_OF.update(functions)


def provider_of(function: str) -> str:
    """The full name of the module that has a function."""
    return _MODULE_OF[function]


def provided(function: str) -> Any:
    """The function that a higher room provides."""
    return getattr(importlib.import_module(provider_of(function)), function)


def method_provided(function: str) -> Callable[[Any], Any]:
    """A method whose body is a function that a higher room provides: a value can be shown in a
    notebook, and its room knows nothing of pictures."""

    def method(value: Any) -> Any:
        return provided(function)(value)

    return method
