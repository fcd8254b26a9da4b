"""What the rewritten code of a captured layer calls where it needs the group (``recorded_writer``).

Graphs name these functions, and give them the member's part of a value and its end of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.engine.tensor.cross_entropy import sharded_cross_entropy
from penstock.engine.tensor.divided_layers import mask_of_whole
from penstock.engine.tensor.group import TensorGroup, bounds
from penstock.engine.tensor.layouts import SEQUENCE, gather, own_shard


def whole_of(part: Tensor, group: TensorGroup, dim: int, count: int) -> Tensor:
    """The whole value of which a member has a part.

    Args:
        count: how many numbers the member has of each piece of the dimension.
    """
    pieces = torch.unflatten(part, dim, (-1, count))
    return gather(pieces, group, dim + 1).flatten(dim, dim + 1)


def part_of(whole: Tensor, group: TensorGroup, dim: int, length: int, inner: int) -> Tensor:
    """A member's part of a whole value."""
    pieces = torch.unflatten(whole, dim, (-1, length, inner))
    return own_shard(pieces, group, dim + 1).flatten(dim, dim + 2)


def dropped(
    part: Tensor, dropout: nn.Dropout, group: TensorGroup, dim: int, length: int, inner: int,
    *parts: int,
) -> Tensor:  # fmt: skip
    """Dropout of a part with the mask of the whole value.

    Args:
        dim, length, inner, parts: as of ``ShardedDim``.
    """
    if not dropout.training or not dropout.p:
        return part
    own = parts[group.index]
    shape = [*part.shape]
    shape[dim] = shape[dim] // own * length
    mask = mask_of_whole(part, shape, dropout.p)
    places = bounds(length, group.size, group.index)
    pieces = torch.unflatten(mask, dim, (-1, length, inner)).narrow(dim + 1, places.start, own)
    own_mask: Tensor = pieces.flatten(dim, dim + 2)
    return part * own_mask


def dropped_positions(part: Tensor, dropout: nn.Dropout, group: TensorGroup) -> Tensor:
    """As ``dropped``, of a value of which a member has some positions."""
    if not dropout.training or not dropout.p:
        return part
    lengths = group.tell(part.shape[SEQUENCE])
    shape = [*part.shape]
    shape[SEQUENCE] = sum(lengths)
    mask = mask_of_whole(part, shape, dropout.p)
    return part * torch.split(mask, lengths, SEQUENCE)[group.index]


def num_positions(part: Tensor, group: TensorGroup) -> int:
    """How many positions a value has of which a member has some."""
    return sum(group.tell(part.shape[SEQUENCE]))


_REDUCTIONS = ("none", "mean", "sum")


def loss_of(
    part: Tensor,
    group: TensorGroup,
    num_classes: int,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``aten::cross_entropy_loss`` of a member's part of the logits."""
    named = _REDUCTIONS[reduction]
    return sharded_cross_entropy(
        part, group, num_classes, target, weight, named, ignore_index, label_smoothing
    )
