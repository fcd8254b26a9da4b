"""Models of transformers, and declared blocks, are split by the parts that are found in them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.engine.model.spine import spine_of
from penstock.engine.tensor.parts import parts_in
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import more
from tests.kit.helpers import make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12
WORDS = 24
pytestmark = pytest.mark.xdist_group("captured models")  # which takes long


class Encoder(nn.Module):
    """Of torch's blocks, whose code is recorded with the rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        block = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids):
        return self.head(self.blocks(self.words(input_ids)))


def transformer(kind):
    if kind == "torch":
        return Encoder()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 16, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    grouped = {**sizes, "num_key_value_heads": 2, "use_cache": False}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {
        "Llama": grouped,
        "Mistral": grouped,
        "Qwen2": grouped,
        "Qwen3": {**grouped, "head_dim": 4},
        "Bert": {**sizes, **dropouts},
        "GPT2": {
            "vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 4,
            "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        },
        "T5": {
            "vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
            "num_heads": 4, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "use_cache": False,
        },
    }  # fmt: skip
    purposes = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    config = getattr(transformers, f"{kind}Config")(**settings[kind])
    return getattr(transformers, f"{kind}{purposes.get(kind, 'ForCausalLM')}")(config)


def batch(seed, kind):
    tokens = torch.randint(2, WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(1)} if kind == "T5" else {})


def loss(output, targets):
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def splits_of(model):
    layers = spine_of(model)
    return [
        (layer.name, part)
        for layer in layers
        for part in parts_in(layer, model, is_last=layer is layers[-1])
    ]


ATTENTION_AND_MLP = ["attention", "mlp"]
KINDS = {
    "torch": ["embedding", *ATTENTION_AND_MLP, "head"],
    "Llama": ["embedding", *ATTENTION_AND_MLP, "head"],
    "Mistral": ["embedding", *ATTENTION_AND_MLP, "head"],
    "Qwen2": ["embedding", *ATTENTION_AND_MLP, "head"],
    "Qwen3": ["embedding", *ATTENTION_AND_MLP, "head"],
    "GPT2": ["embedding", *ATTENTION_AND_MLP, "head"],
    "Bert": ["embedding", *ATTENTION_AND_MLP, "head"],
    "T5": [
        "embedding", *ATTENTION_AND_MLP, "embedding", "attention", *ATTENTION_AND_MLP, "head",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "Llama", *(more(kind) for kind in [*KINDS][2:])])
def test_a_model_of_transformers_split_by_its_parts_trains_as_on_one_device(kind):
    ours = capture(transformer(kind).double(), batch(0, kind), granularity="block", verify=False)
    parts = splits_of(ours)
    assert sorted(part.kind for _, part in parts) == sorted(KINDS[kind])
    splits = {path: how for _, part in parts for path, how in part.splits.items()}
    theirs = copy.deepcopy(ours)
    plan = make_plan(ours, 2, 2).with_tensor_split(2, splits)
    minibatches = [(batch(seed, kind), batch(seed, kind)["input_ids"]) for seed in range(2)]
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        losses = [pipeline.step(*minibatch) for minibatch in minibatches]
    one = SingleDevice(theirs, 2, loss, momentum, seed=3)
    expected = torch.stack([one.step(*minibatch) for minibatch in minibatches])
    assert same(torch.stack(losses), expected, TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
