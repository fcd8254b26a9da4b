"""What optimizers and schedulers keep beside their tensors, as JSON that gives back the same value.

JSON knows no tuples, no infinities and only text as keys: ``MultiStepLR`` counts milestones in a
``Counter`` by whole numbers, which would come back as text. These are written as an object with a
single key that begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import FileError, InputError
from penstock.base.values import is_number, is_whole, shown

_TUPLE, _MAP, _COUNTER, _FLOAT, _TENSOR = "$tuple", "$map", "$counter", "$float", "$tensor"
_MOST_NUMBERS = 64


def to_json(value: Any, what: str) -> Any:
    """A value as one that JSON gives back unchanged, by ``of_json``.

    Args:
        value: numbers, texts, ``None`` and tensors with a few numbers, in lists, tuples,
            dictionaries and counters.
        what: whose value it is, for errors.

    Raises:
        InputError: it is something else.

    >>> of_json(to_json({"betas": (0.9, 0.999), 3: float("inf")}, "a group"))
    {'betas': (0.9, 0.999), 3: inf}
    """
    try:
        return _as_json(value, what)
    except RecursionError:
        raise InputError(f"{what} is nested too deeply for a checkpoint") from None
    except UnicodeEncodeError:
        raise InputError(f"{what} has a text in it that is no Unicode") from None


def _as_json(value: Any, what: str) -> Any:
    if isinstance(value, str):
        value.encode()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor) and value.numel() <= _MOST_NUMBERS and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, _as_json(value.tolist(), what)]}
    if is_number(value):
        return _number(value)
    if type(value) in (list, tuple):
        items = [_as_json(item, what) for item in value]
        return items if type(value) is list else {_TUPLE: items}
    if type(value) in (dict, Counter):
        pairs = [[_as_json(key, what), _as_json(item, what)] for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        if type(value) is dict:
            return dict(pairs) if is_plain else {_MAP: pairs}
        return {_COUNTER: pairs}
    raise InputError(
        f"{what} is {shown(value)}, of type {type(value).__name__}; here a checkpoint holds "
        f"numbers, texts and tensors of at most {_MOST_NUMBERS} numbers, and these in lists, "
        "tuples and dictionaries"
    )


def _number(value: Any) -> Any:
    if is_whole(value):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else {_FLOAT: repr(number)}


def of_json(value: Any) -> Any:
    """What ``to_json`` was given.

    Raises:
        FileError: it is nothing that ``to_json`` writes.
    """
    try:
        return _restored(value)
    except RecursionError:
        raise FileError("a value of a checkpoint is nested too deeply") from None


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _restored(item) for key, item in value.items()}
    with suppress(TypeError, ValueError, KeyError, RuntimeError):
        ((mark, content),) = value.items()
        return _MARKED[mark](content)
    raise FileError(f"{shown(value)} is no value that a checkpoint holds")


def _map_of(pairs: Any) -> dict[Any, Any]:
    return {_restored(key): _restored(item) for key, item in pairs}


def _tensor_of(content: Any) -> Tensor:
    dtype, numbers = content
    return torch.tensor(_restored(numbers), dtype=dtype_named(dtype))


_MARKED: dict[str, Callable[[Any], Any]] = {
    _TUPLE: lambda items: tuple(_restored(list(items))),
    _MAP: _map_of,
    _COUNTER: lambda pairs: Counter(_map_of(pairs)),
    _FLOAT: {repr(number): number for number in (math.inf, -math.inf, math.nan)}.__getitem__,
    _TENSOR: _tensor_of,
}


def dtype_named(name: Any) -> torch.dtype:
    """torch's type of numbers with this name, such as ``"float32"``.

    Raises:
        FileError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"{shown(name)} is no type of numbers")
    return dtype
