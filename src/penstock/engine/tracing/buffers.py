"""Moving the writes into a model's buffers to where its code makes them.

An export collects these writes at the end, whatever the model does in between. There they would be
part of the last layer, which a pipeline may run elsewhere than the layer that holds the buffer; and
a value that is written there passes through all layers between, as if gradients flowed through it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn


def write_buffers_early(graph: fx.Graph, model: nn.Module) -> None:
    """Put each write behind the value it writes, behind all that overwrites that value in place,
    and behind all that reads what the buffer was before.

    Args:
        graph: the model's graph; it is changed.
        model: tells which of the called modules may work in place.
    """
    for node in list(graph.nodes):
        if not _writes_back(node):
            continue
        buffer, value = node.args[:2]
        if _overwritten_by(value).target == buffer.target:
            graph.erase_node(node)  # done already, where the model does it
            continue
        order = {other: place for place, other in enumerate(graph.nodes)}
        overwriters = _overwriters(value, model)
        after = {value, buffer, *overwriters, *_readers(graph, str(buffer.target))} - {node}
        last = max(after, key=order.__getitem__)
        if order[last] < order[node]:
            last.append(node)


def _writes_back(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    buffer, value = node.args[:2]
    return isinstance(buffer, fx.Node) and buffer.op == "get_attr" and isinstance(value, fx.Node)


def _overwritten_by(value: fx.Node) -> fx.Node:
    """The value that in-place operations turned into this one."""
    while isinstance(value.target, torch._ops.OpOverload) and value.target._schema.is_mutable:
        source = value.args[0]
        if not isinstance(source, fx.Node):
            break
        value = source
    return value


def _readers(graph: fx.Graph, name: str) -> set[fx.Node]:
    """The nodes that may use a buffer, or a view of it."""
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


def _overwriters(value: fx.Node, model: nn.Module) -> set[fx.Node]:
    """The nodes that may write into a value's memory: through it, its views, or what it views."""
    overwriters: set[fx.Node] = set()
    family, waiting = {value}, [value]
    while waiting:
        member = waiting.pop()
        overwriters.update(user for user in member.users if _writes_into(member, user, model))
        near = [user for user in member.users if _hands_on(user, model)]
        near += member.all_input_nodes if _hands_on(member, model) else []
        new = set(near) - family
        family |= new
        waiting.extend(new)
    return overwriters


def _hands_on(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node's output may share memory with its input."""
    if node.op == "call_module":
        # What computes with weights makes something new; Identity and dropout may not.
        return not any(True for _ in model.get_submodule(str(node.target)).parameters())
    return node.op == "call_function" and _may_be_a_view(node)


def _writes_into(value: fx.Node, user: fx.Node, model: nn.Module) -> bool:
    if user.op == "call_module":
        return getattr(model.get_submodule(str(user.target)), "inplace", False) is True
    if isinstance(user.target, torch._ops.HigherOrderOperator):
        return True  # a graph within the graph, such as what runs without gradients
    if not isinstance(user.target, torch._ops.OpOverload) or _writes_back(user):
        return False
    # Some overwrite a list of tensors.
    return any(
        given is value or (isinstance(given, list) and value in given)
        for given in written_arguments(user, user.target)
    )


def written_arguments(node: fx.Node, operation: torch._ops.OpOverload) -> list[Any]:
    """The arguments of a node that its operation writes into."""
    return [
        given
        for given, argument in zip(node.args, operation._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def gives_alias(operation: torch._ops.OpOverload) -> bool:
    """Whether what an operation gives may share memory with what it is given."""
    return any(result.alias_info is not None for result in operation._schema.returns)


def _may_be_a_view(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or gives_alias(node.target)
