"""Layouts of values that a group shares, and how values go from one to another.

A layout is the dimension along which each member has its shard of a value: by rows (of the batch)
or by features; or every member has the whole value. Its gradient lies as the value does. Two things
are different inside a layer only: ``copies`` are whole, but every member's gradient of them is one
term of a sum; and ``partial`` is a sum of which every member has a term. All are linear maps, and
gradients go back by their adjoints:

======================  ===================  =====================
from → to               forward              gradient
======================  ===================  =====================
shard → whole           gather               own shard
shard → copies          gather               reduce-scatter
whole → shard           own shard            gather
whole → copies          nothing              all-reduce
partial → whole         all-reduce           nothing
partial → shard         reduce-scatter       gather
shard → other shard     all-to-all           all-to-all
======================  ===================  =====================

None of them works in place, and what they give shares no memory with what they were given, except
``enter``, whose reader must not overwrite it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ModelError
from penstock.engine.model import tree
from penstock.engine.tensor.group import TensorGroup


class _ShardToWhole(torch.autograd.Function):
    """shard → whole, or copies where gradients are terms of a sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup, dim: int, sums: bool) -> Tensor:
        whole, ctx.lengths = group.gather(part, dim)
        ctx.group, ctx.dim, ctx.sums = group, dim, sums
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        group: TensorGroup = ctx.group
        if ctx.sums:
            back = group.reduce_scatter(gradients[0], ctx.dim, ctx.lengths)
        else:
            back = gradients[0].split(ctx.lengths, ctx.dim)[group.index].contiguous()
        return back, None, None, None


class _ToShard(torch.autograd.Function):
    """A map that gives shards, so that shards of its gradient come back."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.gather(gradients[0], ctx.dim)[0], None, None


class _WholeToShard(_ToShard):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.part(whole, dim)


class _WholeToCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_reduce(gradients[0]), None


class _PartialToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, group: TensorGroup) -> Tensor:
        return group.all_reduce(term)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _PartialToShard(_ToShard):
    @staticmethod
    def forward(ctx: Any, term: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(term, dim)


class _ShardToShard(torch.autograd.Function):
    """shard along one dimension → shard along another."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup, have: int, want: int) -> Tensor:
        ctx.group, ctx.have, ctx.want = group, have, want
        turned, ctx.lengths = group.all_to_all(part, have, want)
        return turned

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back, _ = ctx.group.all_to_all(gradients[0], ctx.want, ctx.have, ctx.lengths)
        return back, None, None, None


def gather(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """shard → whole: every member gets all shards along ``dim``."""
    return _call(_ShardToWhole, part, group, dim, False)


def gather_copies(part: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """shard → copies: as ``gather``, for a reader whose gradient is one term of a sum."""
    return _call(_ShardToWhole, part, group, dim, True)


def own_shard(whole: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """whole → shard: every member keeps its shard along ``dim``."""
    return _call(_WholeToShard, whole, group, dim)


def enter(whole: Tensor, group: TensorGroup) -> Tensor:
    """whole → copies: the value itself; its gradient is the sum of the members'."""
    return _call(_WholeToCopies, whole, group)


def leave(term: Tensor, group: TensorGroup) -> Tensor:
    """partial → whole: the sum of the members' terms."""
    return _call(_PartialToWhole, term, group)


def scatter(term: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """partial → shard: the member's shard, along ``dim``, of the sum of the members' terms."""
    return _call(_PartialToShard, term, group, dim)


def turn(part: Tensor, group: TensorGroup, have: int, want: int) -> Tensor:
    """shard along ``have`` → shard along ``want``."""
    return _call(_ShardToShard, part, group, have, want)


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    value: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return value


Layout = int | None
"""The dimension along which each member has its part; ``None``: everyone has all of it."""

Layouts = Layout | tuple[Layout, ...]
"""One of all tensors in a value, or one for each of its leaves: layers of captured models hand on
masks, too, of which everyone has all."""

WHOLE: Layout = None
ROWS: Layout = 0
SEQUENCE = 1
CHANNELS: Layout = 1
"""Features of convolutions; where a value has two dimensions, they are its features, too."""
FEATURES: Layout = -1


def converted(value: Any, have: Layouts, want: Layouts, group: TensorGroup, layer: str) -> Any:
    """A value in another layout; every tensor in it, if it is nested.

    Raises:
        ModelError: it has a tensor without such a dimension.
    """
    if have == want:
        return value
    if isinstance(have, tuple) or isinstance(want, tuple):
        leaves, structure = tree.flatten(value)
        ways = (layouts_of_leaves(layout, len(leaves)) for layout in (have, want))
        each = zip(leaves, *ways, strict=True)
        moved = [converted(leaf, here, there, group, layer) for leaf, here, there in each]
        return tree.unflatten(moved, structure)
    if type(value) is Tensor:
        return _converted(value, have, want, group, layer)
    return tree.replace(Tensor, lambda tensor: _converted(tensor, have, want, group, layer), value)


def layouts_of_leaves(layout: Layouts, count: int) -> tuple[Layout, ...]:
    """The layout of each leaf of a value."""
    return layout if isinstance(layout, tuple) else (layout,) * count


def _converted(value: Tensor, have: Layout, want: Layout, group: TensorGroup, layer: str) -> Tensor:
    here = _dimension(value, have, layer)
    there = _dimension(value, want, layer)
    if here == there:
        return value
    if here is None:
        assert there is not None
        return own_shard(value, group, there)
    if there is None:
        return gather(value, group, here)
    return turn(value, group, here, there)


def as_copies(value: Tensor, have: Layout, group: TensorGroup) -> Tensor:
    """A value whole on every member, for a reader that divides its outputs."""
    if have is None:
        return enter(value, group)
    return gather_copies(value, group, have % value.dim())


def summed(term: Tensor, want: Layout, group: TensorGroup) -> Tensor:
    """The sum of the members' terms, in a layout."""
    if want is None:
        return leave(term, group)
    return scatter(term, group, want % term.dim())


def _dimension(value: Tensor, layout: Layout, layer: str) -> Layout:
    if layout is None:
        return None
    if not -value.dim() <= layout < value.dim():
        raise ModelError(
            f"layer {layer!r} is given or gives a tensor of {value.dim()} dimensions, which cannot "
            f"be divided along dimension {layout}; let all tensor ranks repeat the layer "
            '(split "whole")'
        )
    return layout % value.dim()
