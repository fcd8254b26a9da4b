"""Values that pass between layers: a tensor, or tensors nested in tuples, lists and dicts.

The only place that knows torch's tree helpers, which torch keeps under a private name but all of
its own distributed code relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Structure = pytree.TreeSpec
Node = tuple[Callable[[Any], tuple[Any, Iterable[Any]]], Callable[[Any, Iterable[Any]], Any]]
L = TypeVar("L")
_LEAF = pytree.tree_structure(0)
_PLACEHOLDER = object()


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Take a value apart into its leaves, tensors and others, and its structure."""
    if isinstance(value, Tensor):
        return [value], _LEAF
    return pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    """Undo ``flatten``."""
    return leaves[0] if structure is _LEAF else pytree.tree_unflatten(leaves, structure)


def is_leaf(structure: Structure) -> bool:
    """Whether a structure is that of a single leaf."""
    return bool(structure == _LEAF)


def node(kind: type) -> Node | None:
    """How values of a class are taken apart into (context, parts), and made again; ``None`` if the
    class is not registered with torch's tree helpers."""
    known = pytree.SUPPORTED_NODES.get(kind)
    if known is None:
        return None

    def apart(value: Any) -> tuple[Any, Iterable[Any]]:
        parts, context = known.flatten_fn(value)
        return context, parts

    return apart, lambda context, parts: known.unflatten_fn(parts, context)


def classes(structure: Structure) -> set[type]:
    """The classes of the containers that a structure consists of."""
    containers: set[type] = set()
    value = unflatten([_PLACEHOLDER] * structure.num_leaves, structure)

    def seen(inner: Any) -> bool:
        containers.add(type(inner))
        return False

    pytree.tree_flatten(value, is_leaf=seen)
    return containers - {type(_PLACEHOLDER)}


def replace(kind: type[L], function: Callable[[L], Any], value: Any) -> Any:
    """The value with ``function`` applied to every leaf of a kind."""
    if isinstance(value, kind):
        return function(value)
    return pytree.tree_map_only(kind, function, value)


def apart(leaf: Tensor, made: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """A tensor without the graph behind it, as it crosses a cut: it wants a gradient if it did.

    What wants none before a cut must want none behind it: kernels are chosen by that, too.

    Args:
        made: what crosses in its place, such as a copy elsewhere; it is made outside of the graph.
    """
    tensor = leaf.detach()
    if made is not None:
        tensor = made(tensor)
    return tensor.requires_grad_() if leaf.requires_grad else tensor


def cut(leaf: Any, wants_gradient: bool) -> tuple[Any, Any]:
    """Cut autograd's graph at one leaf of a value.

    Args:
        wants_gradient: whether a gradient is to come to what requires one.

    Returns:
        (where the gradient will be, what to compute with): the same memory, but only the second may
        be overwritten in place, as layers like ``nn.ReLU(inplace=True)`` do.
    """
    if not isinstance(leaf, Tensor):
        return leaf, leaf
    if not (wants_gradient and leaf.requires_grad):
        leaf = leaf.detach()
        return leaf, leaf
    leaf = leaf.detach().requires_grad_()
    return leaf, _Alias.apply(leaf)  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """The same memory as a tensor that is no leaf; a view would forbid overwriting, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.leaf = tensor
        # A detached tensor shares the version counter, so autograd still notices an overwritten
        # value that another layer needs.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Not left to autograd, which would copy it into the strides of the leaf: the layers before
        # would then go backward through other kernels than in a model that is not cut.
        ctx.leaf.grad = gradients[0]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def shapes(value: Any) -> str:
    """Shapes and dtypes of the tensors in a value, as errors say them.

    >>> shapes((torch.ones(2, 3), {"mask": torch.ones(2, dtype=torch.bool)}))
    '(2, 3) float32, (2,) bool'
    """
    return ", ".join(
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in tensors(value)
    )


def named_tensors(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """All tensors in a value, each with what Python would call it: ``inputs['mask']``.

    Args:
        name: of the value.
    """
    try:
        leaves, _ = pytree.tree_flatten_with_path(value)
    except ValueError:  # a class was registered without the names of its parts
        return [(f"{name}, tensor {place}", tensor) for place, tensor in enumerate(tensors(value))]
    return [
        (f"{name}{pytree.keystr(path)}", leaf) for path, leaf in leaves if isinstance(leaf, Tensor)
    ]
