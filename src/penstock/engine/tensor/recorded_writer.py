"""Layers of captured models, whose forward was recorded for whole values, for a member's parts.

A recorded layer is a graph of operations, with sizes as constants. For a member it is written anew:
behind a module that divides its outputs, the graph is followed along the dimension that is divided,
through operations of which it is known what becomes of it, and constants that say how long that
dimension is become those of the part. Where nobody knows, and at the end of the layer, values are
made whole. So the result is right whatever a model computes; what is not known costs a gather.

Where a layer is split as ``"sequence"``, values around its divided modules have some of the
positions on each member, and are followed by the same rules: what a row gives, or looks up, is
reduced and scattered along dimension 1, and what a column reads is gathered once for all columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from penstock.base.errors import ModelError
from penstock.engine.tensor.divided_layers import (
    ColumnConv,
    ColumnEmbedding,
    ColumnLinear,
    ColumnTransposed,
)
from penstock.engine.tensor.group import TensorGroup, bounds, sizes
from penstock.engine.tensor.layouts import (
    FEATURES,
    SEQUENCE,
    WHOLE,
    Layout,
    Layouts,
    enter,
    gather,
    gather_copies,
    layouts_of_leaves,
    own_shard,
)
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.positions import acts_by_position, asks_for_no_values
from penstock.engine.tensor.recorded_calls import (
    dropped,
    dropped_positions,
    loss_of,
    num_positions,
    part_of,
    whole_of,
)
from penstock.engine.tensor.recorded_rules import RULES, Rule, ShardedDim, shape_of
from penstock.engine.tensor.splits import works_on_features

_COLUMNS = (ColumnLinear, ColumnConv, ColumnEmbedding, ColumnTransposed)

SHARERS = "sharers"
"""The attribute of a shared layer that its code reads where it needs the group."""


class RecordedLayouts(NamedTuple):
    """Where values lie in a captured layer that is shared.

    Attributes:
        reads, gives: the layouts of what it takes and gives, one for each value.
        by_positions: whether values in it are followed along positions.
        rows: names of modules whose sums are scattered along positions.
        terms: names of modules of whose parameters each member has a term of the gradient.
        asks_for_no_values: names of modules that are given parts, since they do not look at them.
        gathers: how often values are made whole in it, where it trains.
    """

    reads: Layouts
    gives: Layouts
    by_positions: bool
    rows: frozenset[str] = frozenset()
    terms: frozenset[str] = frozenset()
    asks_for_no_values: frozenset[str] = frozenset()
    gathers: int = 0


ALL_WHOLE = RecordedLayouts(WHOLE, WHOLE, by_positions=False)


class MemberGraphWriter:
    """Writes a recorded graph anew for one member.

    Args:
        module: of a name in the graph.
        ways: how modules are shared, by their names.
        layouts: in which it reads its values, and is to give them.
        decides: whether ``gives`` and ``terms`` are to be found; a value that lies as ``keeps``
            leaves so.

    Attributes:
        gives, rows, terms, uses_none, num_gathers: see ``RecordedLayouts``.
    """

    def __init__(
        self,
        recorded: fx.Graph,
        module: Callable[[str], nn.Module],
        ways: Mapping[str, ModuleSharing],
        group: TensorGroup,
        layouts: RecordedLayouts = ALL_WHOLE,
        *,
        decides: bool = False,
        keeps: Layout = None,
    ) -> None:
        self.recorded, self.module, self.ways, self.group = recorded, module, ways, group
        self.layouts, self.decides, self.keeps = layouts, decides, keeps
        self.gives: list[Layout] = []
        self.rows: set[str] = set()
        self.terms: set[str] = set()
        self.uses_none: set[str] = set()
        self.num_gathers = 0
        self.copied: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        self.ours: dict[fx.Node, fx.Node] = {}
        self.divided: dict[fx.Node, ShardedDim] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        self.sharers: fx.Node | None = None

    def write(self) -> fx.Graph:
        given = [node for node in self.recorded.nodes if node.op == "placeholder"]
        reads = layouts_of_leaves(self.layouts.reads, len(given))
        read = {node for node, layout in zip(given, reads, strict=True) if layout == SEQUENCE}
        for node in self.recorded.nodes:
            if node.op == "call_module":
                self._module(node)
            elif node.op == "output":
                self._output(node.args[0])
            else:
                self._operation(node)
                if node in read:
                    self.divided[node] = self._positions(node)
        return self.graph

    def _output(self, values: Sequence[Any]) -> None:
        wanted = layouts_of_leaves(self.layouts.gives, len(values))
        given: list[Any] = []
        for value, asked in zip(values, wanted, strict=True):
            lies = asked
            if self.decides:
                stays = isinstance(value, fx.Node) and self._lies(value, self.keeps)
                lies = self.keeps if stays else WHOLE
            self.gives.append(lies)
            given.append(self._leaving(value, lies) if isinstance(value, fx.Node) else value)
        self.graph.output(given)

    def _leaving(self, value: fx.Node, layout: Layout) -> fx.Node:
        if layout is WHOLE:
            return self.whole(value)
        if self._lies(value, layout):
            return self.ours[value]
        return self._call(own_shard, self.whole(value), layout)

    def _lies(self, value: fx.Node, layout: Layout) -> bool:
        """Whether a value is divided in one piece along positions, or along its last dimension."""
        divided, shape = self.divided.get(value), shape_of(value)
        if divided is None or shape is None or divided.inner * divided.length != shape[divided.dim]:
            return False
        if layout == FEATURES:
            return divided.dim == len(shape) - 1 and divided.inner == 1
        is_sequence = layout == SEQUENCE and self._has_positions(value)
        return is_sequence and divided == self._positions(value)

    def _positions(self, node: fx.Node) -> ShardedDim:
        """How a value is divided of which members have some of the positions."""
        shape = shape_of(node)
        assert shape is not None
        length = shape[SEQUENCE]
        return ShardedDim(SEQUENCE, length, 1, tuple(sizes(length, self.group.size)))

    def _has_positions(self, node: fx.Node) -> bool:
        """Whether a value has a dimension of features behind one of positions."""
        shape = shape_of(node)
        return self.layouts.by_positions and shape is not None and len(shape) > SEQUENCE + 1

    def whole(self, node: fx.Node) -> fx.Node:
        """A value as all members have it."""
        divided = self.divided.get(node)
        if divided is None:
            return self.ours[node]
        if node not in self.joined:
            self.num_gathers += 1
            if self._lies(node, SEQUENCE):
                self.joined[node] = self._call(gather, self.ours[node], SEQUENCE)
                return self.joined[node]
            count = divided.parts[self.group.index] * divided.inner
            self.joined[node] = self._call(whole_of, self.ours[node], divided.dim, count)
        return self.joined[node]

    def copies(self, node: fx.Node) -> fx.Node:
        """A whole value for readers whose gradients are terms of a sum, made once for all."""
        if node not in self.copied:
            if self._lies(node, SEQUENCE):
                self.copied[node] = self._call(gather_copies, self.ours[node], SEQUENCE)
            else:
                self.copied[node] = self._call(enter, self.whole(node))
        return self.copied[node]

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
        if _name(node) == "cross_entropy_loss" and self._lose(node):
            return
        if _name(node) == "sym_size" and self._count_positions(node):
            return
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
        repeated = (set(node.all_input_nodes) - self.divided.keys()) - set(rule.cut)
        own |= {value: self.copies(value) for value in repeated if _may_train(value)}
        made = self._copy(node, own.__getitem__)
        if rule.arguments is not None:
            made.args = fx.node.map_arg(rule.arguments, own.__getitem__)
        if rule.divided is not None:
            self.divided[node] = rule.divided

    def _lose(self, node: fx.Node) -> bool:
        """A cross entropy of logits of which members have a part each, if it is one."""
        logits, target, *rest = node.args
        assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
        shape, labels, divided = shape_of(logits), shape_of(target), self.divided.get(logits)
        if divided is None or shape is None or labels is None:
            return False
        has_classes = len(shape) > 1 and divided.dim == 1 and divided.length == shape[1]
        if not has_classes or target in self.divided or len(labels) != len(shape) - 1:
            return False
        others = fx.node.map_arg((target, rest, node.kwargs), self.whole)
        (target, rest, kwargs) = cast(tuple[Any, list[Any], dict[str, Any]], others)
        made = self._call(loss_of, self.ours[logits], divided.length, target, *rest)
        made.kwargs = kwargs
        self.ours[node] = made
        return True

    def _cut(self, value: fx.Node, node: fx.Node, rule: Rule) -> fx.Node:
        """A member's part of a whole value that an operation on parts reads."""
        shape, output, divided = shape_of(value), shape_of(node), rule.divided
        assert shape is not None and output is not None and divided is not None
        dim = divided.dim + len(shape) - len(output)
        if divided.inner == 1 and shape[dim] == divided.length:
            return self._call(own_shard, self.ours[value], dim)
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
        rule = None if find is None else find(node, self.divided, self.group.index)
        return None if rule is not None and self._is_for_one_length(node, rule) else rule

    def _is_for_one_length(self, node: fx.Node, rule: Rule) -> bool:
        """Whether a rule reckons with a number of positions that was recorded, and may be another:
        with other sizes as constants, or where positions are no dimension of their own."""
        given = (value for value in node.all_input_nodes if self._lies(value, SEQUENCE))
        if all(isinstance(value.meta["val"].shape[SEQUENCE], int) for value in given):
            return False
        stays = rule.divided is None or (
            self._has_positions(node) and rule.divided == self._positions(node)
        )
        return not stays or (rule.arguments is not None and _name(node) != "slice")

    def _count_positions(self, node: fx.Node) -> bool:
        """The number of all positions of a value, of which members have some, if it asks for it."""
        value, dim = node.args[:2]
        if not isinstance(value, fx.Node) or dim != SEQUENCE or not self._lies(value, SEQUENCE):
            return False
        self.ours[node] = self._call(num_positions, self.ours[value])
        return True

    def _module(self, node: fx.Node) -> None:
        path = str(node.target)
        way, module = self.ways.get(path), self.module(path)
        value = node.args[0] if node.args else None
        given = self.divided.get(value) if isinstance(value, fx.Node) else None
        if way is not None and way.adds:
            self._take(node, way, module)
            if self._has_positions(node):
                self.rows.add(path)
                self.terms.add(path)
                self.divided[node] = self._positions(node)
        elif way is not None and issubclass(way.kind, _COLUMNS):
            self._copy(node, self.whole if way.kind is ColumnEmbedding else self.copies)
            self.divided[node] = self._divided(node, way, module)
        elif way is not None and way.cuts and way.features is not None:
            self.divided[node] = self._take(node, way, module)
        elif given is None:
            self._whole_module(node, module)
        elif isinstance(module, nn.Dropout):
            own = self.graph.create_node("get_attr", path)
            self.ours[node] = self._drop(node, own, given)
            self.divided[node] = given
        elif (way is not None and not way.cuts) or works_on_features(module):
            self._copy(node, self.ours.__getitem__)
            self.divided[node] = given
        else:
            self._on_positions(node, module, given)

    def _whole_module(self, node: fx.Node, module: nn.Module) -> None:
        """A module that nobody divides, on whole values."""
        self._copy(node, self.whole)
        if isinstance(module, nn.Embedding) and self._has_positions(node):
            # From here on, each member has some of the positions; gradients come back whole.
            self.ours[node] = self._call(own_shard, self.ours[node], SEQUENCE)
            self.divided[node] = self._positions(node)

    def _on_positions(self, node: fx.Node, module: nn.Module, given: ShardedDim) -> None:
        """A module that nobody divides, on some of the positions if it can run on these."""
        value, path = node.args[0], str(node.target)
        if self._asks_for_no_values(node, module):
            self.uses_none.add(path)
            self._copy(node, lambda own: self.ours[own] if own is value else self.whole(own))
        elif self._acts_by_position(node, module):
            self._copy(node, self.ours.__getitem__)
            self.terms.add(path)
            self.divided[node] = given
        else:
            self._whole_module(node, module)

    def _asks_for_no_values(self, node: fx.Node, module: nn.Module) -> bool:
        """Whether a module reads of its divided input neither numbers nor positions."""
        (value, *others) = node.args
        if others or not self._lies(cast(fx.Node, value), SEQUENCE):
            return False
        if not self.decides:
            return str(node.target) in self.layouts.asks_for_no_values
        given = {key: _sample(other) for key, other in node.kwargs.items()}
        if any(sample is None for sample in given.values()):
            return False
        shape = shape_of(cast(fx.Node, value))
        assert shape is not None
        sample = torch.empty(shape, device="meta")
        return asks_for_no_values(module, sample, cast(dict[str, Tensor], given))

    def _acts_by_position(self, node: fx.Node, module: nn.Module) -> bool:
        """Whether an undivided module can be given some of the positions of its only input."""
        (value, *others) = node.all_input_nodes
        if others or node.args != (value,) or not self._lies(value, SEQUENCE):
            return False
        if not self.decides:
            return str(node.target) in self.layouts.terms
        shape = shape_of(value)
        assert shape is not None
        return acts_by_position(module, shape[SEQUENCE + 1 :])

    def _drop(self, node: fx.Node, dropout: fx.Node, given: ShardedDim) -> fx.Node:
        if self.sharers is None:
            self.sharers = self.graph.create_node("get_attr", SHARERS)
        value = self.ours[node.args[0]]  # type: ignore[index]
        drops = dropped_positions
        if not self._lies(cast(fx.Node, node.args[0]), SEQUENCE):
            drops = _dropper(given)
        return self.graph.call_function(drops, (value, dropout, self.sharers))

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


def _sample(value: Any) -> Tensor | None:
    """A tensor like what a node has given, without values; ``None`` if it is none."""
    shape = shape_of(value) if isinstance(value, fx.Node) else None
    return None if shape is None else torch.empty(shape, dtype=_dtype(value), device="meta")


def _dtype(value: fx.Node) -> torch.dtype:
    dtype: torch.dtype = value.meta["val"].dtype
    return dtype


def _may_train(node: fx.Node) -> bool:
    """Whether a gradient may come to a value."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    return getattr(target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)
