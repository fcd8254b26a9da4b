"""An output of which each member has a part, as a loss sees it: with the shape of the whole.

What losses do with outputs before a cross entropy is done on the part, and so is the cross entropy,
in the way of those who share (``OutputSharing``). Whatever else a loss does makes the output whole,
so that any loss is right, and one that can be followed needs no gather. What it writes to the
output, or to a view of it, is written to the whole: parts then have old values, and are followed no
more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from penstock.engine.following.dims import ShardedDim, reshaped
from penstock.engine.model import tree
from penstock.engine.tensor.group import TensorGroup


class OutputSharing(ABC):
    """In which way members share an output.

    Args:
        group: with whom.
        watch: told when outputs have to be made whole, by what.
    """

    def __init__(self, group: TensorGroup, watch: Callable[[str], None] | None = None) -> None:
        self.group, self.watch = group, watch

    @abstractmethod
    def whole(self, part: Tensor, divided: ShardedDim) -> Tensor:
        """The whole value of a member's part."""

    @abstractmethod
    def stays(self, before: ShardedDim, after: ShardedDim, size: int) -> bool:
        """Whether a value can be seen in another shape.

        Args:
            before, after: how it is divided.
            size: of the whole dimension that is then divided.
        """

    @abstractmethod
    def follow(
        self, func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a function gives of a value, and of its other arguments, in which nothing else is
        divided; ``None`` where it needs the whole of it."""


class ShardedValue(Tensor):
    """An output of which a member has a part, with the shape of the whole.

    Args:
        part: the member's, with its graph.
        divided: which dimension is divided.
        sharing: with whom.
        source: of which other one it is a view, if it is one.
    """

    part: Tensor
    divided: ShardedDim
    sharing: OutputSharing
    source: _ViewSource | None
    gathered: Tensor | None
    unwritten: int

    @staticmethod
    def __new__(
        cls: type[Self],
        part: Tensor,
        divided: ShardedDim,
        sharing: OutputSharing,
        source: _ViewSource | None = None,
    ) -> Self:
        shape, mine = [*part.shape], divided.parts[sharing.group.index]
        each = shape[divided.dim] // mine if mine else divided.inner
        shape[divided.dim] = each * divided.length
        own: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        own.part, own.divided, own.sharing, own.source = part, divided, sharing, source
        own.gathered, own.unwritten = None, 0
        return own

    def whole(self, by: str) -> Tensor:
        """All of it.

        Args:
            by: what needs it.
        """
        if self.sharing.watch is not None:
            self.sharing.watch(by)
        return self._whole()

    def _whole(self) -> Tensor:
        # There is one, whoever asks first: what is written to it, all are to see.
        if self.gathered is None:
            source = self.source
            with torch.set_grad_enabled(source is None or source.learns):
                if source is None:
                    self.gathered = self.sharing.whole(self.part, self.divided)
                else:
                    self.gathered = source.view(source.value._whole())
            if not self.gathered.is_inference():
                self.unwritten = self.gathered._version
        return self.gathered

    @property
    def is_written(self) -> bool:
        """Whether its values may have changed since the members computed their parts."""
        if self.source is not None:
            return self.source.value.is_written
        whole = self.gathered  # whose views count with it
        return whole is not None and (whole.is_inference() or whole._version != self.unwritten)

    def like(
        self, part: Tensor, view: Callable[[Tensor], Tensor], divided: ShardedDim | None = None
    ) -> ShardedValue:
        """Another one of the same members, of the same values.

        Args:
            part: made of this one's.
            view: makes the same of the whole, where the new one lies in this one's memory.
            divided: how it is; by default as this one.
        """
        if part is self.part:
            return self
        old, new = (value.untyped_storage()._cdata for value in (self.part, part))
        source = _ViewSource(self, view, torch.is_grad_enabled()) if old == new else None
        return ShardedValue(part, divided or self.divided, self.sharing, source)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SEEN:
                return func(*args, **kwargs)
            mine = args[0] if args else None
            others = tree.tensors((args[1:], kwargs))
            is_alone = not any(isinstance(other, ShardedValue) for other in others)
            if isinstance(mine, ShardedValue) and is_alone and not mine.is_written:
                follow = _FOLLOWED.get(func, mine.sharing.follow)
                followed = follow(func, mine, args[1:], kwargs)
                if followed is not None:
                    return followed
            name = getattr(func, "__name__", str(func))
            return func(*_made_whole(args, name), **_made_whole(kwargs, name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Whatever comes past ``__torch_function__``."""
        name = str(func)
        return func(*_made_whole(args, name), **_made_whole(kwargs or {}, name))


class _ViewSource(NamedTuple):
    """Of which value another one is a view, made by whom, and whether gradients go through it."""

    value: ShardedValue
    view: Callable[[Tensor], Tensor]
    learns: bool


class SharedOutput(ABC):
    """How a member has the output of a model of which others have parts, too."""

    @abstractmethod
    def for_loss(self, value: Any) -> Any:
        """The output as a loss, and metrics, are to see it."""

    @abstractmethod
    def whole(self, value: Any) -> Any:
        """The output as on one device. All members call it at the same time."""


def _made_whole(value: Any, by: str) -> Any:
    """Arguments, with whole values in the place of parts."""
    return tree.replace(ShardedValue, lambda mine: mine.whole(by), value)


Follow = Callable[[Any, ShardedValue, Sequence[Any], Mapping[str, Any]], Any]
"""As ``OutputSharing.follow``."""


def _same(func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Treats every number by itself, whatever else it is given."""
    others = tree.tensors((args, kwargs))
    # Of a gradient of another tensor each member would have a term.
    if any(other.dim() or other.requires_grad for other in others):
        return None
    called = _called(func, args, kwargs)
    return mine.like(called(mine.part), called)


def _called(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """A function with all its arguments but the first."""
    return lambda value: func(value, *args, **kwargs)


def _viewed(func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    before = [*mine.shape]
    after = [*func(torch.empty(before, device="meta"), *args, **kwargs).shape]
    divided = reshaped(mine.divided, before, after)
    if divided is None or not mine.sharing.stays(mine.divided, divided, after[divided.dim]):
        return None
    after[divided.dim] = divided.local(after[divided.dim], mine.sharing.group.index)
    return mine.like(mine.part.reshape(after), _called(func, args, kwargs), divided)


def _permuted(func: Any, mine: ShardedValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # A dimension is known again by its size, where all are different.
    numbered = torch.empty(tuple(range(2, 2 + mine.dim())), device="meta")
    place = [*func(numbered, *args, **kwargs).shape].index(2 + mine.divided.dim)
    called = _called(func, args, kwargs)
    return mine.like(called(mine.part), called, mine.divided.at(place))


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
}  # fmt: skip


_CROSS_ENTROPY = (
    "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip


def cross_entropy_options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``F.cross_entropy`` is given beside logits, by its names, ``target`` and ``weight``
    always; ``None`` if it cannot be computed on parts: with the words of old versions, or a weight
    that learns, of whose gradient each member would have a term."""
    given = {"weight": None, **dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs}
    is_old = any(given.pop(name, None) is not None for name in ("size_average", "reduce"))
    learns = given["weight"] is not None and given["weight"].requires_grad
    return None if is_old or learns else given
