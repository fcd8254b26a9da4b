"""From a traced graph to layers: which nodes go together, and what passes between them.

``segments_of`` cuts a graph into layers; ``ValueFlow`` has the values that live between these, in
one order of them.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.core.example import Granularity
from penstock.engine.tracing.exports import gives_alias, written_arguments
from penstock.engine.tracing.graphs import Traced

_NO_WORK = (nn.Identity, nn.Flatten, nn.Unflatten)


@dataclass
class LayerNodes:
    """The nodes of a graph that become one layer.

    Attributes:
        name: the name of a module, or of where a function was called.
        nodes: in execution order.
    """

    name: str
    nodes: list[fx.Node] = field(default_factory=list)


class _Namer:
    """Names the layers that nodes open.

    Args:
        model: the model that was traced.
        granularity: ``"module"``: every call of a module is a layer; ``"block"``: the entries of
            lists of modules are.
    """

    def __init__(self, model: nn.Module, granularity: Granularity) -> None:
        self._model = model
        self._by_block = granularity == "block"
        self._listed = _listed(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def opened(self, node: fx.Node) -> tuple[str, bool] | None:
        """The name of the layer that a node would open, and whether it opens one even within a
        layer of that name; ``None`` if it goes with the nodes before it."""
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            if isinstance(module, _NO_WORK):
                return None
            return self._block(str(node.target)), not self._by_block
        reads = [str(read.target) for read in node.all_input_nodes if read.op == "get_attr"]
        own = [name for name in reads if name in self._parameters]
        if not own:
            return None
        owner = own[0].rpartition(".")[0]
        name = enclosing(node) or (_function_name(node) if owner else own[0])
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = owner or name  # a graph within the graph, which hides the module it came from
        return self._block(name), False

    def _block(self, name: str) -> str:
        return _entry(name, self._listed) if self._by_block else name


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """For each name of a layer, the entry of a list of modules that it is part of, or else the name
    without the number of the call."""
    listed = _listed(model)
    return [_entry(called(name), listed) for name in names]


def called(name: str) -> str:
    """The name of a layer without the number of its call."""
    return name.partition("#")[0]


def _listed(model: nn.Module) -> set[str]:
    """The names of a model's lists of modules."""
    return {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }


def _entry(name: str, listed: Container[str]) -> str:
    atoms = name.split(".")
    for count in range(1, len(atoms)):
        if ".".join(atoms[:count]) in listed:
            return ".".join(atoms[: count + 1])
    return name


