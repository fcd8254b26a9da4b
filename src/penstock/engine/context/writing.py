"""Layers of a captured model, written anew for a member that has some of the positions.

All layers are followed in their order, since what a value is depends on what made it: it is divided
along a dimension, or every member has all of it. See the room for what is done where both meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock.base.errors import ModelError
from penstock.engine.context.attending import Attending, refused
from penstock.engine.context.leaves import through
from penstock.engine.context.masks import FixedValues, NotFixedError
from penstock.engine.context.ring import ring_attention
from penstock.engine.context.rules import rule_of
from penstock.engine.context.values import (
    dropped,
    dropped_by,
    own_positions,
    summed_cross_entropy,
)
from penstock.engine.context.zigzag import shares
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.recorded import SHARERS
from penstock.engine.tensor.recorded_rules import Rule, ShardedDim, shape_of
from penstock.engine.tracing.graphs import leaves_of_output
from penstock.engine.tracing.layers import CapturedLayer


class WholeValue(NamedTuple):
    """A value that all members have.

    Attributes:
        from_inputs: whether it was computed from the model's inputs.
        is_learned: whether it was computed from parameters, and not by way of positions: each
            member has a term of its gradient.
        is_sum: whether it is a sum over all positions, such as a loss: each member has the whole
            gradient.
    """

    from_inputs: bool = False
    is_learned: bool = False
    is_sum: bool = False


class LayerCode(NamedTuple):
    """A layer as a member runs it.

    Attributes:
        graph: the operations.
        attentions: the modules of torch's attention that it calls, by their names in it.
        ways: how each value that it gives is divided; ``None`` for those that all members have.
    """

    graph: fx.Graph
    attentions: tuple[str, ...]
    ways: tuple[ShardedDim | None, ...]


@dataclass
class ModelWalk:
    """What is known of a model's values, layer after layer.

    Attributes:
        size: how many members there are.
        index: for which of them layers are written.
        divided: how values are divided that are.
        whole: what is known of the others.
        sources: the values of earlier layers that placeholders stand for.
    """

    size: int
    index: int
    divided: dict[fx.Node, ShardedDim] = field(default_factory=dict)
    whole: dict[fx.Node, WholeValue] = field(default_factory=dict)
    sources: dict[fx.Node, Any] = field(default_factory=dict)

    def enter(self, graph: fx.Graph, before: Sequence[Any] | None) -> None:
        """Take over what is known of a layer's inputs.

        Args:
            before: what the layer before gives; ``None`` of the first, which is given the model's
                inputs.
        """
        given = [node for node in graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(given):
            if before is None:
                self.whole[node] = WholeValue(from_inputs=True)
                continue
            source = self.sources[node] = before[place]
            if source in self.divided:
                self.divided[node] = self.divided[source]
            else:
                self.whole[node] = self.whole.get(source, WholeValue())


def written(layers: Sequence[NamedLayer], training: bool, size: int, index: int) -> list[LayerCode]:
    """The layers of a captured model as one member runs them.

    Args:
        training: in which mode.
        size: how many members there are.
        index: for which.

    Raises:
        ModelError: a layer mixes positions elsewhere than in attention, or in attention of a kind
            that cannot go round a ring; or nothing can be divided.
    """
    walk = ModelWalk(size, index)
    codes: list[LayerCode] = []
    before: Sequence[Any] | None = None
    for number, layer in enumerate(layers):
        module = layer.module
        assert isinstance(module, CapturedLayer)
        graph = module.recorded(training)
        walk.enter(graph, before)
        writer = _LayerWriter(walk, layer.name, module, graph, number == len(layers) - 1)
        codes.append(writer.write())
        before = writer.outputs
    if not walk.divided:
        raise ModelError(
            "no layer can be divided by positions: none computes with parameters on inputs that "
            f"are [rows, positions, …] with at least {2 * size} positions; plan without context "
            "ranks"
        )
    return codes


class _LayerWriter:
    """Writes one layer.

    Attributes:
        outputs: the recorded values that it gives.
    """

    def __init__(
        self, walk: ModelWalk, name: str, module: CapturedLayer, recorded: fx.Graph, is_last: bool
    ) -> None:
        self.walk, self.name, self.module, self.recorded = walk, name, module, recorded
        self.is_last = is_last
        self.outputs: Sequence[Any] = ()
        self.graph = fx.Graph()
        self.ours: dict[fx.Node, fx.Node] = {}
        self._cuts: dict[tuple[fx.Node, ShardedDim], fx.Node] = {}
        self._sharers: fx.Node | None = None
        fixed = FixedValues(walk.sources, self._held)
        self.attending = Attending(name, walk.divided, fixed)

    def write(self) -> LayerCode:
        for node in self.recorded.nodes:
            if node.op == "output":
                self._end(node)
            elif node.op in ("placeholder", "get_attr"):
                self._begin(node)
            elif node.op == "call_module":
                self._module(node)
            else:
                self._operation(node)
        ways = tuple(
            self.walk.divided.get(value) if isinstance(value, fx.Node) else None
            for value in self.outputs
        )
        return LayerCode(self.graph, tuple(self.attending.modules), ways)

    def _held(self, node: fx.Node) -> Any:
        value: Any = self.module
        for atom in str(node.target).split("."):
            value = getattr(value, atom)
        if isinstance(value, nn.Parameter):
            raise NotFixedError
        return value

    def _begin(self, node: fx.Node) -> None:
        self._copy(node)
        if node.op == "get_attr":
            held = _attribute(self.module, str(node.target))
            self.walk.whole[node] = WholeValue(is_learned=isinstance(held, nn.Parameter))

    def _end(self, node: fx.Node) -> None:
        values: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        self.outputs = values
        if self.is_last and self.walk.divided:
            self._check_learned(values)
        self.graph.output(fx.node.map_arg(list(values), self.ours.__getitem__))

    def _check_learned(self, outputs: Sequence[Any]) -> None:
        for value in outputs:
            if isinstance(value, fx.Node) and self.walk.whole.get(value, WholeValue()).is_learned:
                raise self._refused(
                    value,
                    "gives the model's output what every context rank computes from all of its "
                    "parameters, so that their gradients would count once for each",
                )

    # ----------------------------------------------------------------------- writing

    def call(self, function: Callable[..., Any], value: fx.Node, *args: Any, **kw: Any) -> fx.Node:
        """Call a function with a value and the group."""
        return self.graph.call_function(function, (value, self.sharers(), *args), kw)

    def sharers(self) -> fx.Node:
        """The group, as the layer's code reads it."""
        if self._sharers is None:
            self._sharers = self.graph.create_node("get_attr", SHARERS)
        return self._sharers

    def _copy(self, node: fx.Node, own: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        mine = (own or self.ours).__getitem__
        args, kwargs = fx.node.map_arg(node.args, mine), fx.node.map_arg(node.kwargs, mine)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        self.ours[node] = made
        return made

    def _cut(self, value: fx.Node, divided: ShardedDim) -> fx.Node:
        """A member's positions of a whole value."""
        key = value, divided
        if key not in self._cuts:
            self._cuts[key] = self.call(own_positions, self.ours[value], *divided[:3])
        return self._cuts[key]

    def _refused(self, node: fx.Node, why: str) -> ModelError:
        return refused(self.name, node, why)

    # ----------------------------------------------------------------------- operations

    def _operation(self, node: fx.Node) -> None:
        name = _name(node)
        if name == "scaled_dot_product_attention" and self._attends(node):
            return
        if name in ("cross_entropy_loss",) and self._sums(node):
            return
        if name == "dropout" and node.args[0] in self.walk.divided:
            divided = self.walk.divided[node] = self.walk.divided[node.args[0]]  # type: ignore[index]
            own = self.ours[node.args[0]]  # type: ignore[index]
            self.ours[node] = self.graph.call_function(
                dropped, (own, *node.args[1:3], self.sharers(), *divided[:3])
            )
            return
        if not any(value in self.walk.divided for value in node.all_input_nodes):
            self._whole(node)
            return
        if name == "sym_size":
            self._size(node)
            return
        if node.target is leaves_of_output:
            self._copy(node)
            self.walk.divided[node] = self.walk.divided[node.args[0]]  # type: ignore[index]
            return
        rule = rule_of(node, self.walk.divided, self.walk.index)
        if rule is None or rule.divided is None or self._overwrites(node, rule):
            raise self._refused(
                node, "mixes positions of the sequence, or is not known to treat them alike"
            )
        self._by_positions(node, rule, self.walk.divided)

    def _by_positions(self, node: fx.Node, rule: Rule, known: Mapping[fx.Node, ShardedDim]) -> None:
        """An operation on a member's positions."""
        divided, output = rule.divided, shape_of(node)
        assert divided is not None
        own = dict(self.ours)
        for value, cut in known.items():
            if value not in self.walk.divided:
                own[value] = self._cut(value, cut)
        for value in rule.cut:
            shape = shape_of(value)
            assert shape is not None and output is not None
            own[value] = self._cut(value, divided.at(divided.dim + len(shape) - len(output)))
        made = self._copy(node, own)
        if rule.arguments is not None:
            made.args = fx.node.map_arg(rule.arguments, own.__getitem__)
        self.walk.divided[node] = divided

    def _overwrites(self, node: fx.Node, rule: Rule) -> bool:
        """Whether an operation writes into a whole value, of which it would be given a copy."""
        schema = getattr(node.target, "_schema", None)
        return bool(schema is not None and schema.is_mutable and node.args[0] in rule.cut)

    def _size(self, node: fx.Node) -> None:
        value, dim = node.args[:2]
        assert isinstance(value, fx.Node)
        shape = shape_of(value) or [0]
        if dim % len(shape) == self.walk.divided[value].dim:  # type: ignore[operator]
            raise self._refused(
                node,
                "asks for a number of positions that may vary; capture the model for sequences of "
                'one length (dynamic="rows")',
            )
        self._copy(node)
        self.walk.whole[node] = WholeValue()

    def _whole(self, node: fx.Node) -> None:
        """An operation on what all members have: the first that meets inputs and parameters
        divides them."""
        given = [self.walk.whole.get(value, WholeValue()) for value in node.all_input_nodes]
        start = self._start(node) if any(own.is_learned for own in given) else None
        if start is not None:
            rule = rule_of(node, start, self.walk.index)
            if rule is not None and rule.divided is not None:
                self._by_positions(node, rule, start)
                return
        self._copy(node)
        self.walk.whole[node] = self._of_all(node, given)

    def _of_all(
        self, node: fx.Node, given: Sequence[WholeValue], learned: bool = False
    ) -> WholeValue:
        made = WholeValue(
            from_inputs=any(own.from_inputs for own in given),
            is_learned=learned or any(own.is_learned for own in given),
            is_sum=any(own.is_sum for own in given),
        )
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.is_floating_point():
            made = made._replace(is_learned=False)
        if made.is_sum and made.is_learned:
            raise self._refused(
                node,
                "adds to a sum over positions what every context rank computes from all of its "
                "parameters, so that their gradients would count once for each",
            )
        return made

    def _start(self, node: fx.Node) -> dict[fx.Node, ShardedDim] | None:
        """Where positions begin to be divided: an input that meets parameters."""
        for value in node.all_input_nodes:
            own, shape = self.walk.whole.get(value, WholeValue()), shape_of(value)
            starts = own.from_inputs and not own.is_learned and not own.is_sum
            if starts and shape is not None and len(shape) > 1 and shape[1] >= 2 * self.walk.size:
                if not isinstance(value.meta["val"].shape[1], int):
                    raise self._refused(
                        node,
                        "was recorded for any number of positions, and context ranks divide as "
                        'many as were recorded; capture the model with dynamic="rows"',
                    )
                return {value: ShardedDim(1, shape[1], 1, shares(shape[1], self.walk.size))}
        return None

    def _attends(self, node: fx.Node) -> bool:
        call = self.attending.operation(node)
        if call is None:
            return False
        queries, keys, values = (self.ours[value] for value in call.values)
        self.ours[node] = self.graph.call_function(
            ring_attention, (queries, keys, values, self.sharers(), call.length, call.scale)
        )
        self.walk.divided[node] = call.divided
        return True

    def _sums(self, node: fx.Node) -> bool:
        """A loss that is a mean, or a sum, over positions."""
        logits, targets = node.args[:2]
        assert isinstance(logits, fx.Node) and isinstance(targets, fx.Node)
        divided, reduction = self.walk.divided.get(logits), _at(node, 3, "reduction", 1)
        shape, wanted = shape_of(logits), shape_of(targets)
        if divided is None or reduction == 0 or shape is None or wanted is None:
            return False
        has_classes = len(wanted) == len(shape)  # probabilities of each class
        if len(shape) < 2 or divided.dim == 1:
            raise self._refused(node, "takes positions of the sequence for classes")
        place = divided.dim - (divided.dim > 1 and not has_classes)
        there = self.walk.divided.get(targets)
        if there is not None and there != divided.at(place):
            raise self._refused(node, "has targets of other positions than its logits")
        own = self.ours[targets] if there else self._cut(targets, divided.at(place))
        weight = _at(node, 2, "weight", None)
        if isinstance(weight, fx.Node):
            weight = self.ours[weight]
        made = self.graph.call_function(
            summed_cross_entropy,
            (self.ours[logits], own, self.sharers(), weight, reduction),
            {
                "ignore_index": _at(node, 4, "ignore_index", -100),
                "label_smoothing": _at(node, 5, "label_smoothing", 0.0),
            },
        )
        self.ours[node] = made
        self.walk.whole[node] = WholeValue(from_inputs=True, is_sum=True)
        return True

    # ----------------------------------------------------------------------- modules

    def _module(self, node: fx.Node) -> None:
        path = str(node.target)
        module = self.module.get_submodule(path)
        known: Mapping[fx.Node, ShardedDim] = {
            value: self.walk.divided[value]
            for value in node.all_input_nodes
            if value in self.walk.divided
        }
        if isinstance(module, nn.MultiheadAttention) and known:
            self._attends_by_module(node, module)
            return
        has_parameters = next(module.parameters(), None) is not None
        if not known:
            start = self._start(node) if has_parameters else None
            if start is not None and not isinstance(module, nn.MultiheadAttention):
                begun = through(module, node, start)
                if begun.divided is not None:
                    self._by_positions(node, Rule(begun.divided), start)
                    return
            self._copy(node)
            given = [self.walk.whole.get(value, WholeValue()) for value in node.all_input_nodes]
            self.walk.whole[node] = self._of_all(node, given, learned=has_parameters)
            return
        value = node.args[0] if node.args else None
        if isinstance(module, nn.Dropout) and value in known:
            divided = self.walk.divided[node] = known[value]  # type: ignore[index]
            own = self.graph.create_node("get_attr", path)
            self.ours[node] = self.graph.call_function(
                dropped_by,
                (self.ours[value], own, self.sharers(), *divided[:3]),  # type: ignore[index]
            )
            return
        after = through(module, node, known)
        if after.trouble:
            raise self._refused(node, f"({type(module).__name__}): {after.trouble}")
        self._copy(node)
        if after.divided is not None:
            self.walk.divided[node] = after.divided
        else:
            self.walk.whole[node] = WholeValue(is_learned=has_parameters)

    def _attends_by_module(self, node: fx.Node, module: nn.MultiheadAttention) -> None:
        call = self.attending.module(node, module)
        queries, keys, values = (self.ours[value] for value in call.values)
        self.ours[node] = self.graph.create_node(
            "call_module", node.target, (queries, keys, values), {"length": call.length}
        )
        self.walk.divided[node] = call.divided


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for atom in path.split("."):
        value = getattr(value, atom)
    return value


def _at(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).removeprefix("aten::")
    return getattr(node.target, "__name__", "")
