"""Ranks that share the positions of a sequence train what one device trains."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import penstock as pk
from penstock.demo.gpt import GPT
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.copied import made_once
from tests.kit.groups import WORDS, net_loss
from tests.kit.helpers import make_plan
from tests.kit.one_device import assert_same, same
from tests.kit.reducing import replicated
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12
LENGTH = 9
pytestmark = pytest.mark.xdist_group("captured models")  # which takes long


class Attention(nn.Module):
    """Grouped queries, with rotations by position."""

    def __init__(self, width, heads, keys):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * keys * self.size)
        self.out = nn.Linear(width, width)

    def forward(self, value):
        rows, length, width = value.shape
        angles = torch.arange(length, device=value.device)[:, None] / torch.arange(1, self.size + 1)
        queries = self.q(value).view(rows, length, self.heads, self.size).transpose(1, 2)
        keys, values = self.kv(value).chunk(2, -1)
        keys, values = (
            one.view(rows, length, self.keys, self.size).transpose(1, 2) for one in (keys, values)
        )
        queries, keys = (
            one * angles.cos() + one.flip(-1) * angles.sin() for one in (queries, keys)
        )
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=0.4, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4, 2)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, value):
        value = value + self.attention(self.norm(value))
        return value + F.dropout(self.mlp(F.rms_norm(value, value.shape[-1:])), 0.1, self.training)


class Words(nn.Module):
    def __init__(self, dropout=0.2, tied=True, width=16, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, tokens):
        value = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class TorchBlocks(nn.Module):
    """torch's own blocks, which are told a mask."""

    def __init__(self, first=True):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first = nn.Embedding(WORDS, 8), first
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=first) for _ in range(2)
        )
        for block in self.blocks:
            block.self_attn.dropout = 0.0
        self.head = nn.Linear(8, WORDS)
        self.double()

    def forward(self, tokens):
        value = self.words(tokens)
        value = value if self.first else value.transpose(0, 1)
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=value.dtype).triu(1)
        for block in self.blocks:
            value = block(value, src_mask=mask, is_causal=True)
        return self.head(value if self.first else value.transpose(0, 1))


class Masked(nn.Module):
    """Makes a mask, and places, in its first layer for all the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.register_buffer("seen", torch.ones(16, 16, dtype=torch.bool).tril())
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(Scaled(8) for _ in range(3))
        self.head = nn.Linear(8, WORDS)
        self.double()

    def forward(self, tokens):
        value, length = self.words(tokens), tokens.shape[1]
        seen, places = self.seen[:length, :length], self.places(torch.arange(length))
        for block, norm in zip(self.blocks, self.norms, strict=True):
            heads = block(norm(value + places)).unflatten(-1, (2, 4)).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
            value = value + mixed.transpose(1, 2).flatten(2)
        return self.head(value)


class Scaled(nn.Module):
    """A norm whose code nobody knows, as Llama's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, value):
        return self.weight * value * value.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


