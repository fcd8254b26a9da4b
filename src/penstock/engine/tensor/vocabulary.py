"""A loss on logits of which each member has its part of the classes, so that nobody holds them all.

The last layer's output stays as the head has given it, and a loss sees it as if it were whole
(``seen_whole``). Its cross entropy is computed of three numbers per position that members add up or
compare (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.following.dims import ShardedDim
from penstock.engine.model import tree
from penstock.engine.tensor.cross_entropy import sharded_cross_entropy
from penstock.engine.tensor.group import TensorGroup, sizes
from penstock.engine.tensor.layouts import Layout, Layouts, gather, layouts_of_leaves
from penstock.engine.tensor.seen_whole import (
    OutputSharing,
    ShardedValue,
    SharedOutput,
    cross_entropy_options,
)


class ClassSharing(OutputSharing):
    """Each member has its part of the classes."""

    def whole(self, part: Tensor, divided: ShardedDim) -> Tensor:
        return gather(part, self.group, divided.dim)

    def stays(self, before: ShardedDim, after: ShardedDim, size: int) -> bool:
        return size == after.length and after.inner == 1

    def follow(
        self, func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(mine, args[0])
        return _lost(mine, args, kwargs) if func is F.cross_entropy else None


def _indexed(mine: ShardedValue, key: Any) -> Any:
    """Some of the positions, where the classes are the last dimension, and stay."""
    index = key if isinstance(key, tuple) else (key,)
    if mine.divided.dim != mine.dim() - 1 or any(isinstance(own, list) for own in index):
        return None
    taken = sum(
        own.dim() if isinstance(own, Tensor) and own.dtype == torch.bool else 1
        for own in index
        if own is not None and own is not Ellipsis
    )
    from_the_end = any(own is Ellipsis for own in index)
    if from_the_end or taken == mine.dim():
        last = index[-1]
        whole = last is Ellipsis or (isinstance(last, slice) and last == slice(None))
        if not whole:
            return None
    chosen = mine.part[key]
    return mine.like(chosen, lambda whole: whole[key], mine.divided.at(chosen.dim() - 1))


def _lost(mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A cross entropy whose target are labels and whose classes are divided."""
    given = cross_entropy_options(args, kwargs)
    if given is None or given.get("reduction", "mean") not in ("none", "mean", "sum"):
        return None
    target, weight = given.pop("target"), given.pop("weight")
    has_labels = isinstance(target, Tensor) and not target.is_floating_point()
    has_shape = has_labels and target.numel() * mine.divided.length == mine.numel()
    if not has_shape or mine.divided.dim != min(mine.dim() - 1, 1):
        return None
    group, length = mine.sharing.group, mine.divided.length
    return sharded_cross_entropy(mine.part, group, length, target, weight, **given)


class DividedOutput(SharedOutput):
    """The output of a model of which each member has its part of the classes.

    Args:
        layout: in which it leaves the last layer.
        group: with whom.
    """

    def __init__(self, layout: Layouts, group: TensorGroup) -> None:
        self._layout, self._group = layout, group

    def for_loss(self, value: Any) -> Any:
        leaves, structure = tree.flatten(value)
        pairs = zip(leaves, layouts_of_leaves(self._layout, len(leaves)), strict=True)
        return tree.unflatten([self._logits(leaf, layout) for leaf, layout in pairs], structure)

    def whole(self, value: Any) -> Any:
        leaves, structure = tree.flatten(value)
        pairs = zip(leaves, layouts_of_leaves(self._layout, len(leaves)), strict=True)
        return tree.unflatten([self._gathered(leaf, layout) for leaf, layout in pairs], structure)

    def _logits(self, leaf: Any, layout: Layout) -> Any:
        if layout is None or not isinstance(leaf, Tensor):
            return leaf
        dim = layout % leaf.dim()
        lengths = tuple(self._group.tell(leaf.shape[dim]))
        divided = ShardedDim(dim, sum(lengths), 1, lengths)
        return ShardedValue(leaf, divided, ClassSharing(self._group))

    def _gathered(self, leaf: Any, layout: Layout) -> Any:
        if layout is None or not isinstance(leaf, Tensor):
            return leaf
        return gather(leaf, self._group, layout % leaf.dim())


class _OnlyMember(TensorGroup):
    """A member without others, with whom to try what a loss does."""

    index, size = 0, 1

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [*parts]

    def tell(self, number: int) -> list[int]:
        return [number]

    def hand_on(self, tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tensors


def gathers_logits(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> str:
    """What a loss does with outputs for which members have to gather the logits; empty if it can be
    computed on parts of them.

    Args:
        loss: of (outputs, targets).
        outputs: what the model gives for one microbatch; the last dimension of its tensors is
            taken for the classes.
    """
    reasons: list[str] = []
    sharing = ClassSharing(_OnlyMember(), reasons.append)

    def divided(leaf: Tensor) -> Tensor:
        if leaf.dim() < 2 or not leaf.is_floating_point():
            return leaf
        length = leaf.shape[-1]
        dim = ShardedDim(leaf.dim() - 1, length, 1, tuple(sizes(length, 1)))
        return ShardedValue(leaf.detach(), dim, sharing)

    with torch.no_grad():
        loss(tree.replace(Tensor, divided, outputs), targets)
    return reasons[0] if reasons else ""
