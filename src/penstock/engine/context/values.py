"""Functions that graphs call for values of which members have some positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.context.zigzag import PositionDim, put_together, shares, taken
from penstock.engine.tensor.divided_layers import mask_of_whole
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.layouts import leave


def own_positions(whole: Tensor, group: TensorGroup, *place: int) -> Tensor:
    """A member's positions of a value that all have. Its gradient is a term: that of the member's
    positions, and nothing elsewhere.

    Args:
        place: as ``PositionDim``.
    """
    return taken(whole, PositionDim(*place), group.size, group.index)


class _AllPositions(torch.autograd.Function):
    """Own positions → all, of which every member computes the same; so the gradient that comes
    back is whole, too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup, place: PositionDim) -> Tensor:
        ctx.group, ctx.place = group, place
        # A view could not be overwritten where a function of autograd gives it.
        return put_together(group.exchange([part] * group.size), place).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group: TensorGroup = ctx.group
        return taken(gradients[0], ctx.place, group.size, group.index), None, None


def all_positions(part: Tensor, group: TensorGroup, place: PositionDim) -> Tensor:
    """The whole value of which each member has its positions."""
    whole: Tensor = _AllPositions.apply(part, group, place)  # type: ignore[no-untyped-call]
    return whole


def dropped(part: Tensor, p: float, training: bool, group: TensorGroup, *place: int) -> Tensor:
    """Dropout of a member's positions, with the mask that the whole value would have.

    Args:
        place: as ``PositionDim``.
    """
    if not training or not p:
        return part
    there = PositionDim(*place)
    own = shares(there.length, group.size)[group.index]
    shape = [*part.shape]
    shape[there.dim] = shape[there.dim] // own * there.length
    mask = mask_of_whole(part, shape, p)
    return part * taken(mask, there, group.size, group.index)


def dropped_by(part: Tensor, module: Any, group: TensorGroup, *place: int) -> Tensor:
    """As ``dropped``, for an ``nn.Dropout``."""
    return dropped(part, module.p, module.training, group, *place)


def summed_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: TensorGroup,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of all positions, of which each member has the logits of some.

    Args:
        logits, targets: of the member's positions, as ``F.cross_entropy`` takes them.
        reduction: 1 for the mean, 2 for the sum, as recorded operations have it.

    Returns:
        The loss of all; the same on every member.
    """
    own = F.cross_entropy(
        logits, targets, weight, ignore_index=ignore_index, reduction="sum",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    total = leave(own, group)
    if reduction == 2:
        return total
    return total / _all_terms(logits, targets, group, weight, ignore_index)


def _all_terms(
    logits: Tensor, targets: Tensor, group: TensorGroup, weight: Tensor | None, ignored: int
) -> Tensor:
    """What a mean over all positions is divided by."""
    with torch.no_grad():
        if targets.is_floating_point():  # probabilities: every position counts
            count = logits.new_tensor(targets.numel() / targets.shape[1])
        elif weight is None:
            count = (targets != ignored).sum().to(logits.dtype)
        else:
            counted = targets[targets != ignored]
            count = weight[counted].sum().to(logits.dtype)
        return group.all_reduce(count)
