"""What passes between the layers of a traced model, in one order of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx, nn

from penstock.engine.tracing.graphs import Traced
from penstock.engine.tracing.segments import LayerNodes, base_of, is_number, is_value, overwritten


class ValueFlow:
    """The values that live between the layers of a traced model.

    Args:
        segments: the nodes of each layer, in an order in which layers can run.

    Attributes:
        inputs: the model's inputs, one node for each leaf.
        outputs: what the model returns, flat; constants stand for themselves.
        live: for every layer but the last, the values behind it that a later one reads, in the
            order in which they were made.
        maker: the index of the layer that makes a value.
        last_reader: the index of the last layer that reads a value, if that is a later one.
    """

    def __init__(self, traced: Traced, segments: Sequence[LayerNodes]) -> None:
        self.segments = tuple(segments)
        nodes = list(traced.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        (given,) = nodes[-1].args
        assert isinstance(given, list | tuple)
        self.outputs = list(given)
        self.maker = {
            node: index for index, segment in enumerate(segments) for node in segment.nodes
        }
        self.last_reader = self._last_readers(nodes[-1])
        order = [*self.inputs, *(node for segment in segments for node in segment.nodes)]
        self.live: list[list[fx.Node]] = [
            [
                node
                for node in order
                if self.maker.get(node, -1) <= index < self.last_reader.get(node, -1)
            ]
            for index in range(len(segments) - 1)
        ]

    def _last_readers(self, output: fx.Node) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for index, segment in enumerate(self.segments):
            for node in segment.nodes:
                last.update((value, index) for value in node.all_input_nodes if is_value(value))
        end = len(self.segments) - 1
        last.update((value, end) for value in output.all_input_nodes if is_value(value))
        return {value: index for value, index in last.items() if self.maker.get(value, -1) < index}

    def reads(self, index: int) -> list[fx.Node]:
        """The values that a layer reads of earlier layers and of the model's inputs."""
        nodes = self.segments[index].nodes
        values = [value for node in nodes for value in node.all_input_nodes]
        if index == len(self.segments) - 1:
            values += [value for value in self.outputs if isinstance(value, fx.Node)]
        return [
            value
            for value in dict.fromkeys(values)
            if is_value(value) and self.maker.get(value, -1) != index
        ]

    def sources(self, index: int) -> list[int]:
        """The indices of the layers that made the tensors that a layer reads."""
        made = (
            self.maker[value]
            for value in self.reads(index)
            if value in self.maker and not is_number(value)
        )
        return sorted(set(made))


def must_follow(model: nn.Module, flow: ValueFlow) -> list[set[int]]:
    """For each layer, the indices of those that have to run before it.

    Besides data, what overwrites a value or moves statistics keeps its order.
    """
    before: list[set[int]] = [
        {flow.maker[value] for value in flow.reads(index) if value in flow.maker}
        for index in range(len(flow.segments))
    ]
    written = {
        _memory(value)
        for segment in flow.segments
        for node in segment.nodes
        for value in overwritten(node, model)
    }
    users: Mapping[object, list[int]] = defaultdict(list)
    for index, segment in enumerate(flow.segments):
        for key in _kept_in_order(segment, model, written):
            users[key].append(index)
    for indices in users.values():
        for first, second in itertools.pairwise(indices):
            before[second].add(first)
    return before


def _memory(node: fx.Node) -> object:
    base = base_of(node)
    # Each use of a buffer has a node of its own; its name is what they share.
    return base.target if base.op == "get_attr" else base


def _kept_in_order(segment: LayerNodes, model: nn.Module, written: set[object]) -> set[object]:
    keys: set[object] = set()
    for node in segment.nodes:
        keys |= {_memory(value) for value in (node, *node.all_input_nodes)} & written
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if any(True for _ in module.buffers()):
                keys.add(module)
    return keys
