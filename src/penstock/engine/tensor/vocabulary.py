"""A loss on logits of which each member has its part of the classes, so that nobody holds them all.

The last layer's output stays as the head has given it. A loss sees it as ``ShardedLogits``: of the
whole shape, and doing on the part what losses do with logits before a cross entropy, which is
computed of three numbers per position that members add up or compare (Shoeybi et al.,
"Megatron-LM", arXiv 1909.08053, section 3). Whatever else a loss does with it gathers the logits,
so that any loss is right, and one that can be followed needs no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.model import tree
from penstock.engine.tensor.cross_entropy import sharded_cross_entropy
from penstock.engine.tensor.group import TensorGroup, sizes
from penstock.engine.tensor.layouts import Layout, Layouts, gather, layouts_of_leaves
from penstock.engine.following.dims import ShardedDim, reshaped


class ShardedLogits(Tensor):
    """Logits of which a member has its part of the classes, with the shape of all of them.

    Args:
        part: the member's, with its graph.
        divided: which dimension is divided.
        group: with whom.
        watch: told when the logits have to be gathered, by what.
    """

    part: Tensor
    divided: ShardedDim
    group: TensorGroup
    watch: Callable[[str], None] | None

    @staticmethod
    def __new__(
        cls: type[Self],
        part: Tensor,
        divided: ShardedDim,
        group: TensorGroup,
        watch: Callable[[str], None] | None = None,
    ) -> Self:
        shape = [*part.shape]
        shape[divided.dim] = divided.length
        own: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        own.part, own.divided, own.group, own.watch = part, divided, group, watch
        return own

    def whole(self) -> Tensor:
        """All logits, gathered."""
        return gather(self.part, self.group, self.divided.dim)

    def like(self, part: Tensor, divided: ShardedDim | None = None) -> ShardedLogits:
        """Others of the same group."""
        return ShardedLogits(part, divided or self.divided, self.group, self.watch)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SEEN:
                return func(*args, **kwargs)
            mine = args[0] if args else None
            others = tree.tensors((args[1:], kwargs))
            alone = isinstance(mine, ShardedLogits) and not any(
                isinstance(other, ShardedLogits) for other in others
            )
            follow = _FOLLOWED.get(func)
            if alone and follow is not None:
                followed = follow(func, cast(ShardedLogits, mine), args[1:], kwargs)
                if followed is not None:
                    return followed
            name = getattr(func, "__name__", str(func))
            return func(*_gathered(args, name), **_gathered(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Whatever comes past ``__torch_function__``."""
        name = str(func)
        return func(*_gathered(args, name), **_gathered(kwargs or {}, name))


def _gathered(value: Any, by: str) -> Any:
    """Arguments, with whole logits in the place of shards."""

    def whole(logits: ShardedLogits) -> Tensor:
        if logits.watch is not None:
            logits.watch(by)
        return logits.whole()

    return tree.replace(ShardedLogits, whole, value)


Follow = Callable[[Any, ShardedLogits, Sequence[Any], Mapping[str, Any]], Any]
"""From a function, the logits, and its other arguments to what it gives, on the part; ``None``
where it needs all of them."""


