"""Which layers with parts can run on some of the positions, and what a captured model's own loss
sees: told for all layers together, since each reads what those before it give.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.layouts import FEATURES, SEQUENCE, WHOLE, Layouts
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.parts import FoundPart, module_sharings, smallest_share
from penstock.engine.tensor.recorded import RecordedLayouts, layouts_of
from penstock.engine.tracing.layers import CapturedLayer


def followed(
    layers: Sequence[NamedLayer], parts: Sequence[Sequence[FoundPart]], *, gives_loss: bool
) -> list[list[FoundPart]]:
    """The parts of all layers of a model, with what can be said of positions and of its loss.

    Of a captured layer its code is followed; of others, the author says it
    (``tensor_positions = True``).

    Args:
        gives_loss: whether the model computes its own loss.
    """
    said: list[list[FoundPart]] = []
    have: Layouts = WHOLE
    for layer, own in zip(layers, parts, strict=True):
        module, has_head = layer.module, any(part.kind == "head" for part in own)
        if not isinstance(module, CapturedLayer):
            declared = bool(getattr(module, "tensor_positions", False))
            said.append([part._replace(by_positions=declared) for part in own])
            continue
        found = _layouts(module, own, have, has_head=has_head)
        have = WHOLE if found is None else found.gives
        by_positions = found is not None and found.gathers == 0 and _lies(have, has_head)
        if not by_positions:
            have = WHOLE
        loss = "" if not gives_loss else "shards" if _is_on_shards(module, own) else "whole"
        said.append(
            [
                part._replace(by_positions=by_positions, loss=loss if part.kind == "head" else "")
                for part in own
            ]
        )
    return said


def _lies(gives: Layouts, has_head: bool) -> bool:
    """Whether something that a layer gives is divided as it should be."""
    wanted = FEATURES if has_head else SEQUENCE
    return has_head or (isinstance(gives, tuple) and wanted in gives)


def _layouts(
    layer: CapturedLayer,
    parts: Sequence[FoundPart],
    have: Layouts,
    *,
    has_head: bool,
    by_positions: bool = True,
) -> RecordedLayouts | None:
    """Where values lie where all parts of a layer are divided; ``None`` if they cannot be."""
    size = max(map(smallest_share, parts), default=1)
    if size == 1:
        return None
    ways: dict[str, ModuleSharing] = {}
    for part in parts:
        ways |= module_sharings(layer, part)
    keeps = FEATURES if has_head else SEQUENCE
    try:
        return layouts_of(layer, ways, size, have, by_positions=by_positions, keeps=keeps)
    except ModelError:
        return None


def _is_on_shards(layer: CapturedLayer, parts: Sequence[FoundPart]) -> bool:
    """Whether the loss in the code of the last layer can be computed on parts of the logits."""
    heads = [part for part in parts if part.kind == "head"]
    found = _layouts(layer, heads, WHOLE, has_head=True, by_positions=False) if heads else None
    return found is not None and found.gathers == 0
