"""What the models of this folder have in common: how they are scaled, and the usual loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

_WIDTHS = frozenset({"width", "hidden", "channels", "embedding"})


def chosen(sizes: Mapping[str, Mapping[str, Any]], size: str, width: float = 1) -> dict[str, Any]:
    """The sizes of a name, with everything that says how wide layers are times a factor.

    >>> chosen({"small": {"hidden": 8, "classes": 10}}, "small", 1.5)
    {'hidden': 12, 'classes': 10}
    """
    return {
        name: _wider(value, width) if name in _WIDTHS else value
        for name, value in sizes[size].items()
    }


def _wider(value: Any, width: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_wider(part, width) for part in value)
    # Groups and heads divide a multiple of four.
    return value if width == 1 else max(4, round(value * width / 4) * 4)


def classified(output: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of logits [rows, …, classes] and targets [rows, …]; targets of -100 do not
    count."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())
