"""Values that pass between layers: a tensor, or tensors nested in tuples, lists and dicts.

The only place that knows torch's tree helpers, which torch keeps under a private name but all of
its own distributed code relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

Structure = pytree.TreeSpec
L = TypeVar("L")
_LEAF = pytree.tree_structure(0)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value, tensors and others, and its structure."""
    if isinstance(value, Tensor):
        return [value], _LEAF
    return pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    """Undo ``flatten``."""
    return leaves[0] if structure is _LEAF else pytree.tree_unflatten(leaves, structure)


def replace(kind: type[L], function: Callable[[L], Any], value: Any) -> Any:
    """The value with ``function`` applied to every leaf of a kind."""
    if isinstance(value, kind):
        return function(value)
    return pytree.tree_map_only(kind, function, value)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
