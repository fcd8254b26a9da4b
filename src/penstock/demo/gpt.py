"""A small GPT over bytes that names its own spine.

It is an ordinary ``nn.Module``. The one thing it does for pipelining is ``spine()``: the layers in
the order in which they run, each fed with nothing but the output of the one before. ``forward``
runs exactly that list, so cutting it anywhere cannot change what is computed.

Its layers also work on slices of the sequence (see ``penstock.engine.stage.slices``).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.base.errors import InputError

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of attention: ``[rows, heads, positions, features]`` each."""


class GPT(nn.Module):
    """A byte-level, decoder-only, pre-norm transformer with learned positions and untied weights.

    The defaults give 10.0 M parameters (40 MB) and a spine of 10 layers that balances when cut in
    the middle. With the suggested microbatch of 2 rows of 48 bytes, either half takes 12–13 ms
    forward and 40 ms forward and backward on one core of an AMD EPYC (torch 2.13, one thread), and
    the hidden state that travels between them is 2 × 48 × 320 float32 = 120 KiB.

    Args:
        vocabulary: number of different tokens; 256 for bytes.
        width: features of the hidden state; a multiple of ``heads``.
        heads: attention heads per block.
        layers: number of transformer blocks, at least 1.
        context: the longest sequence, in tokens.
        dropout: probability, in [0, 1), on embedding, attention and both residual branches.

    Shapes:
        tokens ``int64[rows, length]``, length ≤ context → logits ``[rows, length, vocabulary]``.

    Raises:
        InputError: a size is unusable, or a sequence is longer than ``context``.

    >>> model = GPT(width=16, heads=2, layers=3, context=8)
    >>> [type(layer).__name__ for layer in model.spine()]
    ['Embedding', 'Block', 'Block', 'Block', 'Head']
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 320,
        heads: int = 5,
        layers: int = 8,
        context: int = 48,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "heads": heads, "layers": layers, "context": context}
        _check_sizes({**sizes, "width": width}, dropout)
        self.embedding = Embedding(vocabulary, context, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = Head(width, vocabulary)
        self._initialise(layers)

    def spine(self) -> list[nn.Module]:
        """The layers in execution order: embedding, blocks, head."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token at every position."""
        hidden = tokens
        for layer in self.spine():
            hidden = layer(hidden)
        return hidden

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: normal(0.02), less for the 2·layers branches that are summed.

        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("project.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)


class Embedding(nn.Module):
    """Tokens and their positions: ``int64[rows, length] → [rows, length, width]``."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add the embedding of each token and of its position."""
        return self.forward_slice(tokens, None)[0]

    def forward_slice(self, tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
        """Embed a slice of the sequence that has ``start`` positions before it."""
        start = start or 0
        length, context = start + tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise InputError(
                f"the sequence has {length} tokens, but the model's context is {context}; "
                f"shorten the input or build GPT(context={length})"
            )
        hidden = self.tokens(tokens) + self.positions.weight[start:length]
        return self.dropout(hidden), length


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream: ``[rows, length, width]``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)
        # All that mixes positions can be shared by heads, unless attention drops out.
        self.tensor_positions = not dropout

    def forward(self, hidden: Tensor) -> Tensor:
        """Both branches read a normalised copy; the stream itself is only added to."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]

    def forward_slice(self, hidden: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Run on a slice of the sequence; ``past`` has the keys and values of earlier positions."""
        mixed, past = self.attention.forward_slice(self.attention_norm(hidden), past)
        hidden = hidden + mixed
        return hidden + self.mlp(self.mlp_norm(hidden)), past


class Attention(nn.Module):
    """Causal multi-head self-attention: ``[rows, length, width] → [rows, length, width]``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if not dropout:  # the function that attends would drop the same of every rank's heads
            self.tensor_splits = {"queries_keys_values": "column/3", "project": "row"}
            self.tensor_pieces = heads
        self.head_width = width // heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Every position attends to itself and to those before it."""
        return self.forward_slice(hidden, None)[0]

    def forward_slice(self, hidden: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Run on a slice of the sequence; ``past`` has the keys and values of earlier positions."""
        # Shapes are those of what the projection gives: tensor ranks have some of the heads each.
        split = self.queries_keys_values(hidden).unflatten(-1, (3, -1, self.head_width))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mask = None
        if past is not None:
            keys, values = torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)
            # is_causal would count queries from the first key on.
            length, total = queries.shape[2], keys.shape[2]
            mask = hidden.new_ones(length, total, dtype=torch.bool).tril(total - length)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, mask, dropout_p=dropout, is_causal=mask is None
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.dropout(self.project(mixed)), (keys, values)


class MLP(nn.Module):
    """Four times as wide inside, with GELU: ``[rows, length, width] → [rows, length, width]``."""

    by_position = True
    tensor_splits: ClassVar = {"expand": "column", "project": "row"}

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.dropout(self.project(F.gelu(self.expand(hidden))))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm and logits: ``[rows, length, width] → [rows, length, vocabulary]``."""

    by_position = tensor_positions = True

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """One score per token of the vocabulary."""
        return self.logits(self.norm(hidden))  # type: ignore[no-any-return]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions, in nats per token (per byte with 256 tokens).

    Args:
        logits: ``[rows, length, vocabulary]``.
        targets: ``int64[rows, length]``.

    >>> import torch
    >>> round(loss(torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.int64)).item(), 4)
    5.5452
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _check_sizes(sizes: dict[str, int], dropout: float) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}, but must be ≥ 1")
    if sizes["width"] % sizes["heads"]:
        raise InputError(
            f"width {sizes['width']} does not divide into {sizes['heads']} heads; "
            "choose a multiple of heads"
        )
    if not 0 <= dropout < 1:
        raise InputError(f"dropout is {dropout}, but must be in [0, 1)")
