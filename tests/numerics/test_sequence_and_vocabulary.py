"""Positions around split modules, and classes under the loss, are divided by default, of captured
models of transformers, too, with the weights and losses of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

import penstock as pk
from penstock.demo import gpt
from penstock.engine.model.spine import spine_of
from penstock.engine.run.members import Sharings
from penstock.engine.stage.stage import Stage
from penstock.engine.tensor.seen_whole import ShardedValue
from penstock.engine.tracing import capture
from penstock.planning.plans.picture import picture_of
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import more
from tests.kit.one_device import assert_same, same
from tests.kit.training import DEADLINE_SECONDS, momentum

TOLERANCE = 1e-12
WORDS = 24
pytestmark = pytest.mark.xdist_group("captured models")  # which takes long


def demo():
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=WORDS, width=16, heads=4, layers=2, context=8).double()


def transformer(kind, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    sizes = {
        "Llama": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16,
            "tie_word_embeddings": False,
        },
        "GPT2": {
            "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        },
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**common, **{**sizes, **options})
    name = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}[kind]
    return getattr(transformers, name)(config).double()


class Gained(torch.nn.Module):
    """Blocks whose own code has a weight for each feature, and one for all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, 16)
        self.blocks = torch.nn.ModuleList(GainedBlock() for _ in range(2))
        self.head = torch.nn.Linear(16, WORDS)

    def forward(self, tokens):
        value = self.words(tokens)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class GainedBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.scale = (torch.nn.Parameter(torch.ones(size)) for size in (16, 1))
        self.up_proj, self.down_proj = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)

    def forward(self, value):
        inside = self.scale * F.gelu(self.up_proj(value))
        return value + self.gain * self.down_proj(inside) * self.scale


def words(seed, rows=4):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, WORDS, (rows, 7), generator=generator)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def labelled(seed):
    tokens, _ = words(seed)
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    return {"input_ids": tokens, "labels": labels}