def enclosing(node: fx.Node) -> str:
    """The qualified name of the module whose code made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(entry[0]) for entry in stack.values()]
    # Calls that torch adds for itself name no module of the model.
    return names[-1] if names and not names[-1].startswith("_empty_nn_module") else ""


def _function_name(node: fx.Node) -> str:
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target)
    return str(name)


def segments_of(
    model: nn.Module, traced: Traced, granularity: Granularity, known: Sequence[str] | None = None
) -> list[LayerNodes]:
    """Cut a graph where modules are called.

    What happens between two calls goes with the first; what comes before all, with the first layer.

    Args:
        granularity: a layer per module, or per block.
        known: if given, only layers of these names are made.
    """
    namer = _Namer(model, granularity)
    segments: list[LayerNodes] = []
    early: list[fx.Node] = []
    seen: dict[str, int] = defaultdict(int)
    current = ""
    for node in traced.graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        opened = namer.opened(node)
        if opened is not None and (opened[1] or opened[0] != current):
            current = opened[0]
            seen[current] += 1
            name = current if seen[current] == 1 else f"{current}#{seen[current]}"
            if known is None or name in known:
                segments.append(LayerNodes(name))
        (segments[-1].nodes if segments else early).append(node)
    if not segments:
        segments.append(LayerNodes(type(model).__name__))
    segments[0].nodes[:0] = early
    return _merged(segments, model)


def _merged(segments: list[LayerNodes], model: nn.Module) -> list[LayerNodes]:
    """Keep what overwrites a value in one layer with the views of that value."""
    layer_of = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    first = list(range(len(segments)))
    for start, stop in _overwritten_views(layer_of, model):
        for index in range(start, stop + 1):
            first[index] = min(first[index], start)
    result: list[LayerNodes] = []
    for index, segment in enumerate(segments):
        if first[index] == index or not result:
            result.append(LayerNodes(segment.name))
        result[-1].nodes.extend(segment.nodes)
    return result


def _overwritten_views(
    layer_of: Mapping[fx.Node, int], model: nn.Module
) -> Iterator[tuple[int, int]]:
    """(first, last) of layers between a view and what overwrites its memory."""
    order = {node: place for place, node in enumerate(layer_of)}
    families: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in layer_of:
        base = _base_of(node)
        for value in overwritten(node, model):
            root = _base_of(value)
            family = families[root]
            others = [member for member in (root, *family) if member is not value]
            read_later = any(
                order.get(user, len(order)) > order[node]
                for member in others
                for user in member.users
            )
            views = [
                layer_of[member] for member in family if member is not root and member in layer_of
            ]
            if read_later and views and min(views) < layer_of[node]:
                yield min(views), layer_of[node]
        families[base].append(node)


def overwritten(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """The values that a node writes into."""
    if node.op == "call_module":
        works_in_place = getattr(model.get_submodule(str(node.target)), "inplace", False)
        return list(node.all_input_nodes[:1]) if works_in_place else []
    if isinstance(node.target, torch._ops.OpOverload):
        written = written_arguments(node, node.target)
        return [value for value in written if isinstance(value, fx.Node)]
    in_place = node.op == "call_method" and str(node.target).rstrip("_") != node.target
    in_place |= node.kwargs.get("inplace") is True or node.target in _IN_PLACE_OPERATORS
    return list(node.all_input_nodes[:1]) if in_place else []


_IN_PLACE_OPERATORS = frozenset(
    (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
)


def _base_of(node: fx.Node) -> fx.Node:
    """The first value whose memory a node's value is known to share."""
    while True:
        source = _viewed(node)
        if source is None:
            return node
        node = source


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        # An entry of a tensor or of a list of views; what a module returns is taken as its own.
        return node.args[0] if node.args[0].op == "call_function" else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return node.args[0] if gives_alias(node.target) else None


def _is_value(node: fx.Node) -> bool:
    """Whether a node's value may pass between layers; what a model holds does not."""
    return node.op not in {"get_attr", "output"}


def _is_number(node: fx.Node) -> bool:
    """Whether a node gives a number, such as the rows of a tensor."""
    return isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat)


def localise_sizes(traced: Traced, segments: Iterable[LayerNodes]) -> None:
    """Read sizes off tensors that a layer has anyway, so that they need not pass through layers."""
    graph = traced.graph
    for segment in segments:
        own = set(segment.nodes)
        known: dict[Any, fx.Node] = {}
        for node in list(segment.nodes):
            for value in node.all_input_nodes:
                if not _is_number(value) or value in own:
                    continue
                wanted = str(value.meta["val"])
                if wanted not in known:
                    dimension = _dimension_of_size(wanted, segment.nodes)
                    if dimension is None:
                        continue
                    with graph.inserting_before(segment.nodes[0]):
                        size = graph.call_function(torch.ops.aten.sym_size.int, dimension)
                    size.meta["val"] = value.meta["val"]
                    known[wanted] = size
                    segment.nodes.insert(0, size)
                node.replace_input_with(value, known[wanted])


def _dimension_of_size(wanted: str, nodes: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor that is made outside of these nodes, and its dimension of the wanted size."""
    own = set(nodes)
    for node in nodes:
        for value in node.all_input_nodes:
            tensor = value.meta.get("val")
            if value in own or not _is_value(value) or not isinstance(tensor, Tensor):
                continue
            for dimension, size in enumerate(tensor.shape):
                if str(size) == wanted:
                    return value, dimension
    return None


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
                last.update((value, index) for value in node.all_input_nodes if _is_value(value))
        end = len(self.segments) - 1
        last.update((value, end) for value in output.all_input_nodes if _is_value(value))
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
            if _is_value(value) and self.maker.get(value, -1) != index
        ]

    def sources(self, index: int) -> list[int]:
        """The indices of the layers that made the tensors that a layer reads."""
        made = (
            self.maker[value]
            for value in self.reads(index)
            if value in self.maker and not _is_number(value)
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
    base = _base_of(node)
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
