"""Profiles that PipeDream's profiler wrote (``graph.txt``), read as a ``LayerGraph``.

A line per node, in any order, then a line per edge that begins with a tab::

    node2 -- Linear(64, 10) -- forward_compute_time=1.5, backward_compute_time=3.0, ...
    <tab>node1 -- node2

Times are milliseconds per minibatch, sizes are bytes. A node with several outputs has a list of
activation sizes, ``[8; 4]``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import isfinite

from penstock.base.errors import FileError
from penstock.base.values import read_text
from penstock.core.graph import Layer, LayerGraph

_SEPARATOR = " -- "
_COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SHORT_BACKWARD = 0.1
"""A backward of a layer with parameters that takes less than this share of its forward was not
measured as a whole: hooks of the profiler fire early where a module has modules inside."""


@dataclass
class _ProfiledNode:
    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    parameter_bytes: int
    line: int
    sources: list[str] = field(default_factory=list)

    @property
    def is_input(self) -> bool:
        return re.fullmatch(r"Input\d*", self.kind) is not None

    @property
    def number(self) -> tuple[int, int]:
        """Nodes are numbered as they ran; without a number, the line decides."""
        digits = re.search(r"(\d+)$", self.name)
        return (int(digits[1]) if digits else -1, self.line)


class _Text:
    """The lines of one file, with what is wrong about them."""

    def __init__(self, content: str, where: str) -> None:
        self.where = where
        self.lines = content.splitlines()

    def wrong(self, line: int, reason: str) -> FileError:
        return FileError(f"{self.where}, line {line}: {reason}")

    def parts(self) -> Iterator[tuple[int, bool, list[str]]]:
        """(line number, whether it is an edge, what stands between the separators)."""
        for number, line in enumerate(self.lines, 1):
            if line.strip():
                yield number, line[0].isspace(), line.strip().split(_SEPARATOR)


def read_pipedream_graph(path: str | os.PathLike[str]) -> LayerGraph:
    """Read a profile of PipeDream's.

    Layers bear the names of their nodes and stand in the order in which they ran: that of the
    nodes' numbers, as far as it agrees with the edges. ``inputs`` says what each reads.

    Input nodes are dropped, since their time is that of loading data; their sizes are the model's
    ``input_bytes``. Lists of sizes are summed. A profile has one time for a backward: it counts as
    half for the input and half for the weights where a layer has parameters, as all for the weights
    where such a layer reads the model's input only (nobody asks for that gradient), and as all for
    the input where it has none. What a layer keeps for its backward is not in the file; its output
    stands for it, as in PipeDream.

    Args:
        path: where the ``graph.txt`` is.

    Returns:
        The profile of one minibatch as one microbatch: its number of rows is not in the file, and
        ``microbatch_size`` is 1. Odd measurements are in the ``warnings`` of their layers.

    Raises:
        FileError: no such file, or it has another format; file, line and reason are named.
    """
    return parse_pipedream_graph(read_text(path), str(path))


def parse_pipedream_graph(content: str, where: str = "text") -> LayerGraph:
    """As ``read_pipedream_graph``, of the text of a file.

    Args:
        content: the text.
        where: the name to use in errors, for example the path of the file.
    """
    text = _Text(content, where)
    nodes = _nodes(text)
    _connect(text, nodes)
    ordered = _in_order(text, nodes)
    layers = tuple(_layer(node, nodes) for node in ordered if not node.is_input)
    if not layers:
        raise FileError(f"{where} has no node besides inputs; give a graph.txt of PipeDream's")
    input_bytes = sum(node.output_bytes for node in ordered if node.is_input)
    return LayerGraph(layers=layers, input_bytes=input_bytes, device="as profiled by PipeDream")


def _nodes(text: _Text) -> dict[str, _ProfiledNode]:
    nodes: dict[str, _ProfiledNode] = {}
    for line, is_edge, parts in text.parts():
        if is_edge:
            continue
        if len(parts) not in (3, 4):
            raise text.wrong(line, "a node is written '<node> -- <module> -- <costs>'")
        name, kind, costs = parts[:3]
        if name in nodes:
            raise text.wrong(line, f"{name} was there in line {nodes[name].line} already")
        forward, backward, size, parameters = _costs(text, line, costs)
        nodes[name] = _ProfiledNode(
            name=name,
            kind=kind,
            forward_seconds=forward / 1000,
            backward_seconds=backward / 1000,
            output_bytes=round(size),
            parameter_bytes=round(parameters),
            line=line,
        )
    return nodes


def _costs(text: _Text, line: int, costs: str) -> list[float]:
    pairs = dict(pair.partition("=")[::2] for pair in costs.split(", "))
    missing = [name for name in _COSTS if name not in pairs]
    if missing:
        raise text.wrong(line, f"{' and '.join(missing)} is missing")
    return [_number(text, line, name, pairs[name]) for name in _COSTS]


def _number(text: _Text, line: int, name: str, value: str) -> float:
    """A number ≥ 0, or the sum of a list of them."""
    items = value[1:-1].split(";") if value.startswith("[") and value.endswith("]") else [value]
    try:
        numbers = [float(item) for item in items]
    except ValueError:
        raise text.wrong(line, f"{name} is {value!r}, which is no number") from None
    if not all(isfinite(number) and number >= 0 for number in numbers):
        raise text.wrong(line, f"{name} is {value}, but must be finite and ≥ 0")
    return sum(numbers)


def _connect(text: _Text, nodes: dict[str, _ProfiledNode]) -> None:
    for line, is_edge, parts in text.parts():
        if not is_edge:
            continue
        if len(parts) != 2:
            raise text.wrong(line, "an edge is written '<node> -- <node>'")
        for name in parts:
            if name not in nodes:
                raise text.wrong(line, f"no node is called {name!r}")
        source, reader = parts
        if source not in nodes[reader].sources:
            nodes[reader].sources.append(source)


def _in_order(text: _Text, nodes: dict[str, _ProfiledNode]) -> list[_ProfiledNode]:
    """Topologically, and of those that could come next always the one with the least number."""
    readers: dict[str, list[_ProfiledNode]] = {name: [] for name in nodes}
    waits = {name: len(node.sources) for name, node in nodes.items()}
    for node in nodes.values():
        for source in node.sources:
            readers[source].append(node)
    ready = [(node.number, name) for name, node in nodes.items() if not waits[name]]
    heapify(ready)
    ordered = []
    while ready:
        _, name = heappop(ready)
        ordered.append(nodes[name])
        for reader in readers[name]:
            waits[reader.name] -= 1
            if not waits[reader.name]:
                heappush(ready, (reader.number, reader.name))
    if len(ordered) < len(nodes):
        first = min((node for node in nodes.values() if waits[node.name]), key=lambda n: n.line)
        raise text.wrong(first.line, f"{first.name} is on or behind a circle of edges")
    return ordered


def _layer(node: _ProfiledNode, nodes: dict[str, _ProfiledNode]) -> Layer:
    inputs = [nodes[name] for name in node.sources if not nodes[name].is_input]
    weight_share = (0.5 if inputs else 1.0) if node.parameter_bytes else 0.0
    return Layer(
        name=node.name,
        kind=node.kind.partition("(")[0],
        forward_seconds=node.forward_seconds,
        backward_input_seconds=node.backward_seconds * (1 - weight_share),
        backward_weight_seconds=node.backward_seconds * weight_share,
        activation_bytes=node.output_bytes,
        output_bytes=node.output_bytes,
        parameter_bytes=node.parameter_bytes,
        inputs=tuple(source.name for source in inputs),
        signature=node.kind,
        warnings=tuple(_warnings(node, inputs)),
    )


def _warnings(node: _ProfiledNode, inputs: list[_ProfiledNode]) -> Iterator[str]:
    if node.parameter_bytes and node.backward_seconds < _SHORT_BACKWARD * node.forward_seconds:
        yield (
            f"its backward ({node.backward_seconds:.3g} s) is far below its forward "
            f"({node.forward_seconds:.3g} s), though it has parameters"
        )
    if node.kind.startswith("Concat") and node.output_bytes < sum(n.output_bytes for n in inputs):
        yield "its output is less than its inputs together; the profiler recorded only one of them"