def of_logits(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def captured(kind, example, **options):
    return capture(transformer(kind, **options), example, granularity="block", verify=False)


def planned(graph, tensor_ranks, **options):
    """As if the model were large, and microbatches of one row, so that layers are worth sharing."""
    # Of the time of profiles, which other work on the machine disturbs, nothing depends.
    graph = replace(graph, layers=tuple(layer.paced(1e4, 1e4) for layer in graph.layers))
    count = tensor_ranks * options.get("stages", 1) * options.pop("copies", 1)
    return pk.plan(
        graph, pk.Cluster.local(count), microbatches=4, tensor_ranks=tensor_ranks, **options
    )


MODELS = {
    "chain": (demo, words, gpt.loss),
    "Llama": (lambda: captured("Llama", words(0)[0]), words, of_logits),
    "GPT2": (lambda: captured("GPT2", words(0)[0]), words, of_logits),
    "gained": (
        lambda: capture(Gained().double(), words(0)[0], granularity="block", verify=False),
        words,
        gpt.loss,
    ),
    "Llama, own loss": (lambda: captured("Llama", labelled(0)), labelled, pk.model_loss),
    "Llama, tied": (
        lambda: captured("Llama", words(0)[0], tie_word_embeddings=True),
        words,
        of_logits,
    ),
}


def profiled(model, batch, loss):
    if isinstance(batch, dict):
        return pk.profile(model, {key: rows[:1] for key, rows in batch.items()}, ranks=0, repeats=1)
    inputs, targets = (rows[:1] for rows in batch)
    return pk.profile(model, inputs, loss=loss, targets=targets, ranks=0, repeats=1)


def stepped(trainer, batch):
    if not isinstance(batch, dict):
        return trainer.step(*batch)
    given = (batch,) if isinstance(trainer, pk.Pipeline) else (batch, batch["labels"])
    return trainer.step(*given)


def marks(plan):
    """What a picture of a plan says of its stages."""
    return [
        mark
        for group in picture_of(plan).groups
        for heading in group.headings
        for mark in heading.remarks
    ]


def assert_trains_as_one_device(ours, plan, batch, loss):
    theirs = copy.deepcopy(ours)
    with pk.Pipeline(
        ours, plan, loss=loss, optimizer=momentum, seed=3, weight=len,
        deadline_seconds=DEADLINE_SECONDS,
    ) as pipeline:  # fmt: skip
        losses = [stepped(pipeline, batch(seed)) for seed in range(2)]
        first = batch(5)
        evaluated = pipeline.evaluate(first if isinstance(first, dict) else first[0])
    # The loss of transformers casts logits to float32.
    tolerance = 1e-6 if loss is pk.model_loss else TOLERANCE
    one = SingleDevice(theirs, 4, loss, momentum, seed=3)
    expected = torch.stack([stepped(one, batch(seed)) for seed in range(2)])
    assert same(torch.stack(losses), expected, tolerance)
    assert_same(ours, theirs, tolerance)
    whole = theirs.eval()(first if isinstance(first, dict) else first[0])
    assert same(getattr(evaluated, "logits", evaluated), getattr(whole, "logits", whole), tolerance)


@pytest.mark.parametrize(
    ("name", "tensor_ranks", "stages"),
    [
        ("chain", 2, 2),
        ("Llama", 2, 2),
        ("gained", 2, 1),
        more("chain", 4, 1),
        more("Llama", 4, 1),
        more("GPT2", 2, 1),
        more("GPT2", 4, 1),
        more("Llama, own loss", 2, 1),
        more("Llama, tied", 2, 2),
        more("Llama, tied", 2, 1),
    ],
)
def test_what_is_planned_by_default_trains_as_one_device(name, tensor_ranks, stages):
    build, batch, loss = MODELS[name]
    ours = build()
    plan = planned(profiled(ours, batch(0), loss), tensor_ranks, stages=stages, schedule="1f1b")
    said = {key: how for stage in plan.stages for key, how in stage.splits.items()}
    assert "vocabulary" in said.values()
    divided = "with the positions between them and the classes under the loss"
    assert f"layers over {tensor_ranks} devices {divided}" in plan.reason
    assert any("with the loss" in mark for mark in marks(plan))
    blocks = [how for key, how in said.items() if how == "sequence"]
    assert len(blocks) >= 2
    layers = spine_of(ours)
    between = [Sharings(layers, plan).of(layer).leaves for layer in layers[:-1]]
    # A table that is looked up whole, as the chain's positions, gives whole values.
    assert all(lies == 1 or 1 in lies for lies in between[name == "chain" :])
    assert_trains_as_one_device(ours, plan, batch, loss)


def test_no_tensor_rank_keeps_anything_as_large_as_all_logits(monkeypatch):
    kept = []
    run = Stage._run

    def watched(stage, *args, **options):
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        )
        with hooks:
            return run(stage, *args, **options)

    monkeypatch.setattr(Stage, "_run", watched)
    monkeypatch.setattr(Stage, "_is_plain", lambda *_: False)
    seen = []

    def loss(logits, targets):
        seen.append((type(logits), tuple(logits.shape)))
        return gpt.loss(logits, targets)

    model = demo()
    plan = planned(profiled(model, words(0), gpt.loss), 4)
    with pk.Pipeline(
        model, plan, loss=loss, optimizer=momentum, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        pipeline.step(*words(0))
        kept.clear()  # the first run of a layer is compared with the whole one
        pipeline.step(*words(1))
    rows, length = 1, 6
    assert seen[0] == (ShardedValue, (rows, length, WORDS))
    assert any(shape == (rows * length, WORDS // 4) for shape in kept)
    assert not any(WORDS in shape[-1:] for shape in kept)


def test_a_loss_that_needs_all_logits_gets_them_and_the_plan_says_so():
    def peculiar(logits, targets):
        return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten())

    model = demo()
    plan = planned(profiled(model, words(0), peculiar), 2)
    assert any("so each tensor rank gathers all of them" in words for words in plan.warnings)
    assert_trains_as_one_device(model, plan, words, peculiar)
    followed = profiled(demo(), words(0), gpt.loss)
    assert followed.layers[-1].parts[0].loss == "shards"
    warnings = planned(followed, 2).warnings
    assert not any("gathers all of them" in words for words in warnings)


def test_dropout_between_parts_is_that_of_one_device():
    model = captured("GPT2", words(0)[0], n_layer=1)
    plan = planned(profiled(model, words(0), of_logits), 2)
    assert "sequence" in plan.stages[0].splits.values()
    model.train()
    assert_trains_as_one_device(model, plan, words, of_logits)


@pytest.mark.parametrize(("kind", "layers"), [("Llama", "num_hidden_layers"), ("GPT2", "n_layer")])
def test_what_was_captured_for_any_length_takes_sequences_of_other_lengths(kind, layers):
    shallow = transformer(kind, **{layers: 1})
    model = capture(shallow, words(0)[0], granularity="block", verify=False, dynamic="all")
    plan = planned(profiled(model, words(0), of_logits), 2)
    assert "sequence" in plan.stages[0].splits.values()
    theirs = copy.deepcopy(model)
    batches = [tuple(part[:, :length] for part in words(length)) for length in (6, 5, 3)]
    with pk.Pipeline(
        model, plan, loss=of_logits, optimizer=momentum, seed=3, deadline_seconds=DEADLINE_SECONDS
    ) as pipeline:
        losses = [pipeline.step(*batch) for batch in batches]
    one = SingleDevice(theirs, 4, of_logits, momentum, seed=3)
    expected = torch.stack([one.step(*batch) for batch in batches])
    assert same(torch.stack(losses), expected, TOLERANCE)
    assert_same(model, theirs, TOLERANCE)
