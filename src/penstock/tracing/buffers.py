"""Where a traced graph writes what becomes of the model's buffers.

An export collects these writes at the end, whatever the model does in between. There they would be
part of the last layer, which a pipeline may run elsewhere than the layer that holds the buffer; and
a value that is written there passes through all layers between, as if gradients flowed through it.
"""

from __future__ import annotations

import torch
from torch import fx


def write_buffers_early(graph: fx.Graph) -> None:
    """Put each write behind what it writes and behind all that reads the value before."""
    for node in list(graph.nodes):
        if not _writes_back(node):
            continue
        buffer, value = node.args[:2]
        if _overwritten_by(value).target == buffer.target:
            graph.erase_node(node)  # done already, where the model does it
            continue
        order = {one: place for place, one in enumerate(graph.nodes)}
        after = {value, buffer, *_readers(graph, str(buffer.target))} - {node}
        last = max(after, key=order.__getitem__)
        if order[last] < order[node]:
            last.append(node)


def _writes_back(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    buffer, value = node.args[:2]
    return isinstance(buffer, fx.Node) and buffer.op == "get_attr" and isinstance(value, fx.Node)


def _overwritten_by(value: fx.Node) -> fx.Node:
    """What operations that work in place have made a value of."""
    while isinstance(value.target, torch._ops.OpOverload) and value.target._schema.is_mutable:
        source = value.args[0]
        if not isinstance(source, fx.Node):
            break
        value = source
    return value


def _readers(graph: fx.Graph, name: str) -> set[fx.Node]:
    """What may use a buffer, or a view of it."""
    readers = {
        node
        for node in graph.nodes
        if node.op == "call_module" and name.startswith(f"{node.target}.")
    }
    waiting = [node for node in graph.nodes if node.op == "get_attr" and node.target == name]
    while waiting:
        for user in set(waiting.pop().users) - readers:
            readers.add(user)
            if _may_be_a_view(user):
                waiting.append(user)
    return readers


def _may_be_a_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)
