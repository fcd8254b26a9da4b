"""Which layers can run on some of the positions, and what a captured model's own loss sees: told
for all layers together, since each reads what those before it give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.base.errors import ModelError
from penstock.engine.model.spine import NamedLayer
from penstock.engine.tensor.layouts import FEATURES, SEQUENCE, WHOLE, Layouts
from penstock.engine.tensor.membership import ModuleSharing
from penstock.engine.tensor.parts import FoundPart, module_sharings, smallest_share
from penstock.engine.tensor.recorded import layouts_of
from penstock.engine.tensor.recorded_writer import RecordedLayouts
from penstock.engine.tracing.layers import CapturedLayer


class FoundParts(NamedTuple):
    """The parts of one layer, and how values may lie around them.

    Attributes:
        parts: of the layer.
        by_positions: see ``Layer``.
    """

    parts: tuple[FoundPart, ...] = ()
    by_positions: bool = False


def followed(
    layers: Sequence[NamedLayer], parts: Sequence[Sequence[FoundPart]], *, gives_loss: bool
) -> list[FoundParts]:
    """The parts of all layers of a model, with what can be said of positions and of its loss.

    Of a captured layer its code is followed; of others, the author says it
    (``tensor_positions = True``).

    Args:
        gives_loss: whether the model computes its own loss.
    """
    said: list[FoundParts] = []
    have: Layouts = WHOLE
    for layer, given in zip(layers, parts, strict=True):
        module, own = layer.module, [*given]
        if not isinstance(module, CapturedLayer):
            said.append(FoundParts(tuple(own), bool(getattr(module, "tensor_positions", False))))
            continue
        has_head = any(part.kind == "head" for part in own)
        layouts = _layouts(module, own, have, has_head=has_head)
        by_positions = layouts is not None and _is_divided(layouts, has_head=has_head)
        have = layouts.gives if layouts is not None and by_positions else WHOLE
        if gives_loss and has_head:
            own = [_with_loss(module, part) for part in own]
        said.append(FoundParts(tuple(own), by_positions))
    return said


def _is_divided(own: RecordedLayouts, *, has_head: bool) -> bool:
    """Whether positions stay divided all through a layer, but for what its parts read."""
    reads, gives = (
        isinstance(layouts, tuple) and SEQUENCE in layouts for layouts in (own.reads, own.gives)
    )
    return not own.gathers and (reads if has_head else gives)


def _layouts(
    layer: CapturedLayer,
    parts: Sequence[FoundPart],
    have: Layouts,
    *,
    has_head: bool,
    by_positions: bool = True,
) -> RecordedLayouts | None:
    """Where values lie where all parts of a layer are divided; ``None`` if they cannot be."""
    size = max(map(smallest_share, parts), default=2)
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


def _with_loss(layer: CapturedLayer, part: FoundPart) -> FoundPart:
    """A part with what a loss in the code behind it sees, if it is a head."""
    if part.kind != "head":
        return part
    layouts = _layouts(layer, [part], WHOLE, has_head=True, by_positions=False)
    return part._replace(loss="whole" if layouts is None or layouts.gathers else "shards")
