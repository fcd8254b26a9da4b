"""Layers of captured models, whose forward was recorded for whole values, for a member's parts.

A recorded layer is a graph of operations, with sizes as constants. For a member it is written anew:
behind a module that divides its outputs, the graph is followed along the dimension that is divided,
through operations of which it is known what becomes of it, and constants that say how long that
dimension is become those of the part. Where nobody knows, and at the end of the layer, values are
made whole. So the result is right whatever a model computes; what is not known costs a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.divided_layers import (
    ColumnConv,
    ColumnEmbedding,
    ColumnLinear,
    ColumnTransposed,
    mask_of_whole,
)
from penstock.engine.tensor.group import TensorGroup, bounds
from penstock.engine.tensor.layouts import gather, own_shard
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.recorded_rules import RULES, Rule, ShardedDim, shape_of
from penstock.engine.tensor.splits import works_on_features

_COLUMNS = (ColumnLinear, ColumnConv, ColumnEmbedding, ColumnTransposed)

SHARERS = "sharers"
"""The attribute of a shared layer that its code reads where it needs the group."""


def whole_of(part: Tensor, group: TensorGroup, dim: int, count: int) -> Tensor:
    """The whole value of which a member has a part; graphs call it.

    Args:
        count: how many numbers the member has of each piece of the dimension.
    """
    pieces = torch.unflatten(part, dim, (-1, count))
    return gather(pieces, group, dim + 1).flatten(dim, dim + 1)


def part_of(whole: Tensor, group: TensorGroup, dim: int, length: int, inner: int) -> Tensor:
    """A member's part of a whole value; graphs call it."""
    pieces = torch.unflatten(whole, dim, (-1, length, inner))
    return own_shard(pieces, group, dim + 1).flatten(dim, dim + 2)


def dropped(part: Tensor, dropout: nn.Dropout, group: TensorGroup, divided: ShardedDim) -> Tensor:
    """Dropout of a part with the mask of the whole value; graphs call it."""
    if not dropout.training or not dropout.p:
        return part
    dim, length, inner, parts = divided
    own = parts[group.index]
    shape = [*part.shape]
    shape[dim] = shape[dim] // own * length
    mask = mask_of_whole(part, shape, dropout.p)
    places = bounds(length, group.size, group.index)
    pieces = torch.unflatten(mask, dim, (-1, length, inner)).narrow(dim + 1, places.start, own)
    own_mask: Tensor = pieces.flatten(dim, dim + 2)
    return part * own_mask


