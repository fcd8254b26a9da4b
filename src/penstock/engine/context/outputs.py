"""The model's outputs, of which each member has some positions, and losses of them.

Logits of a long sequence are large, so nobody gathers them for a loss that can be computed by
positions: the user's loss sees the member's positions as if they were all (``tensor.seen_whole``),
and their cross-entropy is summed over the members. So whatever the loss is, it gives what it gives
on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.context.values import all_positions, own_positions, summed_cross_entropy
from penstock.engine.context.zigzag import PositionDim
from penstock.engine.following.dims import ShardedDim
from penstock.engine.model import tree
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.seen_whole import (
    OutputSharing,
    ShardedValue,
    SharedOutput,
    cross_entropy_options,
)

OUTPUTS = "output_positions"
"""The attribute of a model's last layer that says how they are divided, by mode."""


class PositionSharing(OutputSharing):
    """Each member has some of the positions."""

    def whole(self, part: Tensor, divided: ShardedDim) -> Tensor:
        return all_positions(part, self.group, PositionDim(*divided[:3]))

    def stays(self, before: ShardedDim, after: ShardedDim, size: int) -> bool:
        return after.length == before.length  # those of a member are from several places

    def follow(
        self, func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return self._summed(mine, args, kwargs) if func is F.cross_entropy else None

    def _summed(self, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A cross entropy that is a mean, or a sum, over positions."""
        given, divided, wanted = cross_entropy_options(args, kwargs), mine.divided, [*mine.shape]
        if given is None or len(wanted) < 2 or divided.dim == 1:
            return None
        target, kind = given["target"], {"mean": 1, "sum": 2}.get(given.get("reduction", "mean"))
        if kind is None or not isinstance(target, Tensor):
            return None
        has_classes = target.dim() == len(wanted)  # probabilities of each class
        if not has_classes:
            del wanted[1]
        if [*target.shape] != wanted:
            return None
        place = divided.dim - (divided.dim > 1 and not has_classes)
        own = own_positions(target, self.group, place, divided.length, divided.inner)
        return summed_cross_entropy(
            mine.part, own, self.group, given["weight"], kind, given.get("ignore_index", -100),
            given.get("label_smoothing", 0.0),
        )  # fmt: skip


class OutputPositions(SharedOutput):
    """A member has some positions of what the model returns.

    Args:
        group: with whom.
        ways: by mode (whether the model trains), how each leaf of the output is divided; ``None``
            for what all members have.
        last: the last layer, which is in a mode.
    """

    def __init__(
        self,
        group: TensorGroup,
        ways: Mapping[bool, Sequence[ShardedDim | None]],
        last: nn.Module,
    ) -> None:
        self._sharing, self._ways, self._last = PositionSharing(group), ways, last

    def for_loss(self, value: Any) -> Any:
        return self._each(value, lambda part, way: ShardedValue(part, way, self._sharing))

    def whole(self, value: Any) -> Any:
        return self._each(value, self._sharing.whole)

    def _each(self, value: Any, change: Callable[[Tensor, ShardedDim], Tensor]) -> Any:
        """The output, with others in the place of leaves of which a member has positions."""
        leaves, structure = tree.flatten(value)
        pairs = zip(leaves, self._ways[self._last.training], strict=True)
        changed = [leaf if way is None else change(leaf, way) for leaf, way in pairs]
        return tree.unflatten(changed, structure)


def output_positions(last: nn.Module, group: TensorGroup) -> OutputPositions | None:
    """How a member has the output of its last layer; ``None`` if it has all of it."""
    ways = vars(last).get(OUTPUTS)
    return None if ways is None else OutputPositions(group, ways, last)
