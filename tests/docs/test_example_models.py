"""The models of ``examples/models``: their published sizes, and small ones through a pipeline."""

from __future__ import annotations

import copy
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as pk
from examples.models import (
    alexnet,
    amoebanet,
    awd_lstm,
    data,
    detector,
    gnmt,
    inception,
    resnet,
    s2vt,
    speech,
    vgg,
)
from penstock.engine.model import microbatches, tree
from penstock.engine.tracing import capture
from penstock.planning.plans import Plan, StagePlan
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.one_device import assert_same

MODELS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(resnet, vgg, alexnet, inception, amoebanet),
        *(gnmt, awd_lstm, s2vt, detector, speech),
    )
}
FROM_TRANSFORMERS = ("bert", "gpt2")
pytestmark = pytest.mark.xdist_group("example models")  # which take long to capture
ROWS = 6


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet", 25_557_032),  # table 1 of the paper, in the count that everyone quotes
        ("vgg", 138_357_544),  # table 2: 138 million
        ("alexnet", 60_965_224),  # abstract: 60 million
        ("awd_lstm", 24_221_600),  # table 1: 24 million
        ("inception", 23_834_568),  # as its authors' code without the auxiliary classifier
        ("amoebanet", 81_505_540),  # table 1 of GPipe: 82 million
    ],
)
def test_the_published_models_have_the_published_size(name, parameters):
    with torch.device("meta"):
        model = MODELS[name].build()
    assert sum(one.numel() for one in model.parameters()) == parameters


def test_gnmt_is_as_deep_and_wide_as_published():
    with torch.device("meta"):
        model = gnmt.build()
    assert len(model.encoder) + 1 == len(model.decoder) + 1 == 8
    assert model.both_ways.bidirectional
    assert [layer.bidirectional for layer in model.encoder] == [False] * 7
    assert {layer.hidden_size for layer in (*model.encoder, *model.decoder)} == {1024}
    with torch.device("meta"):
        model = gnmt.build("sixteen")
    assert len(model.encoder) + 1 == len(model.decoder) + 1 == 16


def test_attention_looks_where_the_key_answers_the_query():
    attention = gnmt.Attention(2)
    with torch.no_grad():
        for linear in (attention.query, attention.key):
            linear.weight.copy_(torch.eye(2))
        attention.score.weight.fill_(50.0)
    memory = torch.tensor([[[5.0, 5.0], [-5.0, -5.0]]])
    context = attention(torch.zeros(1, 3, 2), memory)
    torch.testing.assert_close(context, memory[:, :1].expand(1, 3, 2))


def test_awd_lstm_drops_whole_words_weights_and_the_same_units_in_all_words():
    torch.manual_seed(0)
    words = awd_lstm.WordDropout(50, 3, 0.5)
    vectors = words(torch.arange(50).repeat(2, 1))
    assert torch.equal(vectors[0], vectors[1])
    assert 10 < int((vectors[0] == 0).all(1).sum()) < 40
    dropped = awd_lstm.SameMaskDropout(0.5)(torch.ones(4, 7, 30))
    assert torch.equal(dropped[:, :1].expand(4, 7, 30), dropped)
    assert not torch.equal(dropped[0], dropped[1])
    layer = awd_lstm.WeightDroppedLSTM(3, 5, 0.5)
    value = torch.randn(2, 4, 3)
    assert not torch.equal(layer(value), layer(value))
    layer.eval()
    plain = nn.LSTM(3, 5, batch_first=True)
    with torch.no_grad():
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            theirs.copy_(ours)
    torch.testing.assert_close(layer(value), plain(value)[0])


def test_awd_lstm_and_resnet_are_called_as_in_their_papers():
    model = awd_lstm.build("small")
    assert sum(one is model.embedding.weight for one in model.parameters()) == 1
    block = resnet.Bottleneck(8, 4, 2)
    assert block(torch.randn(2, 8, 6, 6)).shape == (2, 16, 3, 3)


