"""What optimizers and schedulers keep beside their tensors, as JSON that gives back the same value.

JSON knows no tuples, no infinities and only text as keys: ``MultiStepLR`` counts milestones in a
``Counter`` by whole numbers, which would come back as text. These are written as an object with a
single key that begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from penstock.errors import FileError, InputError
from penstock.values import is_number, is_whole, shown

_TUPLE, _MAP, _COUNTER, _FLOAT, _SCALAR = "$tuple", "$map", "$counter", "$float", "$scalar"


def to_json(value: Any, what: str) -> Any:
    """A value as one that JSON gives back unchanged, by ``of_json``.

    Args:
        value: numbers, texts, ``None``, tensors with a single number, in lists, tuples,
            dictionaries and counters.
        what: whose value it is, for errors.

    Raises:
        InputError: it is something else.

    >>> of_json(to_json({"betas": (0.9, 0.999), 3: float("inf")}, "a group"))
    {'betas': (0.9, 0.999), 3: inf}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Tensor):
        if value.dim() or value.is_complex():
            raise InputError(
                f"{what} is a tensor of shape {tuple(value.shape)}, which is no number"
            )
        return {_SCALAR: [str(value.dtype).removeprefix("torch."), to_json(value.item(), what)]}
    if is_whole(value):
        return int(value)
    if is_number(value):
        number = float(value)
        return number if math.isfinite(number) else {_FLOAT: repr(number)}
    if isinstance(value, list):
        return [to_json(item, what) for item in value]
    if type(value) is tuple:
        return {_TUPLE: [to_json(item, what) for item in value]}
    if type(value) in (dict, Counter):
        pairs = [(key, to_json(item, what)) for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key, _ in pairs)
        if type(value) is dict and is_plain:
            return dict(pairs)
        kind = _COUNTER if type(value) is Counter else _MAP
        return {kind: [[to_json(key, what), item] for key, item in pairs]}
    raise InputError(
        f"{what} is {shown(value)}, of type {type(value).__name__}, which is neither a tensor nor "
        "a number, a text, or these in lists and dictionaries; a checkpoint cannot hold it"
    )


def of_json(value: Any) -> Any:
    """What ``to_json`` was given.

    Raises:
        FileError: it is nothing that ``to_json`` writes.
    """
    if isinstance(value, list):
        return [of_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: of_json(item) for key, item in value.items()}
    try:
        ((mark, content),) = value.items()
        if mark == _TUPLE:
            return tuple(of_json(content))
        if mark in (_MAP, _COUNTER):
            pairs = {of_json(key): of_json(item) for key, item in content}
            return pairs if mark == _MAP else Counter(pairs)
        if mark == _FLOAT and content in ("inf", "-inf", "nan"):
            return float(content)
        if mark == _SCALAR:
            dtype, number = content
            return torch.tensor(of_json(number), dtype=dtype_named(dtype))
    except (TypeError, ValueError):
        pass
    raise FileError(f"{shown(value)} is no value that a checkpoint holds")


def dtype_named(name: Any) -> torch.dtype:
    """torch's type of numbers with this name, such as ``"float32"``.

    Raises:
        FileError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"{shown(name)} is no type of numbers")
    return dtype
