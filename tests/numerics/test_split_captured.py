"""Layers of captured models are split by the names that modules have in the model."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.engine.model.spine import spine_of
from penstock.engine.run.members import Sharings
from penstock.engine.tensor.recorded import for_member
from penstock.engine.tensor.recorded_calls import whole_of
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import more
from tests.kit.groups import WORDS, net_loss
from tests.kit.helpers import make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12
pytestmark = pytest.mark.xdist_group("captured models")  # which takes long


class Attention(nn.Module):
    """Takes the number of its heads, and their width, from what it was built with."""

    def __init__(self, width, heads, keys):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.q = nn.Linear(width, heads * self.size)
        self.kv = nn.Linear(width, 2 * keys * self.size)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, value):
        rows, length, width = value.shape
        queries = self.q(value).view(rows, length, self.heads, self.size).transpose(1, 2)
        keys, values = self.kv(value).split(self.keys * self.size, dim=2)
        keys, values = (
            one.reshape(rows, length, self.keys, 1, self.size)
            .expand(-1, -1, self.keys, self.heads // self.keys, self.size)
            .flatten(2, 3)
            .permute(0, 2, 1, 3)
            for one in (keys, values)
        )
        halves = torch.cat([-queries[..., 1:], queries[..., :1]], -1)  # as rotations do
        scores = (queries + halves) @ keys.transpose(-2, -1) / self.size**0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=value.device).triu(1)
        weights = self.drop(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        mixed = (weights @ values).transpose(1, 2).reshape(rows, length, width)
        return self.out(mixed)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4, 2)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(2 * width))

    def forward(self, value):
        value = value + self.attention(self.norm(value))
        hidden = self.drop(self.up(value) * F.silu(self.gate(value)))
        # What each feature has of its own is whole; a member takes its part of it.
        return value + self.down(hidden * self.scale)


class Words(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS)
        self.double()

    def forward(self, tokens):
        value = self.words(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def words(seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (rows, 5), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=8, use_cache=False,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def of_logits(output, targets):
    return net_loss(output.logits, targets)


WORDS_SPLITS = {
    "words": "row",
    "blocks.*.attention.q": "column",
    "blocks.*.attention.kv": "column/2",
    "blocks.*.attention.out": "row",
    "blocks.*.up": "column",
    "blocks.*.gate": "column",
    "blocks.*.down": "row",
    "head": "column",
}
GPT2_SPLITS = {
    "transformer.h.*.attn.c_attn": "column/3",
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
}


def gathers(model, plan):
    """How often the code of a block makes values whole for a member."""
    layers = spine_of(model)
    sharing = Sharings(layers, plan).of(layers[1])
    group = SimpleNamespace(size=2, index=0)
    module = layers[1].module
    graph = for_member(module.program.graph, module.get_submodule, sharing.inner, group)
    return sum(node.target is whole_of for node in graph.nodes)


@pytest.mark.parametrize(
    ("build", "loss", "splits", "granularity", "whole"),
    [
        (Words, net_loss, WORDS_SPLITS, "block", 0),
        more(Words, net_loss, WORDS_SPLITS, "module", 0),
        more(gpt2, of_logits, GPT2_SPLITS, "block", None),
    ],
)
def test_a_captured_model_that_is_split_trains_as_on_one_device(
    build, loss, splits, granularity, whole
):
    ours = capture(build(), words(0)[0], granularity=granularity, verify=False)
    theirs = copy.deepcopy(ours)
    plan = make_plan(ours, 2, 2).with_tensor_split(2, splits)
    if whole is not None:
        assert gathers(ours, plan) == whole
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        losses = [pipeline.step(*words(seed)) for seed in range(2)]
        outputs = pipeline.evaluate(words(5)[0])
    one = SingleDevice(theirs, 2, loss, momentum, seed=3)
    expected = torch.stack([one.step(*words(seed)) for seed in range(2)])
    assert same(torch.stack(losses), expected, TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
    evaluated = theirs.eval()(words(5)[0])
    assert same(
        getattr(outputs, "logits", outputs), getattr(evaluated, "logits", evaluated), TOLERANCE
    )
