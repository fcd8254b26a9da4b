"""GNMT: translation with deep LSTMs, attention and residual connections.

Wu et al., arXiv:1609.08144, 2016, section 3 and figure 1; attention is additive (Bahdanau et al.,
arXiv:1409.0473). One difference: in the paper the bottom decoder layer asks with its previous
output, word by word. Here its output at each word asks for that word, so that a layer reads whole
sentences and can be a stage.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from examples.models.data import translations
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"layers": 8, "hidden": 1024, "vocabulary": 32000, "length": 50},
    "sixteen": {"layers": 16, "hidden": 1024, "vocabulary": 32000, "length": 50},
    "small": {"layers": 4, "hidden": 8, "vocabulary": 20, "length": 5},
}


class Attention(nn.Module):
    """How much each word of the target looks at each word of the source."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, asking: Tensor, memory: Tensor) -> Tensor:
        """[rows, targets, hidden], [rows, sources, hidden] → [rows, targets, hidden]."""
        both = self.query(asking).unsqueeze(2) + self.key(memory).unsqueeze(1)
        weights = self.score(torch.tanh(both)).squeeze(3).softmax(2)
        return weights @ memory


class GNMT(nn.Module):
    """From (source, target so far) to the logits of the next word."""

    def __init__(self, layers: int, hidden: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.both_ways = nn.LSTM(hidden, hidden, bidirectional=True, batch_first=True)
        widths = [2 * hidden] + [hidden] * (layers - 2)
        self.encoder = nn.ModuleList(nn.LSTM(w, hidden, batch_first=True) for w in widths)
        self.target = nn.Embedding(vocabulary, hidden)
        self.asking = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention = Attention(hidden)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(layers - 1)
        )
        self.dropout = nn.Dropout(dropout)
        self.words = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens [rows, sources] and [rows, targets] → logits [rows, targets, vocabulary]."""
        memory, _ = self.both_ways(self.dropout(self.source(source)))
        for index, layer in enumerate(self.encoder):
            output, _ = layer(self.dropout(memory))
            memory = output + memory if index > 0 else output
        value, _ = self.asking(self.dropout(self.target(target)))
        context = self.attention(value, memory)
        for index, layer in enumerate(self.decoder):
            output, _ = layer(torch.cat([self.dropout(value), context], 2))
            value = output + value if index > 0 else output
        return self.words(value)


def build(size: str = "paper", width: float = 1) -> GNMT:
    """The model of the paper, or another one.

    Args:
        size: ``"paper"``, ``"sixteen"``, as deep as PipeDream trained it, or ``"small"``.
        width: a factor for the widths of all layers.
    """
    sizes = chosen(SIZES, size, width)
    return GNMT(sizes["layers"], sizes["hidden"], sizes["vocabulary"], dropout=0.2)


def batch(rows: int, size: str, draw: Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sentences with what is translated so far, and their translations."""
    return translations(rows, SIZES[size]["length"], SIZES[size]["vocabulary"], draw)


loss = classified
