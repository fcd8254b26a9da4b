"""Attention over positions that the members of a group share: a ring of keys and values.

Every member keeps its queries, and keys and values go round. What a query has got from some keys is
a mean with the logarithm of its weights' sum; means of different keys are merged by these, as an
online softmax does (Liu et al., "Ring Attention", arXiv 2310.01889). Backwards, keys and values go
round once more, and their gradients with them, one member behind.

Where attention is causal, a member's positions are two chunks (``zigzag``). Of the keys of an
earlier member all its queries see the first chunk, of those of a later one its later queries see
both; so a round is half the scores, on every member.

Scores are made for a tile of queries at a time; what is kept for the backward is queries, keys,
values, the output and a number for each query and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.context.zigzag import chunks
from penstock.engine.tensor.group import TensorGroup, dense_copy

_TILE = 512
"""Queries for which scores are made at once, per head."""


class _QueryTile(NamedTuple):
    """A tile of queries, and the keys that they see of those that are here.

    Attributes:
        start, stop: the queries.
        num_keys: they see so many of the first keys.
        is_causal: whether each of them sees those up to its own number only.
    """

    start: int
    stop: int
    num_keys: int
    is_causal: bool


class _KeyRing(NamedTuple):
    """A member's attention.

    Attributes:
        group: with whom.
        length: of the sequence, where attention is causal; 0 where all see all.
        scale: of the scores.
    """

    group: TensorGroup
    length: int
    scale: float

    def rounds(self, step: int, num_queries: int, num_keys: int) -> Iterator[_QueryTile]:
        """What there is to compute with the keys that have come ``step`` members far."""
        size, index = self.group.size, self.group.index
        start, is_local = 0, step == 0
        if self.length:
            owner = (index - step) % size
            if owner < index:
                num_keys = chunks(self.length, size, owner)[0].length
            elif owner > index:
                start = chunks(self.length, size, index)[0].length
        for first in range(start, num_queries, _TILE):
            stop = min(first + _TILE, num_queries)
            is_causal = bool(self.length) and is_local
            yield _QueryTile(first, stop, stop if is_causal else num_keys, is_causal)


class _RingAttention(torch.autograd.Function):
    """Of values as ``ring_attention`` takes them. These are kept as they are, since they may be
    parts of one value, and folded again for the backward. Half precision travels and is kept, and
    computed with in single."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, ring: _KeyRing) -> Tensor:
        ctx.ring = ring
        folded, *rest = _folded_all(queries, keys, values)
        held: Sequence[Tensor] = rest
        wide, size = _wide(queries), ring.group.size
        output = folded.new_zeros((*folded.shape[:-1], values.shape[-1]), dtype=wide)
        weight = folded.new_full(folded.shape[:-1], -inf, dtype=wide)
        for step in range(size):
            arriving = ring.group.hand_on(_sendable(held, step)) if step < size - 1 else None
            for part in ring.rounds(step, folded.shape[2], held[0].shape[1]):
                _merge(output, weight, folded, held, part, ring.scale)
            held = held if arriving is None else arriving()
        made = output.to(queries.dtype).view(*queries.shape[:-1], values.shape[-1])
        attended = dense_copy(made, _order(made.dim()))
        ctx.save_for_backward(queries, keys, values, attended, weight)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *given, output, weight = ctx.saved_tensors
        ring, wide = ctx.ring, _wide(given[0])
        queries, *rest = _folded_all(*given)
        held: Sequence[Tensor] = rest
        gradient, output = (
            value.reshape(*queries.shape[:-1], value.shape[-1]) for value in (*gradients, output)
        )
        inner = (gradient.to(wide) * output).sum(-1)
        back = torch.zeros_like(queries, dtype=wide)
        there = _TileGradients(queries, gradient, weight, inner, back)
        size = ring.group.size
        coming: Callable[[], Any] | None = None
        for step in range(size):
            arriving = ring.group.hand_on(_sendable(held, step)) if step < size - 1 else None
            own = tuple(torch.zeros_like(value, dtype=wide) for value in held)
            for part in ring.rounds(step, queries.shape[2], held[0].shape[1]):
                there.add(own, held, part, ring.scale)
            total = own if coming is None else tuple(map(torch.add, coming(), own))
            coming = ring.group.hand_on(total) if size > 1 else None
            held = held if arriving is None else arriving()
        mine = total if coming is None else coming()  # they have come round to their owner
        made = zip((back, *mine), given, strict=True)
        return *(value.to(old.dtype).view(old.shape) for value, old in made), None


def _folded_all(*given: Tensor) -> tuple[Tensor, ...]:
    """Queries as ``[key heads, queries per key head, positions, width]``, with rows among the
    heads, and keys and values as ``[key heads, positions, width]``."""
    count = prod(given[1].shape[:-2])
    queries, *others = given
    folded = queries.reshape(count, -1, *queries.shape[-2:])
    return folded, *(value.reshape(count, *value.shape[-2:]) for value in others)


