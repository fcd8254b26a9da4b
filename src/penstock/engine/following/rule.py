"""A rule: how a member performs a recorded operation on what members share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from penstock.engine.following.dims import Known, ShardedDim, shape_of


class Rule(NamedTuple):
    """An operation as a member performs it.

    Attributes:
        divided: how the output is.
        arguments: to be given instead; ``None`` for the same.
        cut: whole values of which a member takes the part that goes with the output's.
    """

    divided: ShardedDim | None
    arguments: tuple[Any, ...] | None = None
    cut: tuple[fx.Node, ...] = ()


Find = Callable[[fx.Node, Known, int], Rule | None]
"""From an operation, how what is divided is so, and the number of a member for whom arguments with
sizes are; ``None`` if the operation must be given whole values."""


def name_of(node: fx.Node) -> str:
    """The name of an operation, without ``aten::``; of a function, its own."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).removeprefix("aten::")
    return getattr(node.target, "__name__", "")


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into what it is given."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by its place, or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def only(node: fx.Node, known: Known, place: int = 0) -> tuple[ShardedDim, list[int]] | None:
    """How an argument is divided, and its shape; ``None`` unless it is, alone."""
    value = node.args[place] if len(node.args) > place else None
    others = [other for other in node.all_input_nodes if other is not value]
    if not isinstance(value, fx.Node) or value not in known or any(map(known.get, others)):
        return None
    shape = shape_of(value)
    return None if shape is None else (known[value], shape)


def to_cut(
    whole: Sequence[fx.Node], place: int, output: Sequence[int]
) -> tuple[fx.Node, ...] | None:
    """The whole values that go all along a dimension of the output, counted from its last; ``None``
    if one goes along some of it."""
    sizes = {value: _size_at(value, place) for value in whole}
    if any(size not in (None, 1, output[place]) for size in sizes.values()):
        return None
    return tuple(value for value, size in sizes.items() if size == output[place] != 1)


def _size_at(value: fx.Node, place: int) -> int | None:
    """A tensor's size in a dimension counted from its last; ``None`` without such a dimension."""
    shape = shape_of(value)
    return None if shape is None or len(shape) < -place else shape[place]
