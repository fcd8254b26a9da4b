"""GPT-2, as Hugging Face's ``transformers`` has it.

Radford et al., 2019, section 2.3. Embedding and output share their weights.
Train it with ``use_cache=False``: the cache of keys and values is for writing.
"""

from __future__ import annotations

from typing import Any

from torch import Generator, Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.models.data import text
from examples.models.sizes import chosen, classified

SIZES = {
    "paper": {"width": 768, "layers": 12, "heads": 12, "vocabulary": 50257, "length": 1024},
    "small": {"width": 16, "layers": 2, "heads": 2, "vocabulary": 128, "length": 16},
}


def build(size: str = "paper", width: float = 1) -> nn.Module:
    """The smallest of the published models with 124 million parameters, or a smaller one.

    Args:
        size: ``"paper"`` or ``"small"``.
        width: a factor for the width.
    """
    sizes = chosen(SIZES, size, width)
    config = GPT2Config(
        n_embd=sizes["width"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["length"],
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def batch(rows: int, size: str, draw: Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Python's standard library, and its next bytes."""
    tokens, targets = text(rows, SIZES[size]["length"], SIZES[size]["vocabulary"], draw)
    return {"input_ids": tokens}, targets


def loss(output: Any, targets: Tensor) -> Tensor:
    """The cross entropy of the next token."""
    return classified(output.logits, targets)