def module_of(name):
    if name in MODELS:
        return MODELS[name]
    pytest.importorskip("transformers")
    return importlib.import_module(f"examples.models.{name}")


# One of each kind: batch norm and skips, attention between recurrent layers, tied weights, two
# losses.
IN_MAKE_TEST = ("resnet", "gnmt", "awd_lstm", "detector")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.soak] * (name not in IN_MAKE_TEST))
        for name in (*MODELS, *FROM_TRANSFORMERS)
    ],
)
def prepared(request):
    """A small model with a spine, inputs, targets, and the module that made them."""
    torch.manual_seed(0)
    module = module_of(request.param)
    model = module.build("small").double()
    draw = torch.Generator().manual_seed(0)
    inputs, targets = tree.replace(torch.Tensor, doubled, module.batch(ROWS, "small", draw))
    if not isinstance(model, nn.Sequential):
        model = capture(model, inputs)
    return model, inputs, targets, module


def doubled(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def test_it_trains_in_two_stages_as_on_one_device(prepared):
    model, inputs, targets = copy.deepcopy(prepared[:3])
    loss, weight = prepared[3].loss, getattr(prepared[3], "hidden", None)
    graph = pk.profile(model, inputs, repeats=1, ranks=0)
    assert graph.microbatch_size == microbatches.num_rows(inputs, "inputs") == ROWS
    plan = halved(graph)
    theirs = copy.deepcopy(model)
    one_device = SingleDevice(theirs, 2, loss, sgd, seed=3, weight=weight)
    with pk.Pipeline(
        model, plan, loss=loss, optimizer=sgd, seed=3, weight=weight, deadline_seconds=300
    ) as pipeline:
        for _ in range(2):
            found, expected = pipeline.step(inputs, targets), one_device.step(inputs, targets)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        outputs = pipeline.evaluate(inputs)
    # Its gradients are summed in another order where an embedding is also the output.
    tied = {"embedding.weight", "lm_head.weight", "cls.predictions.bias"} & {*model.state_dict()}
    assert_same(model, theirs, 1e-12 if tied else 0.0)
    ours, others = tree.tensors(outputs), tree.tensors(one_device.evaluate(inputs))
    torch.testing.assert_close(ours, others, rtol=1e-12, atol=1e-12)


def test_the_planner_plans_it_into_two_stages(prepared):
    model, inputs = copy.deepcopy(prepared[:2])
    graph = pk.profile(model, inputs, repeats=1, ranks=0)
    devices = tuple(pk.Device(name=f"d{index}") for index in range(2))
    plan = pk.plan(graph, pk.Cluster(devices=devices), microbatches=2, stages=2, schedule="1f1b")
    assert [name for stage in plan.stages for name in stage.layers] == [
        layer.name for layer in graph.layers
    ]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def halved(graph):
    """A plan with half of the layers in each stage."""
    names = [layer.name for layer in graph.layers]
    middle = len(names) // 2
    return Plan(
        model=graph.fingerprint,
        schedule="1f1b",
        num_microbatches=2,
        num_threads=1,
        stages=tuple(
            StagePlan(layers=tuple(part), rank=rank)
            for rank, part in enumerate((names[:middle], names[middle:]))
        ),
    )


def test_every_model_is_tested():
    folder = Path(inspect.getfile(data)).parent
    models = {path.stem for path in folder.glob("*.py")} - {"__init__", "data", "sizes"}
    assert models == {*MODELS, *FROM_TRANSFORMERS}


def test_a_wider_model_is_the_same_with_wider_layers():
    narrow, wide = vgg.build("small"), vgg.build("small", 2)
    assert [type(layer) for layer in narrow] == [type(layer) for layer in wide]
    assert [layer.out_channels for layer in wide if isinstance(layer, nn.Conv2d)][:3] == [4, 4, 8]
