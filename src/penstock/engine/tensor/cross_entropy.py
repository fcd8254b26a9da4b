"""Cross entropy of logits of which each member has its part of the classes.

Members compare the largest logit of each position, and add up what is left of it of its label, and
the sum of powers: three numbers per position in two exchanges. Each keeps the probabilities of its
own classes for the backward, which needs nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.engine.device.accelerators import is_on_host
from penstock.engine.tensor.group import TensorGroup, bounds


class _LabelWeights(NamedTuple):
    """The way in which positions count in a cross entropy.

    Attributes:
        own_classes: the member's part of the weights of classes; ``None`` where all weigh 1.
        all_classes: the sum of those of all classes.
        positions: the weight of each position's class; 0 where its label is ignored.
        counted: 1 for each position, and 0 where its label is ignored.
        smoothing: what share of a label is spread over all classes alike.
        num_classes: how many there are.
    """

    own_classes: Tensor | None
    all_classes: Tensor | float
    positions: Tensor
    counted: Tensor
    smoothing: float
    num_classes: int

    def smooth(self) -> float:
        """What each class gets of a label."""
        return self.smoothing / self.num_classes


class _ShardedCrossEntropy(torch.autograd.Function):
    """``[positions, own classes]`` → the terms ``[positions]``, of which all members have all."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: TensorGroup,
        first: int,
        terms: _LabelWeights,
    ) -> Tensor:
        count = logits.shape[1]
        mine = labels - first
        here = (mine >= 0) & (mine < count) & (terms.counted != 0)
        mine = mine.masked_fill(~here, 0)
        largest = group.largest(
            logits.amax(1) if count else logits.new_full(logits.shape[:1], -torch.inf)
        )
        shifted = logits - largest.unsqueeze(1)
        labelled = shifted.gather(1, mine.unsqueeze(1)).squeeze(1) if count else largest
        each = [labelled.masked_fill(~here, 0.0)]
        if terms.smoothing:
            own = terms.own_classes
            each.append((shifted if own is None else shifted * own).sum(1))
        powers = shifted.exp_()
        label, *spread, total = group.all_reduce(torch.stack([*each, powers.sum(1)]))
        normaliser = total.log()
        loss: Tensor = (1 - terms.smoothing) * terms.positions * (normaliser - label)
        if spread:
            loss += terms.smooth() * terms.counted * (terms.all_classes * normaliser - spread[0])
        ctx.save_for_backward(powers.div_(total.unsqueeze(1)), mine, here)
        ctx.terms = terms
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, mine, here = ctx.saved_tensors
        terms: _LabelWeights = ctx.terms
        # A mean over no label is no number, but moves nothing.
        given = gradients[0].masked_fill(terms.counted == 0, 0.0)
        certain = given * (1 - terms.smoothing) * terms.positions
        spread = given * terms.smooth()
        back = probabilities * (certain + spread * terms.all_classes).unsqueeze(1)
        if back.shape[1]:
            back.scatter_add_(1, mine.unsqueeze(1), -(certain * here).unsqueeze(1))
        if terms.smoothing:
            own = terms.own_classes
            back -= spread.unsqueeze(1) if own is None else spread.unsqueeze(1) * own
        return back, None, None, None, None


def sharded_cross_entropy(
    part: Tensor,
    group: TensorGroup,
    num_classes: int,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits of which each member has a part; the same on all of them.

    Args:
        part: ``[positions, own classes]``, or ``[rows, own classes, …]``, or ``[own classes]``.
        num_classes: of all members together.
        target: labels, ``int64``, of the shape of ``part`` without the classes.
        weight, reduction, ignore_index, label_smoothing: as for ``F.cross_entropy``.

    Raises:
        IndexError: a label is no class; on an accelerator the loss is then not a number.
    """
    dtype = part.dtype
    if dtype in (torch.float16, torch.bfloat16):
        part = part.float()
        dtype = torch.float32 if torch.is_autocast_enabled(part.device.type) else dtype
    by_class: Tensor = part.movedim(1, -1) if part.dim() > 1 else part
    logits, labels = by_class.reshape(-1, by_class.shape[-1]), target.reshape(-1)
    counted = labels != ignore_index
    strange = counted & ((labels < 0) | (labels >= num_classes))
    if is_on_host(labels.device) and not labels.is_meta and strange.any():
        raise IndexError(f"Target {int(labels[strange][0])} is out of bounds.")
    own = bounds(num_classes, group.size, group.index)
    mask = counted.to(logits.dtype)
    if weight is None:
        terms = _LabelWeights(None, float(num_classes), mask, mask, label_smoothing, num_classes)
    else:
        weight = weight.to(logits.dtype)
        positions = weight[labels.masked_fill(~counted | strange, 0)] * mask
        classes = weight[own.start : own.stop]
        terms = _LabelWeights(classes, weight.sum(), positions, mask, label_smoothing, num_classes)
    each = cast(
        Tensor,
        _ShardedCrossEntropy.apply(logits, labels, group, own.start, terms),  # type: ignore[no-untyped-call]
    )
    each = each.masked_fill(strange, torch.nan)
    if reduction == "none":
        return each.view(target.shape).to(dtype)
    total = each.sum()
    return (total / terms.positions.sum() if reduction == "mean" else total).to(dtype)
