"""Modules that recorded graphs call whole: whether they treat positions alike.

Of torch's own classes it is known. The code of any other is recorded for values of the shapes that
it had in the graph, and positions are followed through that, as through the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.engine.following.dims import Known, ShardedDim, shape_of, sizes_of
from penstock.engine.following.table import position_rule
from penstock.engine.model import tree
from penstock.engine.tensor.divided_layers import is_transposed
from penstock.engine.tensor.splits import BY_ELEMENT
from penstock.engine.tracing.graphs import without_dumps


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
    """Record the code of a module, and follow positions through it.

    A member runs the code as it is, and so it is recorded for a member's positions, too: it must do
    the same there but for sizes that follow from them. What counts positions does not.
    """
    call = _LeafCall(module, node)
    own = {
        value: divided.local(call.shapes[value][divided.dim], 0)
        for value, divided in known.items()
        if value in call.shapes
    }
    try:
        whole = call.recorded({})
    except Exception as error:  # whatever its code does, nobody can follow it
        return Through(None, f"its code cannot be recorded ({_first_line(error)})")
    inside = [node for node in whole.graph.nodes if node.op == "placeholder"]
    carried = {
        ours: known[theirs]
        for ours, theirs in zip(inside, call.tensors, strict=True)
        if theirs in known
    }
    try:
        part = call.recorded({value: (known[value].dim, size) for value, size in own.items()})
    except Exception as error:
        # As where positions are multiplied by a matrix: what is in the way says more than shapes.
        trouble = _in_the_way(whole, carried)
        return Through(
            None, trouble or f"its code fails for fewer positions ({_first_line(error)})"
        )
    return _followed(whole, part, carried)


def _first_line(error: Exception) -> str:
    reason = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {reason[0]}"


class _LeafCall:
    """A call of a module in a recorded graph.

    Attributes:
        tensors: the tensors that it is given, in order.
        shapes: of each.
    """

    def __init__(self, module: nn.Module, node: fx.Node) -> None:
        self._module = module
        self._leaves, self._structure = tree.flatten((node.args, node.kwargs))
        self.tensors = [
            leaf
            for leaf in self._leaves
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor)
        ]
        self.shapes = {leaf: sizes_of(leaf.meta["val"]) for leaf in self.tensors}

    def recorded(self, sizes: Mapping[fx.Node, tuple[int, int]]) -> fx.GraphModule:
        """The operations of the call.

        Args:
            sizes: dimensions that have another size, and which, of some tensors.
        """

        def call(*tensors: Tensor) -> list[Any]:
            given = iter(tensors)
            leaves = [
                next(given) if isinstance(leaf, fx.Node) and leaf in self.shapes else _number(leaf)
                for leaf in self._leaves
            ]
            args, kwargs = tree.unflatten(leaves, self._structure)
            return tree.flatten(self._module(*args, **kwargs))[0]

        shapes = {leaf: [*shape] for leaf, shape in self.shapes.items()}
        for leaf, (dim, size) in sizes.items():
            shapes[leaf][dim] = size
        with without_dumps(), FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [
                torch.empty(shapes[leaf], dtype=leaf.meta["val"].dtype) for leaf in self.tensors
            ]
            graph: fx.GraphModule = make_fx(call, _allow_non_fake_inputs=True)(*fakes)
        return graph


def _number(leaf: Any) -> Any:
    """A leaf that is no tensor; of a size, the number that it was."""
    if not isinstance(leaf, fx.Node):
        return leaf
    value = leaf.meta.get("val")
    return getattr(getattr(value, "node", None), "hint", value)


def _followed(
    whole: fx.GraphModule, part: fx.GraphModule, carried: Mapping[fx.Node, ShardedDim]
) -> Through:
    """Follow positions through a module's code.

    Args:
        whole, part: recorded for all positions, and for a member's.
        carried: how what it is given is divided.
    """
    known, ours = dict(carried), dict[fx.Node, fx.Node]()
    if len(whole.graph.nodes) != len(part.graph.nodes):
        return Through(None, "its code does something else for fewer positions")
    outputs: list[fx.Node] = []
    for node, own in zip(whole.graph.nodes, part.graph.nodes, strict=True):
        ours[node] = own
        arguments = node.args
        if node.op == "output":
            outputs = node.all_input_nodes
        elif any(value in known for value in node.all_input_nodes):
            alike = _alike(node, known)
            if alike is None:
                return Through(None, _mixes(node))
            known[node], arguments = alike
        expected = fx.node.map_arg((arguments, node.kwargs), ours.__getitem__)
        if own.target != node.target or expected != (own.args, own.kwargs):
            return Through(None, f"{node.target} in it counts positions")
        if node.op == "get_attr" and not _is_same(*(_held(by, node) for by in (whole, part))):
            return Through(None, "it makes a number of how many positions there are")
    ways = {known.get(value) for value in outputs}
    if len(ways) > 1:
        return Through(None, "it gives some values by positions, and others whole")
    return Through(next(iter(ways), None))


def _in_the_way(code: fx.GraphModule, carried: Mapping[fx.Node, ShardedDim]) -> str:
    """Which operation of a module does not treat positions alike, in words; empty if none."""
    known = dict(carried)
    for node in code.graph.nodes:
        if node.op != "output" and any(value in known for value in node.all_input_nodes):
            alike = _alike(node, known)
            if alike is None:
                return _mixes(node)
            known[node] = alike[0]
    return ""


def _alike(
    node: fx.Node, known: Mapping[fx.Node, ShardedDim]
) -> tuple[ShardedDim, tuple[Any, ...]] | None:
    """How the output of an operation is divided that treats positions alike, and what a member
    gives it; ``None`` if it may not."""
    rule = position_rule(node, known, 0)
    if rule is None or rule.divided is None or rule.cut:
        return None
    return rule.divided, node.args if rule.arguments is None else rule.arguments


def _mixes(node: fx.Node) -> str:
    return f"{node.target} in it mixes positions, or counts them itself"


def _held(code: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = code
    for atom in str(node.target).split("."):
        value = getattr(value, atom)
    return value


def _is_same(first: Any, second: Any) -> bool:
    """Whether two recordings read the same value."""
    if first is second:
        return True
    first, second = (getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
                     for value in (first, second))  # fmt: skip
    both = isinstance(first, Tensor) and isinstance(second, Tensor)
    return both and torch.equal(first, second)
