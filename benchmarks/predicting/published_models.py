"""Transformers of published runs as modules on meta, one shard of tensor ranks, and what
``penstock.estimate`` says of them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as pk


class Shape(NamedTuple):
    """A transformer as one rank has it.

    Attributes:
        rows: of a microbatch.
        sequence: tokens of a row that this rank has (a share of them with context parallelism).
        keys: tokens of a row in all.
        heads, kv_heads, ffn, vocab: this rank's share of them.
        width: of a head.
        shards: ranks that share norms and dropout with sequence parallelism, or 1.
    """

    rows: int
    sequence: int
    keys: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocab: int
    shards: int
    gated: bool
    fused_attention: bool
    dropout: float


class Gathered(torch.autograd.Function):
    """Stands for a collective along the sequence: more or fewer tokens, and no time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tokens: int) -> Tensor:
        ctx.shape = value.shape
        return value.new_empty(value.shape[0], tokens, *value.shape[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].new_empty(ctx.shape), None


class PublishedBlock(nn.Module):
    """A transformer's layer: with LayerNorm and GELU, or with RMSNorm and SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, h = shape, shape.hidden
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        bias = not shape.gated
        self.before_attention, self.before_mlp = norm(h), norm(h)
        kv = shape.kv_heads * shape.width
        self.qkv = nn.Linear(h, shape.heads * shape.width + 2 * kv, bias=bias)
        self.out = nn.Linear(shape.heads * shape.width, h, bias=bias)
        self.up = nn.Linear(h, shape.ffn * (2 if shape.gated else 1), bias=bias)
        self.down = nn.Linear(shape.ffn, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        x = x + F.dropout(self._scattered(self._attention(self.before_attention(x))), s.dropout)
        y = self.up(self._whole(self.before_mlp(x)))
        if s.gated:
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        else:
            y = F.gelu(y, approximate="tanh")
        return x + F.dropout(self._scattered(self.down(y)), s.dropout)

    def _whole(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, self.shape.sequence) if self.shape.shards > 1 else x

    def _scattered(self, x: Tensor) -> Tensor:
        s = self.shape
        return Gathered.apply(x, s.sequence // s.shards) if s.shards > 1 else x

    def _attention(self, x: Tensor) -> Tensor:
        s = self.shape
        kv = s.kv_heads * s.width
        q, k, v = self.qkv(self._whole(x)).split([s.heads * s.width, kv, kv], -1)
        if s.gated:  # rotary positions
            q, k = q * 1.5, k * 1.5
        return self.out(core_attention(s, q, k, v))


def core_attention(s: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention between the projections."""
    if s.keys != s.sequence:
        k, v = (Gathered.apply(part, s.keys) for part in (k, v))
    q, k, v = (part.unflatten(-1, (-1, s.width)).transpose(1, 2) for part in (q, k, v))
    if s.fused_attention:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)
    q, k, v = (part.reshape(-1, part.shape[2], s.width) for part in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).softmax(-1)  # scale, mask and softmax are one kernel
    y = torch.bmm(F.dropout(scores, s.dropout), v)
    return (
        y.view(s.rows, s.heads, s.sequence, s.width).transpose(1, 2).reshape(s.rows, s.sequence, -1)
    )


class CoreAttention(nn.Module):
    """The part that selective recomputation runs again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, qkv: Tensor) -> Tensor:
        s = self.shape
        kv = s.kv_heads * s.width
        return core_attention(s, *qkv.split([s.heads * s.width, kv, kv], -1))


class PublishedHead(nn.Module):
    """The last norm and the logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.hidden)
        self.logits = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.shape.shards > 1:
            y = Gathered.apply(y, self.shape.sequence)
        return self.logits(y).float()


class PublishedEmbedding(nn.Module):
    """Tokens become vectors, on the shard of the sequence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        if self.shape.shards > 1:
            y = Gathered.apply(y, self.shape.sequence // self.shape.shards)
        return F.dropout(y, self.shape.dropout)


class Costs(NamedTuple):
    """What the parts of a model take; ``core_seconds`` is a forward of the attention alone."""

    embedding: pk.Layer
    block: pk.Layer
    head: pk.Layer
    core_seconds: float
    core_bytes: int


@functools.lru_cache(None)
def costs_of(shape: Shape, device: str, software: str, arithmetic: str | None) -> Costs:
    """Estimates of one embedding, block and head."""
    with torch.device("meta"):
        model = nn.Sequential(
            PublishedEmbedding(shape), PublishedBlock(shape), PublishedHead(shape)
        )
        core = nn.Sequential(CoreAttention(shape))
        tokens = torch.empty(shape.rows, shape.sequence, dtype=torch.long)
        width = (shape.heads + 2 * shape.kv_heads) * shape.width
        qkv = torch.empty(
            shape.rows, shape.sequence, width, dtype=torch.bfloat16, requires_grad=True
        )
    model, kinds = model.to(torch.bfloat16), {"device": device, "software": software}

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    plain = pk.estimate(model, tokens, loss=loss, **kinds).layers
    block = plain[1]
    if arithmetic is not None:
        block = pk.estimate(model, tokens, loss=loss, arithmetic=arithmetic, **kinds).layers[1]
    alone = pk.estimate(core, qkv, **kinds).layers[0]
    return Costs(plain[0], block, plain[2], alone.forward_seconds, alone.activation_bytes)
