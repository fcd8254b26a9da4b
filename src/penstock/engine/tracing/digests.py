"""Digests of traced layers: processes that trace a model each by itself compare them.

A graph is data for who sends it and code for who runs it, and where processes meet anybody on the
host may write (``transport.rendezvous``); so no process runs the graph of another. What they tell
each other is whether they have recorded the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, fx

_WRITTEN_OUT = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format
)  # fmt: skip


def digest_of(texts: Iterable[str]) -> str:
    """Sixteen letters that differ, as good as surely, for different texts."""
    check = blake2b(digest_size=8)
    for text in texts:
        check.update(text.encode(errors="replace") + b"\0")
    return check.hexdigest()


def lines_of_graph(graph: fx.Graph) -> Iterable[str]:
    """A line for each op: what is called, with what, and which shapes come out of it as far as
    that is known.

    Where it computes does not count, nor how torch has called its values.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        given = f"{_written(node.args, numbers)} {_written(node.kwargs, numbers)}"
        target = "" if node.op == "placeholder" else _named(node.target)
        yield f"{node.op} {target} {given} {_made(node.meta.get('val'))}"


def lines_of_constants(constants: Mapping[str, Any]) -> Iterable[str]:
    """A line for each of what a graph reads and the model does not hold. Of a tensor its numbers do
    not count: another CPU may have rounded them otherwise, and on ``meta`` there are none."""
    for name, value in sorted(constants.items()):
        yield f"{name} {_made(value) or type(value).__qualname__}"


def _written(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, _WRITTEN_OUT):
        return repr(value)
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, tuple | list):
        return f"({', '.join(_written(part, numbers) for part in value)})"
    if isinstance(value, Mapping):
        pairs = (f"{key!r}: {_written(part, numbers)}" for key, part in value.items())
        return f"{{{', '.join(pairs)}}}"
    return type(value).__qualname__  # such as a device


def _named(target: Any) -> str:
    if isinstance(target, str | torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', '')}.{name}"


def _made(value: Any) -> str:
    """Dtype and shape of a tensor, or of several; sizes that may differ are left open."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(size) if type(size) is int else "any" for size in value.shape)
        return f"{value.dtype}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_made, value))})"
    return ""
