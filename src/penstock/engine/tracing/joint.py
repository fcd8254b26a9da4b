"""A function's forward and backward as one graph of torch's operations.

AOTAutograd traces both and leaves nothing in place: what a function overwrites inside of itself
becomes another value. What one graph of fixed operations cannot say is refused by name.

Tracing and compiling change what torch keeps for the whole process, so they take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from penstock.base.errors import InputError, ModelError

ONE_AT_A_TIME = threading.RLock()
"""Held by whoever traces or compiles."""

Decompositions = Mapping[Any, Callable[..., Any]]

FlatFunction = Callable[..., Sequence[Tensor]]
"""Takes tensors and gives tensors, of which none is a view of another one or of what is taken."""


class JointGraph(NamedTuple):
    """A function's forward and backward.

    Attributes:
        module: holds the graph, and tensors that it reads and is not given.
        given: placeholders of what the function takes.
        tangents: those of gradients, by the place of the output that each belongs to.
        outputs: the nodes of what the function gives.
        gradients: those of the gradients of what it takes; ``None`` where there is none.
    """

    module: fx.GraphModule
    given: list[fx.Node]
    tangents: dict[int, fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]


def joint_graph(
    function: FlatFunction,
    given: Sequence[Tensor],
    wants_gradient: Sequence[bool],
    decompositions: Decompositions | None,
    differentiable: Callable[[], Sequence[bool]],
) -> JointGraph:
    """Trace a function and its backward; the caller holds ``ONE_AT_A_TIME``.

    Args:
        given: what it takes.
        wants_gradient: of which of that gradients are wanted.
        decompositions: of operations into simpler ones, as a compiler wants them.
        differentiable: asked after the trace, which outputs have gradients.

    Raises:
        ModelError: torch cannot trace it.
    """
    # What a layer holds beside its state is a tensor that it reads as it is.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    copies = tuple(
        fake.from_tensor(tensor.detach()).requires_grad_(wants)
        for tensor, wants in zip(given, wants_gradient, strict=True)
    )
    with torch.enable_grad(), _refusing(), _as_written():
        module = aot_export_joint_simple(
            function,
            copies,
            trace_joint=any(wants_gradient),
            decompositions=None if decompositions is None else dict(decompositions),
        )
    assert isinstance(module, fx.GraphModule)
    return _parted(module, len(given), differentiable())


@contextmanager
def _as_written() -> Iterator[None]:
    """Modules that users have compiled run the code that they were compiled from."""
    stance = torch.compiler.set_stance("force_eager")
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), stance:
        yield


def _parted(module: fx.GraphModule, num_given: int, differentiable: Sequence[bool]) -> JointGraph:
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (end,) = (node for node in graph.nodes if node.op == "output")
    wanting = [place for place, wants in enumerate(differentiable) if wants]
    tangents = dict(zip(wanting, placeholders[num_given:], strict=True))
    _simplify(graph, end)
    results: list[Any] = list(tree_leaves(end.args, is_leaf=_is_end))
    outputs, gradients = results[: len(differentiable)], results[len(differentiable) :]
    gradients = gradients or [None] * num_given
    return JointGraph(module, placeholders[:num_given], tangents, outputs, gradients)


def _is_end(value: Any) -> bool:
    return value is None or isinstance(value, fx.Node)


def _simplify(graph: fx.Graph, end: fx.Node) -> None:
    """Read what was copied, or transposed twice, instead of the copy: nothing is overwritten."""
    for node in list(graph.nodes):
        if _is_copy(node) and end not in node.users:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.target is _TRANSPOSE and node.all_input_nodes[0].target is _TRANSPOSE:
            (origin,) = node.all_input_nodes[0].all_input_nodes
            if origin.op != "placeholder" or end not in node.users:
                node.replace_all_uses_with(origin)
                graph.erase_node(node)


def _is_copy(node: fx.Node) -> bool:
    if node.target not in _COPYING or node.kwargs:
        return False
    (origin,) = node.all_input_nodes
    same: bool = origin.meta["val"].stride() == node.meta["val"].stride()
    return same


_TRANSPOSE = torch.ops.aten.t.default
_COPYING = {torch.ops.aten.clone.default, torch.ops.aten.detach.default}


def origin_of(node: fx.Node) -> fx.Node:
    """The node of which one is a copy, or itself."""
    while _is_copy(node):
        (node,) = node.all_input_nodes
    return node


@contextmanager
def _refusing() -> Iterator[None]:
    """Say in a sentence why a function cannot be traced."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # torch has many ways to say so
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"torch cannot trace the passes of this stage ({first_line}); leave compile=… out"
        ) from error
