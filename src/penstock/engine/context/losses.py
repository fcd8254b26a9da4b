"""Recorded losses that are sums over positions which members share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from penstock.engine.context.refusal import refused
from penstock.engine.context.walk import ModelWalk
from penstock.engine.following.dims import ShardedDim, shape_of

_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


class LossCall(NamedTuple):
    """A call of cross-entropy.

    Attributes:
        logits, targets, weight: its values; no weight by default.
        targets_lie: how targets are divided, or to be.
        reduction, ignore_index, label_smoothing: as recorded.
    """

    logits: fx.Node
    targets: fx.Node
    weight: fx.Node | None
    targets_lie: ShardedDim
    reduction: int
    ignore_index: int
    label_smoothing: float


def loss_of(node: fx.Node, walk: ModelWalk) -> LossCall | None:
    """The call that an operation is; ``None`` if it is not of positions that are divided, or gives
    a loss for each.

    Raises:
        ModelError: positions are its classes, or its targets are of others than its logits.
    """
    given: dict[str, Any] = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    logits, targets, reduction = given["self"], given["target"], given.get("reduction", 1)
    divided, shape, wanted = walk.divided.get(logits), shape_of(logits), shape_of(targets)
    if divided is None or reduction == 0 or shape is None or wanted is None:
        return None
    if len(shape) < 2 or divided.dim == 1:
        raise refused(walk.layer, node, "takes positions of the sequence for classes")
    has_classes = len(wanted) == len(shape)  # probabilities of each class
    lie = divided.at(divided.dim - (divided.dim > 1 and not has_classes))
    if walk.divided.get(targets, lie) != lie:
        raise refused(walk.layer, node, "has targets of other positions than its logits")
    return LossCall(
        logits,
        targets,
        given.get("weight"),
        lie,
        reduction,
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
    )
