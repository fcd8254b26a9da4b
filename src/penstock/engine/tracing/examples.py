"""Inputs that a model was captured with: as an ``Example`` for files, and made again from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import InputError
from penstock.core.example import Dynamic, Example, Granularity

_SEED = 0


class _Indescribable(Exception):
    """Something among the inputs that a file does not have."""


def described(inputs: Any, granularity: Granularity, dynamic: Dynamic) -> Example | None:
    """How a model is captured, for files; ``None`` if its inputs hold something that files do not
    have."""
    try:
        return Example(inputs=_written(inputs), granularity=granularity, dynamic=dynamic)
    except _Indescribable:
        return None


def _written(part: Any) -> Any:
    if isinstance(part, Tensor):
        first = part.detach().flatten()[:1]
        known = first.numel() and not first.is_complex() and not first.is_meta
        value = first.item() if known else 0
        # What is no number in JSON, such as the infinity of a mask, is as good as another.
        value = value if value - value == 0 else 0
        return {"tensor": str(part.dtype)[6:], "shape": [*part.shape], "value": value}
    if type(part) is tuple:
        return {"tuple": [_written(inner) for inner in part]}
    if type(part) is list:
        return [_written(inner) for inner in part]
    if isinstance(part, dict) and all(type(key) is str for key in part):
        return {"dict": {key: _written(inner) for key, inner in part.items()}}
    if part is None or type(part) in (bool, int, float, str):
        return part
    raise _Indescribable


def inputs_like(example: Example, device: torch.device | None) -> Any:
    """Inputs of the same form: tensors of numbers have one value everywhere, which the model has
    seen; floating ones are drawn, always the same.

    Raises:
        InputError: torch has no such dtype.
    """
    draws = torch.Generator().manual_seed(_SEED)

    def made(part: Any) -> Any:
        match part:
            case {"tensor": name, "shape": shape, "value": value}:
                dtype = getattr(torch, name, None)
                if not isinstance(dtype, torch.dtype):
                    raise InputError(f"example: torch has no dtype {name!r}")
                if dtype.is_floating_point:
                    tensor = torch.randn(shape, generator=draws).to(dtype)
                else:
                    tensor = torch.full(shape, value, dtype=dtype)
                return tensor.to(device)
            case {"tuple": parts}:
                return tuple(map(made, parts))
            case {"dict": entries}:
                return {key: made(inner) for key, inner in entries.items()}
            case list():
                return [made(inner) for inner in part]
        return part

    return made(example.inputs)
