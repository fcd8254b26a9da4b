"""AWD-LSTM: a language model of LSTMs that drops out nearly everything.

Merity, Keskar, Socher, arXiv:1708.02182, 2017, sections 2, 4.2, 4.3 and 4.5: DropConnect on the
hidden-to-hidden weights, one dropout mask for a whole sequence, dropped words, tied embedding and
output. Without the averaged optimizer and the penalties; every sequence starts from zeros.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from examples.models.data import text
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"embedding": 400, "hidden": 1150, "vocabulary": 10000, "length": 70},
    "small": {"embedding": 8, "hidden": 12, "vocabulary": 20, "length": 6},
}


class WordDropout(nn.Module):
    """An embedding that forgets some words for a while: all their occurrences at once."""

    def __init__(self, vocabulary: int, width: int, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width).uniform_(-0.1, 0.1))
        self.rate = rate

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length] → [rows, length, width]."""
        kept = F.dropout(self.weight.new_ones(len(self.weight), 1), self.rate, self.training)
        return F.embedding(tokens, self.weight * kept)


class SameMaskDropout(nn.Module):
    """Dropout with one mask per row, the same for all words."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, value: Tensor) -> Tensor:
        """[rows, length, width], unchanged in shape."""
        mask = value.new_ones(value.shape[0], 1, value.shape[2])
        return value * F.dropout(mask, self.rate, self.training)


class WeightDroppedLSTM(nn.Module):
    """An LSTM layer whose hidden-to-hidden weights are dropped, once per sequence."""

    def __init__(self, inputs: int, hidden: int, rate: float) -> None:
        super().__init__()
        bound = hidden**-0.5
        shapes = [(4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
        made = [nn.Parameter(torch.empty(shape).uniform_(-bound, bound)) for shape in shapes]
        self.input_weight, self.hidden_weight, self.input_bias, self.hidden_bias = made
        self.hidden = hidden
        self.rate = rate

    def forward(self, value: Tensor) -> Tensor:
        """[rows, length, inputs] → [rows, length, hidden]."""
        dropped = F.dropout(self.hidden_weight, self.rate, self.training)
        weights = [self.input_weight, dropped, self.input_bias, self.hidden_bias]
        start = value.new_zeros(1, value.shape[0], self.hidden)
        # With biases, one layer, no dropout between layers, one direction, rows first.
        output, _, _ = torch.lstm(
            value, (start, start), weights, True, 1, 0.0, self.training, False, True
        )
        return output


class AWDLSTM(nn.Module):
    """Three layers between an embedding and its transpose."""

    def __init__(self, embedding: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = WordDropout(vocabulary, embedding, 0.1)
        self.input_dropout = SameMaskDropout(0.4)
        widths = [embedding, hidden, hidden, embedding]
        self.layers = nn.ModuleList(
            WeightDroppedLSTM(inputs, outputs, 0.5)
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.between = SameMaskDropout(0.25)
        self.output_dropout = SameMaskDropout(0.4)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length] → logits [rows, length, vocabulary]."""
        value = self.input_dropout(self.embedding(tokens))
        for index, layer in enumerate(self.layers):
            value = layer(self.between(value) if index else value)
        return F.linear(self.output_dropout(value), self.embedding.weight, self.bias)


def build(size: str = "paper", width: float = 1) -> AWDLSTM:
    """The model for the Penn Treebank with 24 million parameters, or a small one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for the widths of all layers.
    """
    sizes = chosen(SIZES, size, width)
    return AWDLSTM(sizes["embedding"], sizes["hidden"], sizes["vocabulary"])


def batch(rows: int, size: str, draw: Generator) -> tuple[Tensor, Tensor]:
    """Python's standard library, and its next bytes."""
    return text(rows, SIZES[size]["length"], SIZES[size]["vocabulary"], draw)


loss = classified
