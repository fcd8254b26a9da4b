"""``nn.MultiheadAttention`` whose members share positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.engine.context.ring import ring_attention
from penstock.engine.tensor.attention import HeadAttention
from penstock.engine.tensor.group import TensorGroup


class RingHeads(HeadAttention):
    """Each member has all heads, for its positions; keys and values go round."""

    sharers: TensorGroup

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, length: int = 0
    ) -> tuple[Tensor, Any]:
        """The output, and no weights.

        Args:
            query, key, value: ``[rows, own positions, width]``, or the first two the other way
                round without ``batch_first``.
            length: of the sequence, where attention is causal; else 0.
        """
        given = [self._rows_first(each, True) for each in (query, key, value)]
        queries, keys, values = self._projected(*given)
        attended = ring_attention(queries, keys, values, self.sharers, length)
        return self._output(attended, True), None
