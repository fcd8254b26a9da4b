"""The error for what cannot run on some positions."""

from __future__ import annotations

from torch import fx

from penstock.base.errors import ModelError
from penstock.engine.tracing.segments import enclosing


def refused(layer: str, node: fx.Node, why: str) -> ModelError:
    """The error for a recorded operation, or a call of a module, by its name."""
    where = enclosing(node)
    inside = f" (in {where!r})" if where else ""
    return ModelError(
        f"layer {layer!r}: {node.target}{inside} {why}. Each context rank has some of the "
        "positions of the sequence, so only attention may mix them; plan without context ranks"
    )
