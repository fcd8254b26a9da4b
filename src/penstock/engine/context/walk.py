"""What is known of a captured model's values, layer after layer: by positions, or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from penstock.base.errors import ModelError
from penstock.engine.context.masks import FixedValues, NotFixedError
from penstock.engine.context.zigzag import shares
from penstock.engine.following.dims import ShardedDim, shape_of
from penstock.engine.tracing.layers import CapturedLayer
from penstock.engine.tracing.segments import enclosing


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


class ModelWalk:
    """What is known so far.

    Args:
        size: how many members there are.
        index: for which of them layers are written.

    Attributes:
        size, index: as given.
        divided: how values are divided that are.
        whole: what is known of the others.
        fixed: values that depend on nothing but sizes.
        layer: the name of the layer at hand.
    """

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index
        self.divided: dict[fx.Node, ShardedDim] = {}
        self.whole: dict[fx.Node, WholeValue] = {}
        self.layer = ""
        self._sources: dict[fx.Node, Any] = {}
        self._modules: dict[fx.Graph, CapturedLayer] = {}
        self.fixed = FixedValues(self._sources, self._constant)

    def enter(
        self, name: str, module: CapturedLayer, graph: fx.Graph, before: Sequence[Any] | None
    ) -> None:
        """Go on to a layer.

        Args:
            before: what the layer before gives; ``None`` of the first, which is given the model's
                inputs.
        """
        self.layer, self._modules[graph] = name, module
        given = [node for node in graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(given):
            if before is None:
                self.whole[node] = WholeValue(from_inputs=True)
                continue
            source = self._sources[node] = before[place]
            if source in self.divided:
                self.divided[node] = self.divided[source]
            else:
                self.whole[node] = self.of(source)

    def of(self, value: Any) -> WholeValue:
        """What is known of a whole value."""
        return self.whole.get(value, WholeValue())

    def read(self, node: fx.Node) -> None:
        """A layer reads what it holds."""
        self.whole[node] = WholeValue(is_learned=isinstance(self._held(node), nn.Parameter))

    def _held(self, node: fx.Node) -> Any:
        value: Any = self._modules[node.graph]
        for atom in str(node.target).split("."):
            value = getattr(value, atom)
        return value

    def _constant(self, node: fx.Node) -> Any:
        held = self._held(node)
        if isinstance(held, nn.Parameter):
            raise NotFixedError
        return held

    def start(self, node: fx.Node) -> dict[fx.Node, ShardedDim]:
        """How an input lies that meets parameters, where positions begin to be divided; nothing if
        none is [rows, positions, …].

        Raises:
            ModelError: the model was recorded for any number of positions.
        """
        for value in node.all_input_nodes:
            own, shape = self.of(value), shape_of(value)
            starts = own.from_inputs and not own.is_learned and not own.is_sum
            if not starts or shape is None or len(shape) < 2 or shape[1] < 2 * self.size:
                continue
            if not isinstance(value.meta["val"].shape[1], int):
                raise refused(
                    self.layer,
                    node,
                    "was recorded for any number of positions, and context ranks divide as many as "
                    'were recorded; capture the model with dynamic="rows"',
                )
            return {value: ShardedDim(1, shape[1], 1, shares(shape[1], self.size))}
        return {}

    def made(self, node: fx.Node, *, learned: bool = False) -> None:
        """An operation or a module has made a whole value of whole ones.

        Args:
            learned: whether it has parameters itself.

        Raises:
            ModelError: it adds values whose gradients count differently.
        """
        given = [self.of(value) for value in node.all_input_nodes]
        result = WholeValue(
            from_inputs=any(own.from_inputs for own in given),
            is_learned=learned or any(own.is_learned for own in given),
            is_sum=any(own.is_sum for own in given),
        )
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.is_floating_point():
            result = result._replace(is_learned=False)
        if result.is_sum and result.is_learned:
            raise refused(
                self.layer,
                node,
                "adds to a sum over positions what every context rank computes from all of its "
                "parameters, so that their gradients would count once for each",
            )
        self.whole[node] = result

    def end(self, outputs: Sequence[Any]) -> None:
        """The last layer gives what the model returns.

        Raises:
            ModelError: some of it is computed from parameters by every member.
        """
        for value in outputs:
            if self.divided and self.of(value).is_learned:
                raise refused(
                    self.layer,
                    value,
                    "gives the model's output what every context rank computes from all of its "
                    "parameters, so that their gradients would count once for each",
                )


def refused(layer: str, node: fx.Node, why: str) -> ModelError:
    """The error for a recorded operation, or a call of a module, by its name."""
    where = enclosing(node)
    inside = f" (in {where!r})" if where else ""
    return ModelError(
        f"layer {layer!r}: {node.target}{inside} {why}. Each context rank has some of the "
        "positions of the sequence, so only attention may mix them; plan without context ranks"
    )
