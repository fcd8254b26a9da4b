"""BERT, as Hugging Face's ``transformers`` has it.

Devlin et al., arXiv:1810.04805, 2018, sections 3 and 3.1, task 1: some words are hidden, and told
from those around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from examples.models.data import masked_text
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"width": 768, "layers": 12, "heads": 12, "vocabulary": 30522, "length": 512},
    "small": {"width": 16, "layers": 2, "heads": 2, "vocabulary": 129, "length": 16},
}


def build(size: str = "paper", width: float = 1) -> nn.Module:
    """The smaller of the published models, BERT-base with 110 million parameters, or a small one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for the width.
    """
    sizes = chosen(SIZES, size, width)
    config = BertConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["width"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["length"],
    )
    return BertForMaskedLM(config)


def batch(rows: int, size: str, draw: Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Python's standard library with some bytes hidden, and those bytes."""
    tokens, targets = masked_text(rows, SIZES[size]["length"], SIZES[size]["vocabulary"], draw)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, targets


def hidden(targets: Tensor) -> Tensor:
    """How many words are hidden: what the loss is a mean over (``Pipeline(weight=…)``)."""
    return (targets != -100).sum()


def loss(output: Any, targets: Tensor) -> Tensor:
    """The cross entropy of hidden tokens, a mean over those."""
    return classified(output.logits, targets)
