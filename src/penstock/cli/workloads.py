"""Workloads by name: a user's model with its data, as a function of a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InputError, ModelError
from penstock.telling import Telling

if TYPE_CHECKING:
    from penstock.trial import Workload

DEFAULT_WORKLOAD = "penstock.demo:workload"


def load_workload(name: str) -> Workload:
    """Import ``module:function`` and call it.

    Raises:
        ModelError: it cannot be imported, or does not return a ``Workload``.
    """
    with Telling(f"loading {name}"):
        return _loaded(name)


def _loaded(name: str) -> Workload:
    from penstock.trial import Workload

    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise InputError(
            f"{name!r} names no workload; write module:function, for example {DEFAULT_WORKLOAD}, "
            "where the function returns a penstock.trial.Workload"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        workload = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load the workload {name!r}: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(workload, Workload):
        raise ModelError(
            f"{name} returned a {type(workload).__name__}; return a penstock.trial.Workload"
        )
    return workload
