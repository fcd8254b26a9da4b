"""Graphs of torch's operations as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from penstock.engine.device.captured_graphs import CapturedFunction
from penstock.engine.stage.backends import Backend
from penstock.engine.tracing.graph_parts import as_function
from penstock.engine.tracing.joint import Decompositions

Run = Callable[[list[Any]], Sequence[Any]]
"""Empties the list of what it is given."""


def decompositions_for(backend: Backend) -> Decompositions | None:
    """What a backend wants to see of operations; ``None``: operations as autograd has them."""
    if backend != "inductor":
        return None
    from torch._inductor.decomposition import select_decomp_table

    table: Decompositions = select_decomp_table()
    return table


def compiled(part: fx.GraphModule, backend: Backend, num_weights: int) -> Run:
    """A graph as a function.

    Args:
        num_weights: how many of its last arguments stay where they are in memory.
    """
    nodes = part.graph.nodes
    computes = any(node.op == "call_function" for node in nodes)
    if backend == "inductor" and computes:
        from torch._inductor.compile_fx import compile_fx_inner

        examples = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        run: Run = compile_fx_inner(part, examples)
        return run
    run = as_function(part)
    if backend == "cudagraphs" and computes:
        return CapturedFunction(run, num_weights)
    return run
