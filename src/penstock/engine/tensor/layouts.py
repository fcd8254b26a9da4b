"""In which layout a value lies: along which dimension members have a part of it, or whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.base.errors import ModelError
from penstock.engine.model import tree
from penstock.engine.tensor.group import Group
from penstock.engine.tensor.redistributions import (
    enter,
    gather,
    gather_copies,
    leave,
    own_part,
    scatter,
    turn,
)

Layout = int | None
"""The dimension along which each member has its part; ``None``: everyone has all of it."""

WHOLE: Layout = None
ROWS: Layout = 0
SEQUENCE: Layout = 1
CHANNELS: Layout = 1
"""Features of convolutions; where a value has two dimensions, they are its features, too."""
FEATURES: Layout = -1


def converted(value: Any, have: Layout, want: Layout, group: Group, layer: str) -> Any:
    """A value in another layout; every tensor in it, if it is nested.

    Raises:
        ModelError: it has a tensor without such a dimension.
    """
    if have == want:
        return value
    if type(value) is Tensor:
        return _converted(value, have, want, group, layer)
    return tree.replace(Tensor, lambda tensor: _converted(tensor, have, want, group, layer), value)


def _converted(value: Tensor, have: Layout, want: Layout, group: Group, layer: str) -> Tensor:
    here = _dimension(value, have, layer)
    there = _dimension(value, want, layer)
    if here == there:
        return value
    if here is None:
        assert there is not None
        return own_part(value, group, there)
    if there is None:
        return gather(value, group, here)
    return turn(value, group, here, there)


def as_copies(value: Tensor, have: Layout, group: Group) -> Tensor:
    """A value whole on every member, for a reader that divides its outputs."""
    if have is None:
        return enter(value, group)
    return gather_copies(value, group, have % value.dim())


def summed(term: Tensor, want: Layout, group: Group) -> Tensor:
    """The sum of the members' terms, in a layout."""
    if want is None:
        return leave(term, group)
    return scatter(term, group, want % term.dim())


def _dimension(value: Tensor, layout: Layout, layer: str) -> Layout:
    if layout is None:
        return None
    if not -value.dim() <= layout < value.dim():
        raise ModelError(
            f"layer {layer!r} is given or gives a tensor of {value.dim()} dimensions, which cannot "
            f"be divided along dimension {layout}; let all tensor ranks repeat the layer "
            '(split "whole")'
        )
    return layout % value.dim()
