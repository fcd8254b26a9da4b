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
from penstock.engine.following.dims import ShardedDim, shape_of
from penstock.engine.following.rule import Rule, name_of, writes
from penstock.engine.following.table import rule_of
from penstock.engine.following.writer import GraphWriter
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
from penstock.engine.tensor.splits import works_on_features

_COLUMNS = (ColumnLinear, ColumnConv, ColumnEmbedding, ColumnTransposed)


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


class MemberGraphWriter(GraphWriter):
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
        super().__init__(recorded, {})
        self.module_of, self.ways, self.group = module, ways, group
        self.layouts, self.decides, self.keeps = layouts, decides, keeps
        self.gives: list[Layout] = []
        self.rows: set[str] = set()
        self.terms: set[str] = set()
        self.uses_none: set[str] = set()
        self.num_gathers = 0
        self.copied: dict[fx.Node, fx.Node] = {}
        self.joined: dict[fx.Node, fx.Node] = {}
        taken = [node for node in recorded.nodes if node.op == "placeholder"]
        reads = layouts_of_leaves(layouts.reads, len(taken))
        self._by_positions = {
            node for node, layout in zip(taken, reads, strict=True) if layout == SEQUENCE
        }

    def read(self, node: fx.Node) -> None:
        if node in self._by_positions:
            self.divided[node] = self._positions(node)

    def given(self, values: Sequence[Any]) -> list[Any]:
        wanted = layouts_of_leaves(self.layouts.gives, len(values))
        given: list[Any] = []
        for value, asked in zip(values, wanted, strict=True):
            lies = asked
            if self.decides:
                stays = isinstance(value, fx.Node) and self._lies(value, self.keeps)
                lies = self.keeps if stays else WHOLE
            self.gives.append(lies)
            given.append(self._leaving(value, lies) if isinstance(value, fx.Node) else value)
        return given

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

    def own(self, value: fx.Node, divided: ShardedDim | None) -> fx.Node:
        repeats = divided is None and _may_train(value)
        return self.copies(value) if repeats else self.ours[value]

    def part(self, value: fx.Node, divided: ShardedDim) -> fx.Node:
        shape = shape_of(value)
        assert shape is not None
        if divided.inner == 1 and shape[divided.dim] == divided.length:
            return self._call(own_shard, self.ours[value], divided.dim)
        place = divided.dim, divided.length, divided.inner
        return self._call(part_of, self.ours[value], *place)

    def _call(self, function: Callable[..., Any], value: fx.Node, *args: Any) -> fx.Node:
        return self.graph.call_function(function, (value, self.sharers, *args))

    def operation(self, node: fx.Node) -> None:
        name, takes_parts = name_of(node), any(map(self.divided.get, node.all_input_nodes))
        if name == "cross_entropy_loss" and self._lose(node):
            return
        if name == "sym_size" and self._count_positions(node):
            return
        rule = rule_of(node, self.divided, self.group.index) if takes_parts else None
        if rule is not None and not self._is_for_one_length(node, rule):
            self.follow(node, rule, self.divided)
            return
        if takes_parts and writes(node):
            raise ModelError(
                f"the recorded operation {node.target} writes into a value of which each "
                "tensor rank has its part; let all tensor ranks repeat what is before it"
            )
        self.copy(node, self.whole)

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

    def _is_for_one_length(self, node: fx.Node, rule: Rule) -> bool:
        """Whether a rule reckons with a number of positions that was recorded, and may be another:
        with other sizes as constants, or where positions are no dimension of their own."""
        given = (value for value in node.all_input_nodes if self._lies(value, SEQUENCE))
        if all(isinstance(value.meta["val"].shape[SEQUENCE], int) for value in given):
            return False
        stays = rule.divided is None or (
            self._has_positions(node) and rule.divided == self._positions(node)
        )
        return not stays or rule.arguments is not None

    def _count_positions(self, node: fx.Node) -> bool:
        """The number of all positions of a value, of which members have some, if it asks for it."""
        value, dim = node.args[:2]
        if not isinstance(value, fx.Node) or dim != SEQUENCE or not self._lies(value, SEQUENCE):
            return False
        self.ours[node] = self._call(num_positions, self.ours[value])
        return True

    def module(self, node: fx.Node) -> None:
        path = str(node.target)
        way, module = self.ways.get(path), self.module_of(path)
        value = node.args[0] if node.args else None
        given = self.divided.get(value) if isinstance(value, fx.Node) else None
        if way is not None and way.adds:
            self._take(node, way, module)
            if self._has_positions(node):
                self.rows.add(path)
                self.terms.add(path)
                self.divided[node] = self._positions(node)
        elif way is not None and issubclass(way.kind, _COLUMNS):
            self.copy(node, self.whole if way.kind is ColumnEmbedding else self.copies)
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
            self.copy(node, self.ours.__getitem__)
            self.divided[node] = given
        else:
            self._on_positions(node, module, given)

    def _whole_module(self, node: fx.Node, module: nn.Module) -> None:
        """A module that nobody divides, on whole values."""
        self.copy(node, self.whole)
        if isinstance(module, nn.Embedding) and self._has_positions(node):
            # From here on, each member has some of the positions; gradients come back whole.
            self.ours[node] = self._call(own_shard, self.ours[node], SEQUENCE)
            self.divided[node] = self._positions(node)

    def _on_positions(self, node: fx.Node, module: nn.Module, given: ShardedDim) -> None:
        """A module that nobody divides, on some of the positions if it can run on these."""
        value, path = node.args[0], str(node.target)
        if self._asks_for_no_values(node, module):
            self.uses_none.add(path)
            self.copy(node, lambda own: self.ours[own] if own is value else self.whole(own))
        elif self._acts_by_position(node, module):
            self.copy(node, self.ours.__getitem__)
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
        value = cast(fx.Node, node.args[0])
        own = self.ours[value], dropout, self.sharers
        if self._lies(value, SEQUENCE):
            return self.graph.call_function(dropped_positions, own)
        # A graph's constants are no tuples of a class.
        place = given.dim, given.length, given.inner, *given.parts
        return self.graph.call_function(dropped, (*own, *place))

    def _take(self, node: fx.Node, way: ModuleSharing, module: nn.Module) -> ShardedDim:
        """A module takes up each member's part of its input; gives how that is divided."""
        value = node.args[0]
        assert isinstance(value, fx.Node)
        if isinstance(module, nn.Embedding):  # everybody has all tokens
            self.copy(node, self.whole)
            return ShardedDim(0, 1, 1, (1,) * self.group.size)
        wanted = self._divided(value, way, module)
        given = self.divided.get(value)
        if given is not None and given.dim == wanted.dim and given.alike(wanted):
            self.copy(node, self.ours.__getitem__)
            return wanted
        unit = way.cuts["weight"].unit
        part = self._call(part_of, self.whole(value), wanted.dim, wanted.length // unit, unit)
        self.copy(node, lambda given: part if given is value else self.whole(given))
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


def _sample(value: Any) -> Tensor | None:
    """A tensor like what a node has given, without values; ``None`` if it is none."""
    shape = shape_of(value) if isinstance(value, fx.Node) else None
    if shape is None:
        return None
    return torch.empty(shape, dtype=value.meta["val"].dtype, device="meta")


def _may_train(node: fx.Node) -> bool:
    """Whether a gradient may come to a value."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
