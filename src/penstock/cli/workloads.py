"""Workloads by name: a user's model with its data, as a function of a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.base.errors import InputError, ModelError, PenstockError
from penstock.base.telling import Telling
from penstock.cli.input import is_given

if TYPE_CHECKING:
    from penstock.planning.plans import Plan
    from penstock.trial import Workload
    from penstock.trial.workload import Batch

Made = TypeVar("Made")

DEFAULT_WORKLOAD = "penstock.demo:workload"


def load_workload(name: str) -> Workload:
    """Import ``module:function`` and call it.

    Returns:
        The workload; where its ``build_model`` or ``batches`` raises, one message says so.

    Raises:
        ModelError: it cannot be imported, raises, or does not return a ``Workload``.
    """
    with Telling(f"loading {name}"):
        return _loaded(name)


def load_workload_of(plan: Plan, path: str, name: str) -> Workload:
    """As ``load_workload``, of the workload that a plan is to train, which the parameter
    ``workload`` of the running verb names.

    Args:
        plan: it is compared only where nobody named a workload, so that the demo's is taken.
        path: of the plan's file, for errors.

    Raises:
        ModelError: the plan is for another model than the demo's.
    """
    workload = load_workload(name)
    if not is_given("workload"):
        from penstock.engine.model.spine import spine_of
        from penstock.engine.run.building import in_layers

        model = in_layers(workload.build_model(), plan)
        layers = tuple(layer.name for layer in spine_of(model))
        if layers != plan.layers:
            raise ModelError(
                f"{path} is not for the demo's model ({name}), which is taken where no workload is "
                "named; name yours behind the plan, as module:function"
            )
    return workload


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
        workload = _made(
            f"the workload {name}", partial(_imported, name, module_name, function_name)
        )
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(workload, Workload):
        raise ModelError(
            f"{name} returned a {type(workload).__name__}; return a penstock.trial.Workload"
        )
    return replace(
        workload,
        build_model=partial(_made, f"build_model of the workload {name}", workload.build_model),
        batches=partial(_iterated, f"batches of the workload {name}", workload.batches),
    )


def _imported(name: str, module_name: str, function_name: str) -> object:
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load the workload {name!r}: {error}") from error
    return function()


def _made(what: str, make: Callable[[], Made]) -> Made:
    with _blamed(what):
        return make()


def _iterated(what: str, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    with _blamed(what):
        yield from make()


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """What the user's own code raises becomes one message, with its line."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        from penstock.engine.tracing.lines import because, lines_of

        said = f"{what} raised {type(error).__name__}: {error}{because(lines_of(error))}"
        raise ModelError(said) from error
