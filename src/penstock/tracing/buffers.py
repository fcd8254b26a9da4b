"""Where a traced graph writes what becomes of the model's buffers.

An export collects these writes at the end, whatever the model does in between. There they would be
part of the last layer, which a pipeline may run elsewhere than the layer that holds the buffer; and
a value that is written there passes through all layers between, as if gradients flowed through it.
"""

from __future__ import annotations

import torch
from torch import fx, nn


def write_buffers_early(graph: fx.Graph, model: nn.Module) -> None:
    """Put each write behind what it writes, behind all that overwrites that in place, and behind
    all that reads the value before.

    Args:
        graph: of the model; changed.
        model: tells which of the modules that are called may work in place.
    """
    for node in list(graph.nodes):
        if not _writes_back(node):
            continue
        buffer, value = node.args[:2]
        if _overwritten_by(value).target == buffer.target:
            graph.erase_node(node)  # done already, where the model does it
            continue
        order = {one: place for place, one in enumerate(graph.nodes)}
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


def _overwriters(value: fx.Node, model: nn.Module) -> set[fx.Node]:
    """What may write into the memory of a value: through itself, what it is a view of, or views."""
    found: set[fx.Node] = set()
    family, waiting = {value}, [value]
    while waiting:
        one = waiting.pop()
        found.update(user for user in one.users if _writes_into(one, user, model))
        near = [user for user in one.users if _hands_on(user, model)]
        near += one.all_input_nodes if _hands_on(one, model) else []
        new = set(near) - family
        family |= new
        waiting.extend(new)
    return found


def _hands_on(node: fx.Node, model: nn.Module) -> bool:
    """Whether what a node gives may lie in the memory of what it is given."""
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
    written = (
        given
        for given, argument in zip(user.args, user.target._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    # Some overwrite a list of tensors.
    return any(given is value or (isinstance(given, list) and value in given) for given in written)


def _may_be_a_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)
