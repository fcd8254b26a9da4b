"""Layers of a captured model, written anew for a member that has some of the positions.

All layers are followed in their order, since what a value is depends on what made it: it is divided
along a dimension, or every member has all of it. See the room for what is done where both meet.
Losses that are sums over positions are told by ``loss_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import fx, nn

from penstock.base.errors import ModelError
from penstock.engine.context.attending import Attending
from penstock.engine.context.leaves import through
from penstock.engine.context.ring import ring_attention
from penstock.engine.context.values import (
    dropped,
    dropped_by,
    own_positions,
    summed_cross_entropy,
)
from penstock.engine.context.walk import ModelWalk, WholeValue, refused
from penstock.engine.following.dims import ShardedDim, shape_of
from penstock.engine.following.rule import Rule, name_of, writes
from penstock.engine.following.table import position_rule
from penstock.engine.following.writer import GraphWriter
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tracing.graphs import leaves_of_output
from penstock.engine.tracing.layers import CapturedLayer

_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


class LossCall(NamedTuple):
    """A call of cross-entropy.

    Attributes:
        logits, targets, weight: its values; no weight by default.
        targets_lie: how targets are divided, or to be.
        reduction, ignore_index, label_smoothing: as recorded.
    """

    logits: fx.Node
    targets: fx.Node
    weight: fx.Node | None
    targets_lie: ShardedDim
    reduction: int
    ignore_index: int
    label_smoothing: float


def loss_of(node: fx.Node, walk: ModelWalk) -> LossCall | None:
    """The call that an operation is; ``None`` if it is not of positions that are divided, or gives
    a loss for each.

    Raises:
        ModelError: positions are its classes, or its targets are of others than its logits.
    """
    given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    logits, targets, reduction = given["self"], given["target"], given.get("reduction", 1)
    divided, shape, wanted = walk.divided.get(logits), shape_of(logits), shape_of(targets)
    if divided is None or reduction == 0 or shape is None or wanted is None:
        return None
    if len(shape) < 2 or divided.dim == 1:
        raise refused(walk.layer, node, "takes positions of the sequence for classes")
    has_classes = len(wanted) == len(shape)  # probabilities of each class
    lie = divided.at(divided.dim - (divided.dim > 1 and not has_classes))
    if walk.divided.get(targets, lie) != lie:
        raise refused(walk.layer, node, "has targets of other positions than its logits")
    return LossCall(
        logits,
        targets,
        given.get("weight"),
        lie,
        reduction,
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
    )


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
    for layer in layers:
        module = cast(CapturedLayer, layer.module)
        graph = module.recorded(training)
        walk.enter(layer.name, module, graph, before)
        writer = _LayerWriter(walk, module, graph)
        codes.append(writer.code())
        before = writer.outputs
    walk.end(before or ())
    if not walk.divided:
        raise ModelError(
            "no layer can be divided by positions: none computes with parameters on inputs that "
            f"are [rows, positions, …] with at least {2 * size} positions; plan without context "
            "ranks"
        )
    return codes


class _LayerWriter(GraphWriter):
    """Writes one layer.

    Attributes:
        outputs: the recorded values that it gives.
    """

    def __init__(self, walk: ModelWalk, layer: CapturedLayer, recorded: fx.Graph) -> None:
        super().__init__(recorded, walk.divided)
        self.walk, self.layer = walk, layer
        self.outputs: Sequence[Any] = ()
        self.attending = Attending(walk)
        self._cuts: dict[tuple[fx.Node, ShardedDim], fx.Node] = {}

    def code(self) -> LayerCode:
        """All of it."""
        graph = self.write()
        ways = (
            self.divided.get(value) if isinstance(value, fx.Node) else None
            for value in self.outputs
        )
        return LayerCode(graph, tuple(self.attending.modules), tuple(ways))

    def read(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.walk.read(node)

    def given(self, values: Sequence[Any]) -> list[Any]:
        self.outputs = values
        return fx.node.map_arg(list(values), self.ours.__getitem__)

    def own(self, value: fx.Node, divided: ShardedDim | None) -> fx.Node:
        is_so = divided is None or value in self.divided
        return self.ours[value] if is_so else self.part(value, cast(ShardedDim, divided))

    def part(self, value: fx.Node, divided: ShardedDim) -> fx.Node:
        key = value, divided
        if key not in self._cuts:
            args = self.ours[value], self.sharers, *divided[:3]
            self._cuts[key] = self.graph.call_function(own_positions, args)
        return self._cuts[key]

    def _call(self, node: fx.Node, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the place of an operation."""
        self.ours[node] = self.graph.call_function(function, args)

    def _refused(self, node: fx.Node, why: str) -> ModelError:
        return refused(self.walk.layer, node, why)

    # ----------------------------------------------------------------------- operations

    def operation(self, node: fx.Node) -> None:
        name, walk = name_of(node), self.walk
        if not any(value in walk.divided for value in node.all_input_nodes):
            self._whole(node)
        elif name == "scaled_dot_product_attention":
            self._attends(node)
        elif name == "cross_entropy_loss" and self._sums(node):
            pass
        elif name == "dropout":
            value, *settings = cast(Any, node.args)
            way = walk.divided[node] = walk.divided[value]
            self._call(node, dropped, self.ours[value], *settings, self.sharers, *way[:3])
        elif name == "sym_size":
            self._size(node)
        elif node.target is leaves_of_output:
            self.copy(node)
            walk.divided[node] = walk.divided[node.all_input_nodes[0]]
        else:
            rule = position_rule(node, walk.divided, walk.index)
            if rule is None or self._overwrites(node, rule):
                raise self._refused(
                    node, "mixes positions of the sequence, or is not known to treat them alike"
                )
            self.follow(node, rule, walk.divided)

    def _overwrites(self, node: fx.Node, rule: Rule) -> bool:
        """Whether an operation writes into a whole value, of which it would be given a copy."""
        return writes(node) and node.args[0] in rule.cut

    def _size(self, node: fx.Node) -> None:
        value, dim = cast(Any, node.args[:2])
        if dim % len(shape_of(value) or [0]) == self.walk.divided[value].dim:
            raise self._refused(
                node,
                "asks for a number of positions that may vary; capture the model for sequences of "
                'one length (dynamic="rows")',
            )
        self.copy(node)
        self.walk.whole[node] = WholeValue()

    def _whole(self, node: fx.Node) -> None:
        """An operation on what all members have: the first that meets inputs and parameters
        divides them."""
        if any(self.walk.of(value).is_learned for value in node.all_input_nodes):
            start = self.walk.start(node)
            rule = position_rule(node, start, self.walk.index) if start else None
            if rule is not None:
                self.follow(node, rule, start)
                return
        self.copy(node)
        self.walk.made(node)

    def _attends(self, node: fx.Node) -> None:
        call = self.attending.operation(node)
        values = (self.ours[value] for value in call.values)
        self._call(node, ring_attention, *values, self.sharers, call.length, call.scale)
        self.walk.divided[node] = call.divided

    def _sums(self, node: fx.Node) -> bool:
        """A loss that is a mean, or a sum, over positions."""
        call = loss_of(node, self.walk)
        if call is None:
            return False
        self._call(
            node,
            summed_cross_entropy,
            self.ours[call.logits],
            self.own(call.targets, call.targets_lie),
            self.sharers,
            None if call.weight is None else self.ours[call.weight],
            *call[4:],
        )
        self.walk.whole[node] = WholeValue(from_inputs=True, is_sum=True)
        return True

    # ----------------------------------------------------------------------- modules

    def module(self, node: fx.Node) -> None:
        module, walk = self.layer.get_submodule(str(node.target)), self.walk
        known = {
            value: walk.divided[value] for value in node.all_input_nodes if value in walk.divided
        }
        has_parameters = next(module.parameters(), None) is not None
        if not known:
            self._whole_module(node, module, has_parameters)
        elif isinstance(module, nn.MultiheadAttention):
            call = self.attending.module(node, module)
            values = tuple(self.ours[value] for value in call.values)
            length: dict[str, Any] = {"length": call.length}
            self.ours[node] = self.graph.create_node("call_module", node.target, values, length)
            walk.divided[node] = call.divided
        elif isinstance(module, nn.Dropout):
            value = node.all_input_nodes[0]
            way = walk.divided[node] = known[value]
            own = self.graph.create_node("get_attr", str(node.target))
            self._call(node, dropped_by, self.ours[value], own, self.sharers, *way[:3])
        else:
            after = through(module, node, known)
            if after.trouble:
                raise self._refused(node, f"({type(module).__name__}): {after.trouble}")
            self.copy(node)
            if after.divided is not None:
                walk.divided[node] = after.divided
            else:
                walk.whole[node] = WholeValue(is_learned=has_parameters)

    def _whole_module(self, node: fx.Node, module: nn.Module, has_parameters: bool) -> None:
        """A module that is given what all members have; see ``_whole``."""
        start = self.walk.start(node) if has_parameters else {}
        if start and not isinstance(module, nn.MultiheadAttention):
            begun = through(module, node, start)
            if begun.divided is not None:
                self.follow(node, Rule(begun.divided), start)
                return
        self.copy(node)
        self.walk.made(node, learned=has_parameters)
