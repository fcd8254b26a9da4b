"""A captured model computes, and a pipeline of it trains, what the model does on one device."""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as pk
from penstock.engine.model import tree
from penstock.engine.tracing import capture
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_plan
from tests.kit.one_device import OneDevice, assert_same
from tests.kit.paths import DOCS
from tests.kit.training import momentum

pytestmark = pytest.mark.xdist_group("captured models")  # which takes long
ROWS = 7


class ResidualMLP(nn.Module):
    """Two branches, one longer than the other, around each other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.right = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, value):
        value = torch.tanh(self.first(value))
        return self.head(self.left(value) + self.right(value) * value)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 8)
        self.words = nn.Embedding(9, 8)
        self.both = nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image, words):
        value = F.gelu(self.both(torch.cat([self.image(image), self.words(words).mean(1)], 1)))
        return self.head(value) + image[:, :5]


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(4, 8))
        self.hidden = nn.Linear(8, 8)

    def forward(self, tokens):
        value = self.words(tokens) + self.places[: tokens.shape[1]]
        value = value + torch.tanh(self.hidden(value))
        return F.linear(value, self.words.weight)


class Dropping(nn.Module):
    """Dropout in modules and in functions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.dropout = nn.Dropout(0.4)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, value):
        value = self.dropout(self.first(value))
        inner = F.dropout(torch.relu(self.second(value)), 0.3, self.training)
        return self.head(value + inner)


class Normalising(nn.Module):
    """Batch norm and in-place work around a skip, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        value = self.relu(self.first_norm(self.first(image)))
        inner = self.second_norm(self.second(value))
        inner += value
        return self.head(self.relu(inner).mean((2, 3)))


def classes(*shape):
    return torch.randint(0, 5, shape or (ROWS,))


def of_words(output, targets):
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=11, n_positions=8, use_cache=False,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=11,
        intermediate_size=24, max_position_embeddings=8,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def tokens():
    return torch.randint(0, 11, (ROWS, 4))


def masked_tokens():
    mask = torch.ones(ROWS, 4, dtype=torch.long)
    mask[2:4, 3:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


# Builder, inputs, targets, loss, and whether weights are tied, whose gradients are then summed in
# another order than on one device.
CASES = {
    "branches": (ResidualMLP, lambda: torch.randn(ROWS, 6), classes, F.cross_entropy, False),
    "two inputs": (
        TwoInputs,
        lambda: (torch.randn(ROWS, 6), torch.randint(0, 9, (ROWS, 3))),
        classes, F.cross_entropy, False,
    ),
    "inputs by name": (
        TwoInputs,
        lambda: {"words": torch.randint(0, 9, (ROWS, 3)), "image": torch.randn(ROWS, 6)},
        classes, F.cross_entropy, False,
    ),
    "tied": (TiedLM, tokens, tokens, of_words, True),
    "dropout": (Dropping, lambda: torch.randn(ROWS, 6), classes, F.cross_entropy, False),
    "batch norm": (
        Normalising, lambda: torch.randn(ROWS, 3, 5, 5), classes, F.cross_entropy, False,
    ),
    "GPT-2": (gpt2, lambda: {"input_ids": tokens()}, tokens, of_words, True),
    "BERT": (bert, masked_tokens, tokens, of_words, True),
}  # fmt: skip


class Case:
    """A model in float64, what it was captured as, and a minibatch."""

    def __init__(self, name):
        torch.manual_seed(0)
        build, inputs, targets, self.loss, self.tied = CASES[name]
        self.model = build().double()
        self.inputs = tree.replace(
            Tensor, lambda one: one.double() if one.is_floating_point() else one, inputs()
        )
        self.targets = targets()
        self.captured = capture(self.model, self.inputs)


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    return Case(request.param)


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def test_the_state_is_the_models_own(case):
    assert list(case.captured.state_dict()) == list(case.model.state_dict())
    ours, theirs = case.captured.parameters(), case.model.parameters()
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
    held = {id(one) for layer in case.captured.spine() for one in layer.parameters()}
    assert held == {id(one) for one in case.model.parameters()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_twenty_random_cuts_change_no_bit(case, training):
    captured = copy.deepcopy(case.captured).train(training)
    model = captured.original
    buffers = copy.deepcopy(dict(model.named_buffers()))
    results = []
    generator = random.Random(5)
    layers = captured.spine()
    for _ in range(21):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        torch.manual_seed(3)
        if not results:
            results.append(call(model, case.inputs))
            moved = copy.deepcopy(dict(model.named_buffers()))
            continue
        cuts = set(generator.sample(range(1, len(layers)), generator.randint(1, 3)))
        value = case.inputs
        for index, layer in enumerate(layers):
            if index in cuts:  # as if it were sent to another process
                value = tree.replace(Tensor, lambda one: one.detach().clone(), value)
            value = layer(value)
        results.append(value)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, moved[name])
    assert type(results[0]) is type(results[1])
    for other in results[1:]:
        for one, wanted in zip(tree.tensors(other), tree.tensors(results[0]), strict=True):
            assert torch.equal(one, wanted)


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (3, "zb-h1"), (3, "gpipe")])
def test_a_pipeline_trains_as_one_device(case, stages, schedule):
    ours, theirs = copy.deepcopy(case.captured), copy.deepcopy(case.captured)
    recompute = "layers" if schedule == "gpipe" else "none"
    plan = make_plan(ours, stages, 3, schedule, recompute=recompute)
    one_device = SingleDevice(theirs, 3, case.loss, momentum, seed=4)
    with pk.Pipeline(ours, plan, loss=case.loss, optimizer=momentum, seed=4) as pipeline:
        for _ in range(2):
            loss = pipeline.step(case.inputs, case.targets)
            expected = one_device.step(case.inputs, case.targets)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        evaluated = tree.tensors(pipeline.evaluate(case.inputs))
        keys = set(pipeline.state_dict())
    assert_same(ours, theirs, 1e-12 if case.tied else 0.0)
    assert keys == set(case.model.state_dict())
    assert ours.training
    assert all(layer.training for layer in ours.spine())
    for one, other in zip(evaluated, tree.tensors(one_device.evaluate(case.inputs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Called(nn.Module):
    """A model that takes its inputs as one value."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return call(self.model, inputs)


