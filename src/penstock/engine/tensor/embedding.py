"""Embeddings of which each member has some of the features, or of the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.tensor.layouts import converted, summed
from penstock.engine.tensor.membership import Member
from penstock.engine.tensor.parts import bounds


class ColumnEmbedding(Member, nn.Embedding):
    """Each member has its part of the features: all tokens → features."""

    def forward(self, input: Tensor) -> Tensor:
        """``int64[…] → […, part of embedding_dim]``."""
        here = self.membership
        here.region.enter()
        tokens = converted(input, here.around, None, here.group, here.name)
        return F.embedding(tokens, self.weight, self.padding_idx)


class RowEmbedding(Member, nn.Embedding):
    """Each member looks up the tokens of its part of the vocabulary, and everyone adds up."""

    def forward(self, input: Tensor) -> Tensor:
        """``int64[…] → […, embedding_dim]``, in the layout of the membership."""
        here = self.membership
        tokens = converted(input, here.around, None, here.group, here.name)
        own = bounds(self.num_embeddings, here.group.size, here.group.index)
        elsewhere = (tokens < own.start) | (tokens >= own.stop)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - own.start if own.start <= padding < own.stop else None
        local = (tokens - own.start).masked_fill(elsewhere, 0)
        term = F.embedding(local, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return summed(term, here.gives, here.group)