def _order(num_dims: int) -> list[int]:
    """In which order dimensions lie in memory: heads inside positions, as torch's attention gives
    them, and code that views them expects."""
    order = [*range(num_dims)]
    if num_dims > 2:
        order[-3], order[-2] = order[-2], order[-3]
    return order


class _TileGradients(NamedTuple):
    """What a backward has of all queries; ``back`` is added to."""

    queries: Tensor
    gradient: Tensor
    weight: Tensor
    inner: Tensor
    back: Tensor

    def add(
        self, own: tuple[Tensor, ...], held: Sequence[Tensor], part: _QueryTile, scale: float
    ) -> None:
        """Add the gradients of a round to those of queries, and of these keys and values."""
        queries, gradient, weight, inner = (
            _folded(value, part) for value in (self.queries, self.gradient, self.weight, self.inner)
        )
        keys, values = _seen(held, part)
        scores = _scores(queries, keys, part, scale)
        weights = torch.exp(scores - weight.unsqueeze(-1))
        of_weights = gradient @ values.transpose(-2, -1)
        of_scores = weights * (of_weights - inner.unsqueeze(-1)) * scale
        own[0][:, : part.num_keys] += of_scores.transpose(-2, -1) @ queries
        own[1][:, : part.num_keys] += weights.transpose(-2, -1) @ gradient
        place = self.back[:, :, part.start : part.stop]
        place += (of_scores @ keys).view(place.shape)


def _wide(value: Tensor) -> torch.dtype:
    """The precision to compute in."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def _sendable(held: Sequence[Tensor], step: int) -> tuple[Tensor, ...]:
    """Keys and values for the next member. The first ones are autograd's, and threads hand over
    tensors as they are."""
    return tuple(map(dense_copy, held)) if step == 0 else tuple(held)


def _folded(value: Tensor, part: _QueryTile) -> Tensor:
    """A tile, with the queries of a key head one behind another."""
    return value[:, :, part.start : part.stop].flatten(1, 2).to(_wide(value))


def _seen(held: Sequence[Tensor], part: _QueryTile) -> tuple[Tensor, Tensor]:
    """The keys that a tile of queries sees, and their values."""
    keys, values = held
    wide = _wide(keys)
    return keys[:, : part.num_keys].to(wide), values[:, : part.num_keys].to(wide)


def _scores(queries: Tensor, keys: Tensor, part: _QueryTile, scale: float) -> Tensor:
    scores = queries @ keys.transpose(-2, -1) * scale
    if not part.is_causal:
        return scores
    numbers = torch.arange(part.num_keys, device=keys.device)
    hidden = numbers > numbers[part.start : part.stop].unsqueeze(-1)
    by_query: Tensor = torch.unflatten(scores, 1, (-1, part.stop - part.start))
    return by_query.masked_fill(hidden, -inf).flatten(1, 2)


def _merge(
    output: Tensor,
    weight: Tensor,
    queries: Tensor,
    held: Sequence[Tensor],
    part: _QueryTile,
    scale: float,
) -> None:
    """Add what a tile of queries gets from keys and values to what it has got from others."""
    keys, values = _seen(held, part)
    scores = _scores(_folded(queries, part), keys, part, scale)
    here = torch.logsumexp(scores, -1)
    means = torch.exp(scores - here.unsqueeze(-1)) @ values
    mine, there = (value[:, :, part.start : part.stop] for value in (output, weight))
    here = here.view(there.shape)
    both = torch.logaddexp(there, here)
    mine *= torch.exp(there - both).unsqueeze(-1)
    mine += means.view(mine.shape) * torch.exp(here - both).unsqueeze(-1)
    there.copy_(both)


def ring_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    group: TensorGroup,
    length: int = 0,
    scale: float | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of positions of which each member has some; graphs call
    it.

    Args:
        queries: ``[…, heads, own positions, width]``.
        keys, values: likewise; their heads may be fewer, each for as many heads of queries.
        length: of the sequence, of which all members have their ``zigzag.chunks``, where each
            position sees those up to itself; 0 where all see all.
        scale: of the scores; by default one over the root of the width.

    Returns:
        ``[…, heads, own positions, width of values]``, lying in memory as torch's does.
    """
    kind = queries.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        queries, keys, values = (value.to(to) for value in (queries, keys, values))
    ring = _KeyRing(group, length, queries.shape[-1] ** -0.5 if scale is None else scale)
    with torch.autocast(kind, enabled=False):
        made: Tensor = _RingAttention.apply(queries, keys, values, ring)  # type: ignore[no-untyped-call]
    return made
