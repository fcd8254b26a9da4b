"""Small models of transformers, plans for them, and minibatches of tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors import safe_open
from torch import nn

import penstock as pk
from tests.kit.helpers import make_plan
from tests.kit.training import DEADLINE_SECONDS, sgd

_TOKENS = torch.randint(0, 40, (8, 10), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": _TOKENS, "labels": _TOKENS}


def built(kind: str, num_blocks: int = 2) -> nn.Module:
    """A language model without dropout, always the same: ``gpt2`` (whose weights are tied),
    ``llama`` or ``llama with tied weights``."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=8, n_layer=num_blocks, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=num_blocks,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=kind != "llama",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def on_meta(kind: str, num_blocks: int = 2) -> nn.Module:
    with torch.device("meta"):
        return built(kind, num_blocks)


@cache
def _captured(kind: str) -> nn.Module:
    return pk.capture(built(kind), {key: rows[:2] for key, rows in BATCH.items()})


def planned(kind: str, schedule: str = "1f1b") -> pk.Plan:
    """A plan for two ranks, from the model with values."""
    captured = _captured(kind)
    return replace(make_plan(captured, 2, 4, schedule), example=captured.example)


def pipeline_of(model: nn.Module, plan: pk.Plan, **options) -> pk.Pipeline:
    return pk.Pipeline(
        model, plan, optimizer=sgd, seed=3, deadline_seconds=DEADLINE_SECONDS, **options
    )


def logits_of(folder: Path, model: nn.Module) -> torch.Tensor:
    """What transformers computes with a folder."""
    loaded, told = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return loaded.eval()(BATCH["input_ids"]).logits


def keys_in(folder: Path) -> dict[str, list[str]]:
    """What each file of a folder has."""
    keys = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            keys[path.name] = sorted(file.keys())
    return keys
