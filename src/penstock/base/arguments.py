"""Functions that users call: who gives an argument by another name, or a name that is not there, is
told the one that is meant.

A call costs nothing more than one frame; only one that Python refuses is looked at again.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from penstock.base.errors import ArgumentError, PenstockError
from penstock.base.tracebacks import shorten

P = ParamSpec("P")
R = TypeVar("R")
Remedies = Mapping[str, str]
"""By the name of an argument that people try, what does it, as ``give loss=…``."""

_NONE: Remedies = MappingProxyType({})
_ELSEWHERE: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "microbatches": (
            "num_microbatches", "n_microbatches", "chunks", "num_chunks", "micro_batches",
            "accumulation_steps", "gradient_accumulation_steps",
        ),
        "num_microbatches": ("microbatches", "n_microbatches", "chunks"),
        "num_ranks": ("ranks", "num_stages", "stages", "pp_size"),
        "stages": ("num_stages", "n_stages", "pp_size", "num_ranks"),
        "minibatch": ("batch_size", "global_batch_size"),
        "memory_bytes": ("memory", "max_memory", "memory_limit"),
        "loss": ("criterion", "loss_fn", "loss_function", "loss_func"),
        "optimizer": ("optim", "opt", "optimizer_class", "optimizer_cls"),
        "lr_scheduler": ("scheduler", "lr_schedule"),
        "clip_norm": ("max_norm", "max_grad_norm", "grad_clip", "gradient_clip_val"),
        "grad_scaler": ("scaler",),
        "devices": ("device", "device_ids"),
        "inputs": ("x", "input", "sample", "data", "batch", "example_inputs"),
        "targets": ("y", "target", "label", "labels"),
        "epochs": ("num_epochs", "max_epochs", "n_epochs"),
        "loader": ("dataloader", "data_loader", "train_dataloader", "train_loader"),
        "path": ("folder", "checkpoint", "file", "filename", "directory"),
    }
)  # fmt: skip
"""By the name of an argument here, what other libraries call it."""


def nearest(name: str, names: Collection[str]) -> str | None:
    """The one of some names that is meant, perhaps, by a name that is none of them.

    >>> nearest("Pipline", ["Plan", "Pipeline"])
    'Pipeline'
    """
    by_letters = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=0.7)
    return by_letters[close[0]] if close else None


def public(
    remedies: Remedies = _NONE, otherwise: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that users call: wrong arguments are an error with a cue, and errors come up to
    the caller without what is between.

    Args:
        remedies: what does it, for names that belong elsewhere.
        otherwise: what to do where no name helps; by default, the arguments are listed.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except PenstockError as error:
                shorten(error)
                raise
            except TypeError as error:
                assert error.__traceback__ is not None
                if error.__traceback__.tb_next is not None:  # it was raised inside
                    raise
                refused = error
            raise _refusal(function, args, kwargs, remedies, otherwise) or refused from None

        return called

    return decorate


def _refusal(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    remedies: Remedies,
    otherwise: str,
) -> ArgumentError | None:
    """Why a function cannot be called so, and how it can."""
    parameters = inspect.signature(function).parameters
    own = {"self", "cls"}.intersection(parameters)
    names = [name for name in parameters if name not in own]
    by_place = [
        name for name in names if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    given = len(args) - len(own)
    called = function.__qualname__.removesuffix(".__init__")
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        return ArgumentError(
            f"{called}() {'; '.join(_unknown(unknown, names, remedies, otherwise))}"
        )
    if given > len(by_place):
        instead = otherwise or f"the rest goes by name: {', '.join(names[len(by_place) :])}"
        return ArgumentError(
            f"{called}() takes {' and '.join(by_place)}, but was given {given} values; {instead}"
        )
    twice = [name for name in by_place[:given] if name in kwargs]
    if twice:
        return ArgumentError(f"{called}() was given {twice[0]} twice, by its place and by its name")
    missing = [
        name
        for name in names
        if parameters[name].default is inspect.Parameter.empty
        and name not in (*by_place[:given], *kwargs)
    ]
    if missing:
        by_name = [f"{name}=…" for name in missing if name not in by_place]
        instead = otherwise or f"call it as {called}({', '.join([*by_place, *by_name])}, …)"
        return ArgumentError(f"{called}() lacks {' and '.join(missing)}; {instead}")
    return None


def _unknown(
    unknown: Collection[str], names: Collection[str], remedies: Remedies, otherwise: str
) -> Iterator[str]:
    """A phrase for each argument that is not there, and for those that nobody can place, one."""
    # Several that nobody knows are the keys of a batch, and no arguments by other names.
    guess = _meant if len(unknown) == 1 or not otherwise else lambda *_: ""
    meant = {name: remedies.get(name) or guess(name, names) for name in unknown}
    for name, remedy in meant.items():
        if remedy:
            yield f"has no argument {name!r}: {remedy}"
    lost = [name for name, remedy in meant.items() if not remedy]
    if lost:
        several = "s" * (len(lost) > 1)
        instead = otherwise or f"it has {', '.join(names)}"
        yield f"has no argument{several} {', '.join(map(repr, lost))}: {instead}"


def _meant(name: str, names: Collection[str]) -> str:
    for known in names:
        if name in _ELSEWHERE.get(known, ()):
            return f"give {known}=…"
    near = nearest(name, names)
    return "" if near is None else f"give {near}=…, if that is meant"
