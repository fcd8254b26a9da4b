"""Masks that a model makes of nothing but sizes: whether one is the causal mask.

Such a mask is computed by recorded operations, in the layer that attends or in an earlier one. They
are performed once, for a few rows, when positions are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx

MaskKind = Literal["causal", "full"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotFixedError(Exception):
    """A value depends on a model's inputs or parameters."""


class FixedValues:
    """Values that depend on nothing but sizes, computed when they are asked for.

    Args:
        sources: the values of earlier layers that placeholders stand for.
        attribute: what a layer holds under the name that a node reads; raises ``NotFixedError``
            for a parameter.
    """

    def __init__(self, sources: Mapping[fx.Node, Any], attribute: Callable[[fx.Node], Any]) -> None:
        self._sources = sources
        self._attribute = attribute
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """A value.

        Raises:
            NotFixedError: it depends on inputs or parameters.
        """
        waiting = [node]
        while waiting:
            last = waiting[-1]
            needed = [other for other in self._needs(last) if other not in self._known]
            if needed:
                waiting += needed
                continue
            waiting.pop()
            if last not in self._known:
                self._known[last] = self._computed(last)
        return self._known[node]

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        if isinstance(node.meta.get("val"), _SYMBOLIC):
            return []
        if node.op == "placeholder":
            source = self._sources.get(node)
            if not isinstance(source, fx.Node):
                raise NotFixedError
            return [source]
        if node.op == "get_attr":
            return []
        tags = getattr(node.target, "tags", ())
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
            raise NotFixedError
        return node.all_input_nodes

    def _computed(self, node: fx.Node) -> Any:
        size = node.meta.get("val")
        if isinstance(size, _SYMBOLIC):
            return size.node.hint
        if node.op == "placeholder":
            return self._known[self._sources[node]]
        if node.op == "get_attr":
            return self._attribute(node)
        args: Any = fx.node.map_arg(node.args, self._known.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._known.__getitem__)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]


def kind_of(mask: Any, *, hides: bool) -> MaskKind | None:
    """Whether a mask lets each position see those up to itself, or all; ``None`` for others.

    Args:
        mask: ``[…, queries, keys]``; numbers are added to scores.
        hides: whether ``True`` in it hides, as in ``nn.MultiheadAttention``.
    """
    if not isinstance(mask, Tensor) or mask.dim() < 2 or mask.is_meta:
        return None
    seen = (~mask if hides else mask) if mask.dtype == torch.bool else mask == 0
    if mask.is_floating_point() and not bool((seen | (mask <= _lowest(mask.dtype))).all()):
        return None
    if bool(seen.all()):
        return "full"
    square = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    is_square = mask.shape[-1] == mask.shape[-2]
    return "causal" if is_square and bool((seen == square).all()) else None


def _lowest(dtype: torch.dtype) -> float:
    """Added to a score, it leaves no weight; some write it in the place of infinity."""
    return torch.finfo(dtype).min / 2
