"""The model's outputs, of which each member has some positions, and losses of them.

Logits of a long sequence are large, so nobody gathers them for a loss that can be computed by
positions: the user's loss runs on the member's positions, and what it does with them is watched. It
is told whole sizes, may see them in other shapes, and takes their cross-entropy, which is summed
over the members. If it does anything else, it is called again with whole outputs, and from then on
at once. So whatever the loss is, it gives what it gives on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.engine.context.values import all_positions, own_positions, summed_cross_entropy
from penstock.engine.context.zigzag import PositionDim
from penstock.engine.model import tree
from penstock.engine.tensor.group import TensorGroup
from penstock.engine.tensor.recorded_rules import ShardedDim, reshaped

OUTPUTS = "output_positions"
"""The attribute of a model's last layer under which they stand."""


class OutputPositions:
    """How one member has what the model returns.

    Args:
        group: with whom.
        ways: by mode (whether the model trains), how each leaf of the output is divided; ``None``
            for what all members have.
    """

    def __init__(
        self, group: TensorGroup, ways: Mapping[bool, Sequence[ShardedDim | None]]
    ) -> None:
        self._group = group
        self._ways = ways
        self._takes_whole = False

    def renew(self) -> None:
        """A step has failed, in which some members may have come to whole outputs and others not:
        none does at once."""
        self._takes_whole = False

    def whole(self, outputs: Any, training: bool) -> Any:
        """All positions of a member's outputs. All members call it at the same time."""
        leaves, structure = tree.flatten(outputs)
        pairs = zip(leaves, self._ways[training], strict=True)
        return tree.unflatten(
            [
                leaf
                if divided is None
                else all_positions(leaf, self._group, PositionDim(*divided[:3]))
                for leaf, divided in pairs
            ],
            structure,
        )

    def scored(self, loss: Callable[[Any], Tensor], training: bool) -> Callable[[Any], Tensor]:
        """A loss of a member's outputs, of a loss of whole ones.

        Args:
            loss: from outputs to a number.
        """

        def score(outputs: Any) -> Tensor:
            if not self._takes_whole:
                watch = _LossWatch(self._group, outputs, self._ways[training])
                try:
                    with watch:
                        return loss(outputs)
                except Exception:
                    # Members fail alike; what is wrong with the loss shows again below.
                    if not watch.is_at_a_loss:
                        raise
                    self._takes_whole = True
            return loss(self.whole(outputs, training))

        return score


class _ByPositionsError(Exception):
    """A loss does with some positions what it would have to do with all."""


class _SeenPart(NamedTuple):
    """A value of which a member has its positions, as a loss sees it.

    Attributes:
        part: the member's.
        divided: how.
        shape: of the whole.
    """

    part: Tensor
    divided: ShardedDim
    shape: torch.Size


_SAME = {"float", "double", "half", "bfloat16", "to", "contiguous", "type"}
_VIEWS = {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze"}
_OF_THE_WHOLE = {"shape", "ndim", "size", "dim", "numel", "ndimension", "is_floating_point"}
_OF_EACH_PART = {"dtype", "device", "requires_grad", "is_cuda", "layout"}


class _LossWatch(TorchFunctionMode):
    """Stands between a loss and the outputs that it is given.

    Attributes:
        is_at_a_loss: whether whole outputs are needed.
    """

    def __init__(self, group: TensorGroup, outputs: Any, ways: Sequence[ShardedDim | None]) -> None:
        super().__init__()
        self.is_at_a_loss = False
        self._group = group
        self._seen: dict[int, _SeenPart] = {}
        for leaf, divided in zip(tree.flatten(outputs)[0], ways, strict=True):
            if divided is not None:
                shape = [*leaf.shape]
                outer = shape[divided.dim] // divided.parts[group.index]
                shape[divided.dim] = outer * divided.length
                self._seen[id(leaf)] = _SeenPart(leaf, divided, torch.Size(shape))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree.flatten((args, kwargs))[0]
        given = [self._seen[id(leaf)] for leaf in leaves if id(leaf) in self._seen]
        if not given:
            return func(*args, **kwargs)
        if len(given) > 1 or not args or id(args[0]) not in self._seen:
            raise self._gives_up()
        name = getattr(func, "__name__", "")
        if func is F.cross_entropy:
            return self._cross_entropy(given[0], *args[1:], **kwargs)
        if name in _SAME:
            return self._now(func(*args, **kwargs), given[0].divided, given[0].shape)
        # Whatever is asked about it is answered for the whole.
        whole = torch.empty(given[0].shape, dtype=given[0].part.dtype, device="meta")
        if name in _VIEWS:
            return self._viewed(given[0], func(whole, *args[1:], **kwargs).shape, name, args)
        attribute = func.__self__.__name__ if name == "__get__" else name
        if attribute in _OF_THE_WHOLE:
            return func(whole, *args[1:], **kwargs)
        if attribute in _OF_EACH_PART:
            return func(*args, **kwargs)
        raise self._gives_up()

    def _gives_up(self) -> _ByPositionsError:
        self.is_at_a_loss = True
        return _ByPositionsError()

    def _now(self, part: Tensor, divided: ShardedDim, shape: Sequence[int]) -> Tensor:
        self._seen[id(part)] = _SeenPart(part, divided, torch.Size(shape))
        return part

    def _viewed(
        self, seen: _SeenPart, shape: Sequence[int], name: str, args: Sequence[Any]
    ) -> Tensor:
        """The same positions in another shape."""
        divided = seen.divided
        if name in ("transpose", "permute"):
            # Where the dimension goes is seen on a value whose sizes tell dimensions apart.
            marked = torch.empty([*range(1, len(shape) + 1)], device="meta")
            places = [*getattr(marked, name)(*args[1:]).shape]
            made: Tensor = getattr(seen.part, name)(*args[1:])
            return self._now(made, divided.at(places.index(divided.dim + 1)), shape)
        turned = reshaped(divided, seen.shape, shape)
        if turned is None or turned.length != divided.length:
            raise self._gives_up()
        own = [*shape]
        own[turned.dim] = turned.local(own[turned.dim], self._group.index)
        return self._now(seen.part.reshape(own), turned, shape)

    def _cross_entropy(
        self,
        logits: _SeenPart,
        target: Any,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        divided, kind = logits.divided, {"mean": 1, "sum": 2}.get(reduction)
        has_classes = isinstance(target, Tensor) and target.dim() == len(logits.shape)
        old = size_average is not None or reduce is not None
        if old or kind is None or len(logits.shape) < 2 or divided.dim == 1:
            raise self._gives_up()
        place = divided.dim - (divided.dim > 1 and not has_classes)
        fits = [*logits.shape]
        if not has_classes:
            del fits[1]
        if not isinstance(target, Tensor) or [*target.shape] != fits:
            raise self._gives_up()
        own = own_positions(target, self._group, place, divided.length, divided.inner)
        return summed_cross_entropy(
            logits.part, own, self._group, weight, kind, ignore_index, label_smoothing
        )


def positions_of(layers: Sequence[nn.Module]) -> OutputPositions | None:
    """How a member has the output of a stage; ``None`` if it has all of it."""
    return vars(layers[-1]).get(OUTPUTS) if layers else None
