"""Cutting a graph into parts that run one after the other, as passes of a stage do.

What a part needs of an earlier one is handed on to it; what a part only has to look at otherwise (a
view of what the whole graph is given) it makes again, so that weights are read when it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import fx
from torch.fx.graph import CodeGen

_GIVEN = {"placeholder", "get_attr"}

Ends = Sequence[fx.Node | None]


class GraphPart(NamedTuple):
    """A part of a graph; nodes here are those of the whole.

    Attributes:
        module: takes the values of ``takes`` and gives those of ``ends`` and ``hands_on``.
        takes: of earlier parts, or given to the whole.
        ends: its share of the results; ``None`` where there is none.
        hands_on: what later parts take of it.
    """

    module: fx.GraphModule
    takes: list[fx.Node]
    ends: list[fx.Node | None]
    hands_on: list[fx.Node]


def parts_of(
    module: fx.GraphModule,
    ends: Sequence[Ends],
    order: Callable[[fx.Node], Any],
    kept: Collection[fx.Node] | None = None,
) -> list[GraphPart]:
    """Cut a graph in which nothing is overwritten, so that each part does what its ends need and no
    earlier part has done.

    Args:
        ends: the results of each part.
        order: a key by which each part takes its values; those with equal keys as the graph has
            them.
        kept: the only values that the first part hands on; what else of it is needed, the next part
            makes again that needs it. ``None``: nothing is made again.
    """
    nodes = list(module.graph.nodes)
    home = _homes(ends)

    inside: list[set[fx.Node]] = []

    def remakes(node: fx.Node) -> bool:
        if node.op == "get_attr" or _is_view_of_given(node):
            return True
        is_handed_on = kept is None or node in kept or any(node in own for own in inside[1:])
        return bool(inside) and home.get(node) == 0 and not is_handed_on

    for number, results in enumerate(ends):
        inside.append(_inside(home, number, results, remakes))
    takes = [
        sorted(_taken(nodes, own, results), key=order)
        for own, results in zip(inside, ends, strict=True)
    ]
    handed: list[set[fx.Node]] = [set() for _ in ends]
    for number, those in enumerate(takes):
        for node in those:
            makers = [maker for maker in range(number) if node in inside[maker]]
            if makers:
                handed[makers[-1]].add(node)
    parts = []
    for number, (own, results) in enumerate(zip(inside, ends, strict=True)):
        hands_on = [node for node in nodes if node in handed[number]]
        graph = _graph(nodes, own, home, takes[number], [*results, *hands_on])
        part = fx.GraphModule(module, graph)
        parts.append(GraphPart(part, takes[number], list(results), hands_on))
    return parts


def _homes(ends: Sequence[Ends]) -> dict[fx.Node, int]:
    """The first part that needs each node, but for what the whole graph is given."""
    home: dict[fx.Node, int] = {}
    for number, results in enumerate(ends):
        pending = [node for node in results if node is not None]
        while pending:
            node = pending.pop()
            if node in home or node.op in _GIVEN:
                continue
            home[node] = number
            pending.extend(node.all_input_nodes)
            # Of several results at once, each is handed on by itself.
            pending.extend(user for user in node.users if user.target is operator.getitem)
    return home


def _inside(
    home: dict[fx.Node, int],
    number: int,
    results: Ends,
    remakes: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """The nodes of a part: its own, and those that it makes again."""
    own = {node for node, at in home.items() if at == number}
    pending = [node for each in own for node in each.all_input_nodes]
    pending += [node for node in results if node is not None]
    while pending:
        node = pending.pop()
        if node not in own and remakes(node):
            own.add(node)
            pending.extend(node.all_input_nodes)
    return own


def _is_view_of_given(node: fx.Node) -> bool:
    while getattr(node.target, "is_view", False):
        node, *others = node.all_input_nodes
        if others:
            return False
        if node.op == "placeholder":
            return True
    return False


def _taken(nodes: Iterable[fx.Node], own: set[fx.Node], results: Ends) -> list[fx.Node]:
    read = {node for each in own for node in each.all_input_nodes}
    read |= {node for node in results if node is not None}
    return [node for node in nodes if node in read and node not in own]


def _graph(
    nodes: Iterable[fx.Node],
    own: set[fx.Node],
    home: dict[fx.Node, int],
    takes: Iterable[fx.Node],
    results: Ends,
) -> fx.Graph:
    """The graph of a part. What it makes again, it makes right before it needs it."""
    graph = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in takes:
        twins[node] = graph.placeholder(node.name)
        twins[node].meta = dict(node.meta)
    last = max((home[node] for node in own if node in home), default=0)
    wanted = [node for node in nodes if node in own and home.get(node) == last]
    pending = [*wanted, *(node for node in results if node is not None)][::-1]
    while pending:
        node = pending[-1]
        missing = [other for other in node.all_input_nodes if other not in twins]
        if node in twins or not missing:
            pending.pop()
            if node not in twins:
                twins[node] = graph.node_copy(node, twins.__getitem__)
        pending.extend(reversed(missing) if node not in twins else ())
    graph.output(tuple(None if node is None else twins[node] for node in results))
    return graph


class _TakesList(CodeGen):
    """Code of a function that takes one list and empties it, so that each value is freed after its
    last use.

    Args:
        names: of the values in the list.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = names

    def gen_fn_def(self, *args: Any, **kwargs: Any) -> str:
        """The head of the function, and what takes the list apart."""
        apart = f"\n    {', '.join(self._names)}, = values\n    values.clear()"
        return f"def forward(self, values):{apart if self._names else ''}"


def as_function(part: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A part as a function of a list, which it empties; it calls torch's operations in turn."""
    names = [str(node.target) for node in part.graph.nodes if node.op == "placeholder"]
    part.graph.set_codegen(_TakesList(names))
    code = part.graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<pass of a stage>", "exec"), space)
    return partial(space["forward"], part)
