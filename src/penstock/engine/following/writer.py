"""The walk through a recorded graph, which is written anew for one member.

Sizes stand in a graph as constants, for whole values. Behind what divides a value, its operations
are followed by the rules of the room, and performed with the member's parts; a whole value that
meets such is cut. What is to be done where no rule helps, and with modules, is for who walks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from penstock.engine.following.dims import Known, ShardedDim, shape_of
from penstock.engine.following.rule import Rule

SHARERS = "sharers"
"""The attribute of a shared layer that its code reads where it needs the group."""


class GraphWriter(ABC):
    """Writes a graph for one member.

    Args:
        recorded: with the shapes that values had.
        divided: how values are divided that are; more of them become known.

    Attributes:
        recorded, divided: as given.
        graph: what the member runs.
        ours: its value in the place of each recorded one.
    """

    def __init__(self, recorded: fx.Graph, divided: dict[fx.Node, ShardedDim]) -> None:
        self.recorded, self.divided = recorded, divided
        self.graph = fx.Graph()
        self.ours: dict[fx.Node, fx.Node] = {}
        self._sharers: fx.Node | None = None

    def write(self) -> fx.Graph:
        """Walk through all of it."""
        for node in self.recorded.nodes:
            if node.op == "output":
                self.graph.output(self.given(node.args[0]))
            elif node.op == "call_module":
                self.module(node)
            elif node.op == "call_function":
                self.operation(node)
            else:
                self.copy(node)
                self.read(node)
        return self.graph

    @abstractmethod
    def operation(self, node: fx.Node) -> None:
        """Perform an operation."""

    @abstractmethod
    def module(self, node: fx.Node) -> None:
        """Call a module."""

    @abstractmethod
    def read(self, node: fx.Node) -> None:
        """A value that is given, or held, has been read."""

    @abstractmethod
    def given(self, values: Sequence[Any]) -> list[Any]:
        """What the member gives for the values that the graph gives."""

    @abstractmethod
    def own(self, value: fx.Node, divided: ShardedDim | None) -> fx.Node:
        """A member's value for an operation that is followed.

        Args:
            divided: how it is, or is to be; ``None`` for what is whole there.
        """

    @abstractmethod
    def part(self, value: fx.Node, divided: ShardedDim) -> fx.Node:
        """A member's part of a whole value."""

    @property
    def sharers(self) -> fx.Node:
        """The group, as the graph reads it."""
        if self._sharers is None:
            self._sharers = self.graph.create_node("get_attr", SHARERS)
        return self._sharers

    def copy(self, node: fx.Node, own: Callable[[fx.Node], fx.Node] | None = None) -> fx.Node:
        """Perform a node as it is recorded.

        Args:
            own: the member's value of each that it reads; by default ``ours``.
        """
        own = own or self.ours.__getitem__
        args, kwargs = fx.node.map_arg(node.args, own), fx.node.map_arg(node.kwargs, own)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        self.ours[node] = made
        return made

    def follow(self, node: fx.Node, rule: Rule, known: Known) -> None:
        """Perform a node with a member's parts.

        Args:
            known: how values are divided that are, or are to be here.
        """
        output, own = shape_of(node), dict[fx.Node, fx.Node]()
        for value in rule.cut:
            shape = shape_of(value)
            assert shape is not None and output is not None and rule.divided is not None
            place = rule.divided.dim + len(shape) - len(output)
            own[value] = self.part(value, rule.divided.at(place))
        for value in node.all_input_nodes:
            if value not in own:
                own[value] = self.own(value, known.get(value))
        made = self.copy(node, own.__getitem__)
        if rule.arguments is not None:
            made.args = fx.node.map_arg(rule.arguments, own.__getitem__)
        if rule.divided is not None:
            self.divided[node] = rule.divided