class _MemberGraphWriter:
    """Writes a recorded graph anew for one member.

    Args:
        module: of a name in the graph.
        ways: how modules are shared, by their names.
    """

    def __init__(
        self,
        recorded: fx.Graph,
        module: Callable[[str], nn.Module],
        ways: Mapping[str, ModuleSharing],
        group: TensorGroup,
    ) -> None:
        self.recorded, self.module, self.ways, self.group = recorded, module, ways, group
        self.graph = fx.Graph()
        self.ours: dict[fx.Node, fx.Node] = {}
        self.divided: dict[fx.Node, ShardedDim] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self.sharers: fx.Node | None = None

    def write(self) -> fx.Graph:
        for node in self.recorded.nodes:
            if node.op == "call_module":
                self._module(node)
            elif node.op == "output":
                self.graph.output(fx.node.map_arg(node.args[0], self.whole))
            else:
                self._operation(node)
        return self.graph

    def whole(self, node: fx.Node) -> fx.Node:
        """A value as all members have it."""
        divided = self.divided.get(node)
        if divided is None:
            return self.ours[node]
        if node not in self.joined:
            count = divided.parts[self.group.index] * divided.inner
            self.joined[node] = self._call(whole_of, self.ours[node], divided.dim, count)
        return self.joined[node]

    def _call(self, function: Callable[..., Any], value: fx.Node, *args: Any) -> fx.Node:
        if self.sharers is None:
            self.sharers = self.graph.create_node("get_attr", SHARERS)
        return self.graph.call_function(function, (value, self.sharers, *args))

    def _copy(self, node: fx.Node, own: Callable[[fx.Node], Any]) -> fx.Node:
        args, kwargs = fx.node.map_arg(node.args, own), fx.node.map_arg(node.kwargs, own)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        self.ours[node] = made
        return made

    def _operation(self, node: fx.Node) -> None:
        rule = self._rule(node)
        if rule is None:
            if any(given in self.divided for given in node.all_input_nodes) and _writes(node):
                raise ModelError(
                    f"the recorded operation {node.target} writes into a value of which each "
                    "tensor rank has its part; let all tensor ranks repeat what is before it"
                )
            self._copy(node, self.whole)
            return
        own = self.ours | {value: self._cut(value, node, rule) for value in rule.cut}
        made = self._copy(node, own.__getitem__)
        if rule.arguments is not None:
            made.args = fx.node.map_arg(rule.arguments, own.__getitem__)
        if rule.divided is not None:
            self.divided[node] = rule.divided

    def _cut(self, value: fx.Node, node: fx.Node, rule: Rule) -> fx.Node:
        """A member's part of a whole value that an operation on parts reads."""
        shape, output, divided = shape_of(value), shape_of(node), rule.divided
        assert shape is not None and output is not None and divided is not None
        dim = divided.dim + len(shape) - len(output)
        return self._call(part_of, self.ours[value], dim, divided.length, divided.inner)

    def _rule(self, node: fx.Node) -> Rule | None:
        """The rule of an operation on parts; ``None`` if it needs whole values."""
        if node.op != "call_function" or not any(
            given in self.divided for given in node.all_input_nodes
        ):
            return None
        find = RULES.get(_name(node))
        if find is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            find = RULES["pointwise"]
        return None if find is None else find(node, self.divided, self.group.index)

    def _module(self, node: fx.Node) -> None:
        path = str(node.target)
        way, module = self.ways.get(path), self.module(path)
        given = self.divided.get(node.args[0]) if node.args else None  # type: ignore[arg-type]
        if way is not None and way.adds:
            self._take(node, way, module)
        elif way is not None and issubclass(way.kind, _COLUMNS):
            self._copy(node, self.whole)
            self.divided[node] = self._divided(node, way, module)
        elif way is not None and way.cuts and way.features is not None:
            self.divided[node] = self._take(node, way, module)
        elif given is None:
            self._copy(node, self.whole)
        elif isinstance(module, nn.Dropout):
            own = self.graph.create_node("get_attr", path)
            self.ours[node] = self._drop(node, own, given)
            self.divided[node] = given
        elif (way is not None and not way.cuts) or works_on_features(module):
            self._copy(node, self.ours.__getitem__)
            self.divided[node] = given
        else:
            self._copy(node, self.whole)

    def _drop(self, node: fx.Node, dropout: fx.Node, given: ShardedDim) -> fx.Node:
        if self.sharers is None:
            self.sharers = self.graph.create_node("get_attr", SHARERS)
        value = self.ours[node.args[0]]  # type: ignore[index]
        return self.graph.call_function(_dropper(given), (value, dropout, self.sharers))

    def _take(self, node: fx.Node, way: ModuleSharing, module: nn.Module) -> ShardedDim:
        """A module takes up each member's part of its input; gives how that is divided."""
        value = node.args[0]
        assert isinstance(value, fx.Node)
        if isinstance(module, nn.Embedding):  # everybody has all tokens
            self._copy(node, self.whole)
            return ShardedDim(0, 1, 1, (1,) * self.group.size)
        wanted = self._divided(value, way, module)
        given = self.divided.get(value)
        if given is not None and given.dim == wanted.dim and given.alike(wanted):
            self._copy(node, self.ours.__getitem__)
            return wanted
        unit = way.cuts["weight"].unit
        part = self._call(part_of, self.whole(value), wanted.dim, wanted.length // unit, unit)
        self._copy(node, lambda given: part if given is value else self.whole(given))
        return wanted

    def _divided(self, value: fx.Node, way: ModuleSharing, module: nn.Module) -> ShardedDim:
        """How a value lies that a module divides as it does its weight."""
        shape, cut, count = shape_of(value), way.cuts["weight"], self.group.size
        weight = module._parameters["weight"]
        assert weight is not None
        if shape is None or way.features is None:
            raise ModelError(
                f"{value.target!r} gives what nobody knows the shape of, since torch.export could "
                'not record the model; let all tensor ranks repeat it ("whole")'
            )
        length = weight.shape[cut.dim] // cut.blocks
        parts = tuple(
            bounds(length // cut.unit, count, member).length * cut.unit for member in range(count)
        )
        return ShardedDim(way.features % len(shape), length, 1, parts)


def _dropper(divided: ShardedDim) -> Callable[..., Tensor]:
    """``dropped`` for values that are divided so: a graph's constants are no tuples of a class."""

    def drop(part: Tensor, dropout: nn.Dropout, group: TensorGroup) -> Tensor:
        return dropped(part, dropout, group, divided)

    return drop


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    return getattr(target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def for_member(
    recorded: fx.Graph,
    module: Callable[[str], nn.Module],
    ways: Mapping[str, ModuleSharing],
    group: TensorGroup,
) -> fx.Graph:
    """The graph that a member runs in the place of a recorded one.

    Args:
        recorded: with the shapes that values had.
        module: the module of a name in the graph.
        ways: how modules are shared, by their names.

    Raises:
        ModelError: shapes are not known, or a part would be written into.
    """
    return _MemberGraphWriter(recorded, module, ways, group).write()
