"""Modules that recorded graphs call whole: whether they treat positions alike.

Of torch's own classes it is known. The code of any other is recorded for values of the shapes that
it had in the graph, and positions are followed through that, as through the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.engine.context.rules import rule_of
from penstock.engine.model import tree
from penstock.engine.tensor.divided_layers import is_transposed
from penstock.engine.tensor.recorded_rules import Known, ShardedDim, shape_of, sizes_of
from penstock.engine.tensor.splits import BY_ELEMENT


class Through(NamedTuple):
    """What a module makes of what is divided.

    Attributes:
        divided: how its output is; ``None`` if it is whole.
        trouble: why nobody can say so; else empty.
    """

    divided: ShardedDim | None
    trouble: str = ""


def through(module: nn.Module, node: fx.Node, known: Known) -> Through:
    """Follow positions through a call of a module.

    Args:
        node: the call.
        known: how values are divided that are.
    """
    value: Any = node.args[0] if node.args else None
    if value in known and node.all_input_nodes == [value]:
        divided = known[value]
        if _is_known(module, len(shape_of(value) or ()) - divided.dim):
            return Through(divided)
    return _recorded(module, node, known)


def _is_known(module: nn.Module, from_last: int) -> bool:
    """Whether a module of torch's treats alike what is in a dimension, the last being 1."""

    def is_plain(*kinds: type[nn.Module]) -> bool:
        return any(isinstance(module, own) and type(module).forward is own.forward for own in kinds)

    if is_plain(*BY_ELEMENT, nn.Dropout):
        return True
    if is_plain(nn.Linear) or is_transposed(module):
        return from_last > 1
    if is_plain(nn.LayerNorm, nn.RMSNorm):
        return from_last > len(module.normalized_shape)  # type: ignore[arg-type]
    if is_plain(nn.Embedding):
        return not (getattr(module, "max_norm", None) or module.scale_grad_by_freq)
    return False


def _recorded(module: nn.Module, node: fx.Node, known: Known) -> Through:
    """Record the code of a module, and follow positions through it."""
    leaves, structure = tree.flatten((node.args, node.kwargs))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [_example(leaf) for leaf in leaves]
    places = [place for place, value in enumerate(given) if isinstance(value, Tensor)]

    def call(*tensors: Tensor) -> list[Any]:
        filled = dict(zip(places, tensors, strict=True))
        args, kwargs = tree.unflatten(
            [filled.get(place, value) for place, value in enumerate(given)], structure
        )
        return tree.flatten(module(*args, **kwargs))[0]

    try:
        with mode, torch.no_grad():
            fakes = [
                torch.empty(given[place].shape, dtype=given[place].dtype, device="cpu")
                for place in places
            ]
        with mode:
            graph = make_fx(call, _allow_non_fake_inputs=True)(*fakes).graph
    except Exception as error:  # whatever its code does, nobody can follow it
        reason = str(error).strip().splitlines() or [""]
        return Through(None, f"its code cannot be recorded ({type(error).__name__}: {reason[0]})")
    inside = [node for node in graph.nodes if node.op == "placeholder"]
    carried = {
        own: known[leaves[place]]
        for own, place in zip(inside, places, strict=True)
        if leaves[place] in known
    }
    return _followed(graph, carried)


def _example(leaf: Any) -> Any:
    """A value of the shape that a leaf had when it was recorded."""
    if not isinstance(leaf, fx.Node):
        return leaf
    value = leaf.meta.get("val")
    if isinstance(value, Tensor):
        return torch.empty(sizes_of(value), dtype=value.dtype, device="meta")
    return getattr(getattr(value, "node", None), "hint", value)


def _followed(graph: fx.Graph, carried: Mapping[fx.Node, ShardedDim]) -> Through:
    known = dict(carried)
    for node in graph.nodes:
        if node.op == "output":
            outputs = [value for value in tree.flatten(node.args)[0] if isinstance(value, fx.Node)]
            ways = {known.get(value) for value in outputs}
            if len(ways) > 1:
                return Through(None, "it gives some values by positions, and others whole")
            return Through(next(iter(ways), None))
        if not any(value in known for value in node.all_input_nodes):
            continue
        rule = rule_of(node, known, 0)
        if rule is None or rule.divided is None or rule.cut:
            return Through(None, f"{node.target} in it mixes positions, or counts them itself")
        known[node] = rule.divided
    raise AssertionError("a graph has an output")