def words(seed, rows=5, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (rows, length + 1), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def with_ignored(seed):
    """Labels of which one member's count for more than another's."""
    inputs, targets = words(seed, rows=4)
    targets[:, :3] = -100
    return inputs, targets


@made_once
def captured(build):
    return capture(build(), words(0)[0], granularity="block", verify=False)


def mean_over_words(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def turned(logits, targets):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.transpose(1, 2), targets)


def next_words(logits, targets):
    """Mixes positions, so it needs the whole output."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def written_whole(logits, targets):
    """Writes to the output, as its caller sees it afterwards, too."""
    logits[..., 0] = -4.0
    return net_loss(logits, targets)


def written_through_views(logits, targets):
    """Writes to what the output is, to what it has been made into, and where nobody learns."""
    scaled = logits.mul(1.0).div_(2.0)
    logits.view(-1, WORDS).masked_fill_(torch.arange(WORDS) == 1, -4.0)
    logits[:, 0].mul_(0.5)
    with torch.no_grad():
        logits.detach().clamp_(-1.0, 1.0)
    return net_loss(logits, targets) + mean_over_words(scaled, targets)


def context_plan(model, num_ranks, num_microbatches, size=2, schedule="1f1b", copies=1):
    if copies > 1:
        plan = replace(
            replicated(model, (copies,) * num_ranks, num_microbatches), schedule=schedule
        )
    else:
        plan = make_plan(model, num_ranks, num_microbatches, schedule)
    return plan.with_context_ranks(size)


def check(ours, plan, loss, batches, evaluated, num_microbatches=2):
    theirs = copy.deepcopy(ours)
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
        outputs = pipeline.evaluate(evaluated)
    one = SingleDevice(theirs, num_microbatches, loss, momentum, seed=3)
    expected = torch.stack([one.step(*batch) for batch in batches])
    assert same(torch.stack(losses), expected, TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
    whole = theirs.eval()(evaluated)
    assert same(getattr(outputs, "logits", outputs), getattr(whole, "logits", whole), TOLERANCE)


@pytest.mark.parametrize(
    ("build", "loss", "batch", "ranks", "size", "schedule"),
    [
        (Words, net_loss, words, 2, 2, "1f1b"),
        (Words, mean_over_words, with_ignored, 1, 3, "1f1b"),
        (Words, turned, with_ignored, 2, 2, "gpipe"),
        (Words, next_words, words, 2, 2, "zb-h1"),
        (lambda: Words(layers=3), net_loss, words, 2, 2, "interleaved-1f1b"),
        (TorchBlocks, net_loss, words, 2, 2, "1f1b"),
        (Masked, net_loss, words, 2, 2, "1f1b"),
        (lambda: TorchBlocks(first=False), net_loss, words, 1, 2, "1f1b"),
        (Words, written_whole, words, 1, 2, "1f1b"),
        (Words, written_through_views, words, 1, 2, "1f1b"),
    ],
)
def test_a_shared_sequence_trains_as_on_one_device(build, loss, batch, ranks, size, schedule):
    ours = captured(build)
    plan = context_plan(ours, ranks, 2, size, schedule)
    check(ours, plan, loss, [batch(seed) for seed in range(2)], batch(5)[0])


def llama(width=16, layers=2, length=16):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=WORDS,
        max_position_embeddings=length, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=WORDS, n_positions=16, use_cache=False,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def of_logits(output, targets):
    return net_loss(output.logits, targets)


class WithLabels(nn.Module):
    """Whose loss is computed inside, of labels that the model shifts itself."""

    def __init__(self):
        super().__init__()
        self.model = Words()

    def forward(self, batch):
        logits = self.model(batch["tokens"])
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        return {"loss": mean_over_words(logits, labels.contiguous()), "logits": logits}


def test_a_loss_inside_of_the_model_is_that_of_one_device(monkeypatch):
    gathered = []
    monkeypatch.setattr(
        "penstock.engine.context.outputs.all_positions", lambda *given: gathered.append(given)
    )
    pairs = [words(seed, rows=4) for seed in range(2)]
    batches = [{"tokens": tokens, "labels": labels} for tokens, labels in pairs]
    ours = capture(WithLabels(), batches[0], granularity="block", verify=False)
    theirs = copy.deepcopy(ours)
    with pk.Pipeline(
        ours, context_plan(ours, 2, 2), loss=pk.model_loss, optimizer=momentum, seed=3,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        losses = [pipeline.step(batch) for batch in batches]
    one = SingleDevice(theirs, 2, pk.model_loss, momentum, seed=3)
    expected = torch.stack([one.step(batch, batch["labels"]) for batch in batches])
    assert same(torch.stack(losses), expected, TOLERANCE)
    assert_same(ours, theirs, TOLERANCE)
    assert not gathered  # nobody has had all logits


@pytest.mark.parametrize(
    ("loss", "whole"),
    [(net_loss, False), (mean_over_words, False), (turned, False), (next_words, True)],
)
def test_nobody_has_all_logits_where_a_loss_goes_by_positions(loss, whole, monkeypatch):
    from penstock.engine.context import outputs

    gathered, gather = [], outputs.all_positions

    def counted(*given):
        gathered.append(given)
        return gather(*given)

    monkeypatch.setattr(outputs, "all_positions", counted)
    ours = captured(Words)
    with pk.Pipeline(
        ours, context_plan(ours, 1, 1), loss=loss, optimizer=momentum,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        pipeline.step(*words(0))
    assert bool(gathered) == whole


@pytest.mark.parametrize("build", [partial(llama, layers=1), gpt2], ids=["llama", "gpt2"])
def test_a_pretrained_kind_trains_as_on_one_device(build):
    ours = captured(build)
    check(
        ours, context_plan(ours, 2, 2), of_logits, [words(seed) for seed in range(2)], words(5)[0]
    )


@pytest.mark.parametrize(
    ("build", "loss", "cut"),
    [
        (
            lambda: GPT(vocabulary=WORDS, width=32, heads=4, layers=4, context=32),
            net_loss,
            "blocks.2",
        ),
        # It hands attention a mask, which one device keeps and a ring does not.
        (lambda: llama(width=48, length=32).float(), of_logits, "model.layers.1"),
    ],
)
def test_context_ranks_keep_what_their_plan_predicts(build, loss, cut):
    """What is saved for backwards, in unique storages; the profile is that of one device."""
    torch.manual_seed(0)
    batches = words(0, rows=16, length=32)
    ours = capture(build(), batches[0][:4], granularity="block", verify=False)
    graph = pk.profile(
        copy.deepcopy(ours), batches[0][:4], loss=loss, targets=batches[1][:4], repeats=1,
        ranks=0,
    )  # fmt: skip
    plan = pk.plan(
        graph, pk.Cluster.local(4), microbatches=4, stages=2, schedule="1f1b", cuts=[cut],
        recompute="never", context_ranks=2,
    )  # fmt: skip
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, count_memory=True,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        for _ in range(2):
            pipeline.step(*batches)
        counted = [peak.activation_bytes for peak in pipeline.peaks]
    predicted = plan.simulate().peak_bytes(plan.sizes)
    assert counted == pytest.approx(predicted, rel=0.03)


def test_stages_that_recompute_train_as_on_one_device():
    ours = captured(Words)
    plan = context_plan(ours, 2, 2).recomputing("layers")
    check(ours, plan, net_loss, [words(seed) for seed in range(2)], words(5)[0])