def test_a_pipeline_trains_the_model_as_plain_torch_does(case):
    """Against the model itself, in whose forward the capture has no part."""
    captured = copy.deepcopy(case.captured)
    for module in captured.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # plain torch draws from another stream
    if type(captured.original).__name__ in {"Dropping", "BertForMaskedLM"}:
        pytest.skip("drops out in functions, too")
    model = copy.deepcopy(captured.original)
    one_device = OneDevice(Called(model), 3, case.loss, momentum)
    with pk.Pipeline(
        captured, make_plan(captured, 2, 3), loss=case.loss, optimizer=momentum
    ) as pipeline:
        for _ in range(2):
            loss = pipeline.step(case.inputs, case.targets)
            expected = one_device.step(case.inputs, case.targets)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_same(captured.original, model, 1e-12 if case.tied else 0.0)


def test_it_profiles_and_plans(case):
    captured = copy.deepcopy(case.captured)
    graph = pk.profile(captured, case.inputs, repeats=1, ranks=0)
    assert [layer.name for layer in graph.layers] == list(captured.names)
    devices = tuple(pk.Device(name=f"d{index}") for index in range(2))
    plan = pk.plan(graph, pk.Cluster(devices=devices), microbatches=3, stages=2, schedule="1f1b")
    with pk.Pipeline(captured, plan, loss=case.loss) as pipeline:
        assert torch.isfinite(pipeline.step(case.inputs, case.targets))


def test_a_model_that_returns_a_cache_does_not_while_it_is_traced():
    model = gpt2()
    model.config.use_cache = True
    captured = capture(model, {"input_ids": tokens()})
    assert "past_key_values" not in captured(input_ids=tokens())
    assert "past_key_values" in model(input_ids=tokens()) and model.config.use_cache is True


def test_the_gpt2_in_the_docs_trains():
    pytest.importorskip("transformers")
    text = (DOCS / "models.md").read_text()
    (script,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if "GPT2LMHeadModel" in block
    ]
    namespace = {}
    exec(script, namespace)
    weight = namespace["model"].lm_head.weight
    assert weight is namespace["model"].transformer.wte.weight