def _same(func: Any, mine: ShardedLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Treats every number by itself, whatever else it is given."""
    if any(isinstance(other, Tensor) and other.dim() for other in tree.tensors((args, kwargs))):
        return None
    if any(other.requires_grad for other in tree.tensors((args, kwargs))):
        return None  # each member would have a term of its gradient
    return mine.like(func(mine.part, *args, **kwargs))


def _viewed(func: Any, mine: ShardedLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    before = [*mine.shape]
    after = [*func(torch.empty(before, device="meta"), *args, **kwargs).shape]
    divided = reshaped(mine.divided, before, after)
    if divided is None or after[divided.dim] != divided.length or divided.inner != 1:
        return None
    after[divided.dim] = mine.part.shape[mine.divided.dim]
    return mine.like(mine.part.reshape(after), divided)


def _permuted(
    func: Any, mine: ShardedLogits, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    # A dimension is known again by its size, where all are different.
    numbered = torch.empty(tuple(range(2, 2 + mine.dim())), device="meta")
    place = [*func(numbered, *args, **kwargs).shape].index(2 + mine.divided.dim)
    return mine.like(func(mine.part, *args, **kwargs), mine.divided.at(place))


def _indexed(func: Any, mine: ShardedLogits, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """Some of the positions, where the classes are the last dimension, and stay."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if mine.divided.dim != mine.dim() - 1 or any(isinstance(key, list) for key in index):
        return None
    taken = sum(
        key.dim() if isinstance(key, Tensor) and key.dtype == torch.bool else 1
        for key in index
        if key is not None and key is not Ellipsis
    )
    from_the_end = any(key is Ellipsis for key in index)
    if from_the_end or taken == mine.dim():
        last = index[-1]
        whole = last is Ellipsis or (isinstance(last, slice) and last == slice(None))
        if not whole:
            return None
    chosen = mine.part[args[0]]
    return mine.like(chosen, mine.divided.at(chosen.dim() - 1))


def _lost(func: Any, mine: ShardedLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``F.cross_entropy``, whose target are labels and whose classes are divided."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
    target, weight = given.pop("target"), given.pop("weight", None)
    is_old = given.pop("size_average", None) is not None or given.pop("reduce", None) is not None
    has_labels = isinstance(target, Tensor) and not target.is_floating_point()
    has_shape = has_labels and target.numel() * mine.divided.length == mine.numel()
    learns = weight is not None and weight.requires_grad
    if is_old or learns or not has_shape or mine.divided.dim != min(mine.dim() - 1, 1):
        return None
    if given.get("reduction", "mean") not in ("none", "mean", "sum"):
        return None
    return sharded_cross_entropy(
        mine.part, mine.group, mine.divided.length, target, weight, **given
    )


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


_SEEN = frozenset(
    [
        *_getters("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_meta"),
        *_getters("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_leaf"),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
        Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex,
        Tensor.element_size, torch.numel,
    ]
)  # fmt: skip
"""Functions that ask for what the whole and its part have in common, or for the whole's shape."""

_FOLLOWED: dict[Any, Follow] = {
    **dict.fromkeys(
        (
            Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.clone,
            Tensor.contiguous, Tensor.detach, Tensor.tanh, torch.tanh, Tensor.mul, Tensor.__mul__,
            Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div, Tensor.neg,
            Tensor.__neg__, Tensor.clamp, torch.clamp, torch.clone, torch.neg,
        ),
        _same,
    ),
    **dict.fromkeys(
        (
            Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten,
            Tensor.unflatten, torch.unflatten, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze,
            torch.unsqueeze,
        ),
        _viewed,
    ),
    **dict.fromkeys(
        (
            Tensor.transpose, torch.transpose, Tensor.swapaxes, Tensor.permute, torch.permute,
            Tensor.movedim, torch.movedim,
        ),
        _permuted,
    ),
    Tensor.__getitem__: _indexed,
    F.cross_entropy: _lost,
}  # fmt: skip


class DividedOutput:
    """The output of a model of which each member has its part of the classes.

    Args:
        layout: in which it leaves the last layer.
        group: with whom.
    """

    def __init__(self, layout: Layouts, group: TensorGroup) -> None:
        self._layout, self._group = layout, group

    def for_loss(self, value: Any) -> Any:
        """The output as a loss, and metrics, are to see it."""
        leaves, structure = tree.flatten(value)
        pairs = zip(leaves, layouts_of_leaves(self._layout, len(leaves)), strict=True)
        return tree.unflatten([self._logits(leaf, layout) for leaf, layout in pairs], structure)

    def whole(self, value: Any) -> Any:
        """The output as on one device."""
        leaves, structure = tree.flatten(value)
        pairs = zip(leaves, layouts_of_leaves(self._layout, len(leaves)), strict=True)
        return tree.unflatten([self._gathered(leaf, layout) for leaf, layout in pairs], structure)

    def _logits(self, leaf: Any, layout: Layout) -> Any:
        if layout is None or not isinstance(leaf, Tensor):
            return leaf
        dim = layout % leaf.dim()
        lengths = tuple(self._group.tell(leaf.shape[dim]))
        return ShardedLogits(leaf, ShardedDim(dim, sum(lengths), 1, lengths), self._group)

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

    def divided(leaf: Tensor) -> Tensor:
        if leaf.dim() < 2 or not leaf.is_floating_point():
            return leaf
        length = leaf.shape[-1]
        dim = ShardedDim(leaf.dim() - 1, length, 1, tuple(sizes(length, 1)))
        return ShardedLogits(leaf.detach(), dim, _OnlyMember(), reasons.append)

    with torch.no_grad():
        loss(tree.replace(Tensor, divided, outputs), targets)
    return reasons[0] if reasons else ""
