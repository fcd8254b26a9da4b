"""How models that are no chain are cut: names, what passes, modes, and what is refused."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, ModelError
from penstock.engine.model.spine import run_spine, spine_fingerprint, spine_of
from penstock.engine.tracing import capture
from penstock.engine.transport import Codec, Edge
from penstock.engine.transport.packing import Packer
from tests.kit.copied import made_once
from tests.kit.helpers import make_plan
from tests.kit.paths import ROOT

pytestmark = pytest.mark.xdist_group("capture")  # loading torch.export takes longest


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, value):
        value = self.first(value)
        for block in self.blocks:
            value = value + block(value)
        return self.head(value)


class Lambda(nn.Module):
    """A model whose forward is a function of its modules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


@pytest.fixture(scope="module")
def residual():
    torch.manual_seed(0)
    return capture(Residual(), torch.randn(4, 6))


def same(captured, model, *inputs):
    torch.manual_seed(1)
    expected = model(*inputs)
    torch.manual_seed(1)
    return torch.equal(captured(*inputs), expected)


def test_layers_are_named_like_modules_and_say_what_they_read(residual):
    layers = residual.spine()
    assert [layer.spine_name for layer in layers] == [
        "first",
        *("blocks.0.0", "blocks.0.1", "blocks.0.2"),
        *("blocks.1.0", "blocks.1.1", "blocks.1.2"),
        "head",
    ]
    assert [layer.kind for layer in layers[:3]] == ["Linear", "Linear", "ReLU"]
    assert residual.how == "torch.export"
    # blocks.0.2 adds, so what first gave is read there for the last time.
    last = layers[3]
    assert last.reads == ("first", "blocks.0.1")
    assert last.produces == (0,)
    assert layers[0].reads == ()
    assert layers[1].produces == (1,)
    assert layers[1].readers == ("blocks.0.2", "blocks.0.1")
    outputs = layers[1](layers[0](torch.randn(4, 6)))
    assert [tuple(one.shape) for one in outputs] == [(4, 8), (4, 8)]


def test_blocks_are_layers_when_asked():
    captured = capture(Residual(), torch.randn(4, 6), granularity="block")
    assert captured.names == ("first", "blocks.0", "blocks.1", "head")
    assert same(captured, captured.original, torch.randn(5, 6))
    assert [layer.reads for layer in captured.spine()] == [
        (),
        ("first",),
        ("blocks.0",),
        ("blocks.1",),
    ]


def test_state_keeps_its_names_and_is_the_models_own(residual):
    model = residual.original
    assert list(residual.state_dict()) == list(model.state_dict())
    layers = spine_of(residual)
    assert {layer.prefix for layer in layers} == {""}
    held = [name for layer in layers for name in layer.module.state_dict()]
    assert held == list(model.state_dict())
    assert layers[1].module.get_parameter("blocks.0.0.weight") is model.blocks[0][0].weight
    # A second capture of the same architecture is the same model to a plan.
    again = capture(Residual(), torch.randn(4, 6), verify=False)
    assert spine_fingerprint(spine_of(again)) == spine_fingerprint(layers)


def test_any_number_of_rows_works_even_if_captured_with_one():
    captured = capture(Residual(), torch.randn(1, 6))
    for rows in (1, 2, 9):
        assert same(captured, captured.original, torch.randn(rows, 6))


def test_other_sizes_are_as_captured_unless_all_may_differ():
    model = Lambda(lambda self, value: self.one(value).mean(1), one=nn.Linear(6, 6))
    with pytest.raises(InputError, match=r"input 0 is \(4, 5, 6\).*captured with \(any, 3, 6\)"):
        capture(model, torch.randn(4, 3, 6))(torch.randn(4, 5, 6))
    captured = capture(model, torch.randn(4, 3, 6), dynamic="all")
    assert same(captured, model, torch.randn(2, 5, 6))


def test_a_branch_on_a_length_holds_for_lengths_of_its_side_only():
    def forward(self, value):
        value = self.one(value)
        return value * 2 if value.shape[1] > 4 else value

    captured = capture(Lambda(forward, one=nn.Linear(6, 6)), torch.randn(4, 3, 6), dynamic="all")
    assert same(captured, captured.original, torch.randn(4, 4, 6))
    with pytest.raises(InputError, match="do not fit what the model was captured for"):
        captured(torch.randn(4, 5, 6))


def test_a_number_of_rows_in_the_code_is_refused_with_what_to_do():
    model = Lambda(lambda self, value: self.one(value).view(4, -1), one=nn.Linear(6, 6))
    with pytest.raises(ModelError, match=r"with 3 rows.*view\(8, -1\).*shape\[0\]"):
        capture(model, torch.randn(4, 6))


def test_inputs_are_spread_over_arguments_or_keywords_if_they_fit():
    model = Lambda(lambda self, left, right: self.one(left) - right, one=nn.Linear(6, 6))
    model.forward = lambda left, right: model.one(left) - right
    left, right = torch.randn(4, 6), torch.randn(4, 6)
    expected = model(left, right)
    assert torch.equal(capture(model, (left, right))((left, right)), expected)
    captured = capture(model, {"right": right, "left": left})
    assert torch.equal(captured({"right": right, "left": left}), expected)
    assert torch.equal(captured(right=right, left=left), expected)
    assert torch.equal(captured((left, right)), expected)  # by place or by name
    with pytest.raises(InputError, match="cannot be called with these inputs"):
        capture(model, (left, left, left))
    with pytest.raises(
        InputError, match="inputs: it takes no 'rihgt'; it needs 'right', too; give"
    ):
        captured({"left": left, "rihgt": right})
    with pytest.raises(InputError, match=r"no 'labels'; with loss=.*, a model must take its"):
        captured({"left": left, "right": right, "labels": right})


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)

    def forward(self, pair):
        return {"sum": self.one(pair[0]) + pair[1], "name": "sum"}


def test_a_tuple_may_be_one_argument_and_the_output_a_dictionary():
    pair = (torch.randn(4, 6), torch.randn(4, 6))
    captured = capture(Pair(), pair)
    found, expected = captured(pair), captured.original(pair)
    assert found.keys() == expected.keys()
    assert found["name"] == "sum"
    assert torch.equal(found["sum"], expected["sum"])


class TwoModes(nn.Module):
    """Runs a helper in training only, and drops out in a function."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.helper = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.two = nn.Linear(6, 3)

    def forward(self, value):
        value = F.dropout(self.one(value), 0.5, self.training)
        if self.training:
            value = value + self.helper(value)
        return self.two(self.norm(value))


def test_training_and_evaluation_are_two_graphs_of_the_same_layers():
    model = TwoModes()
    captured = capture(model, torch.randn(8, 6))
    assert captured.names == ("one", "helper", "norm", "two")
    value = torch.randn(5, 6)
    assert same(captured, model, value)
    held = captured.spine()
    captured.eval()
    assert not model.training
    assert not any(layer.training for layer in held)
    assert same(captured, model, value)
    assert torch.equal(captured(value), captured(value))
    captured.train()
    assert model.norm.training
    assert not torch.equal(captured(value), captured(value))


def test_capturing_changes_neither_model_nor_random_state():
    model = TwoModes()
    model.norm.eval()  # frozen
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    captured = capture(model, torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert (model.training, model.norm.training, captured.training) == (True, False, True)
    assert "forward" not in vars(model.one)
    captured(torch.randn(8, 6))  # a frozen norm stays frozen in its layer
    assert torch.equal(before["norm.running_mean"], model.norm.running_mean)


def test_hooks_of_modules_fire_when_it_runs_and_not_when_it_is_traced():
    model, seen = Residual(), []
    model.first.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    captured = capture(model, torch.randn(4, 6), verify=False)
    assert seen == []
    captured(torch.randn(3, 6))
    assert seen == [(3, 8)]


def test_layers_run_in_any_order_that_their_inputs_allow():
    def forward(self, value):
        left = self.left(value)
        right = self.right(value)
        return self.last(left, right)

    modules = {"left": nn.Linear(6, 6), "right": nn.Linear(6, 6), "last": nn.Bilinear(6, 6, 2)}
    captured = capture(Lambda(forward, **modules), torch.randn(4, 6))
    assert captured.names == ("left", "right", "last")
    other = captured.ordered(["right", "left", "last"])
    assert other.names == ("right", "left", "last")
    assert [layer.spine_name for layer in other.spine()] == list(other.names)
    value = torch.randn(3, 6)
    assert torch.equal(captured(value), other(value))
    assert other.ordered(captured.names).names == captured.names
    with pytest.raises(InputError, match="'last' cannot run before 'right'"):
        captured.ordered(["left", "last", "right"])
    with pytest.raises(InputError, match="list every layer once; it differs in right"):
        captured.ordered(["left", "last"])


def test_layers_that_move_the_same_statistics_keep_their_order():
    def forward(self, value):
        return self.norm(value) + self.two(self.norm(self.one(value)))

    model = Lambda(forward, one=nn.Linear(6, 6), two=nn.Linear(6, 6), norm=nn.BatchNorm1d(6))
    captured = capture(model, torch.randn(4, 6))
    assert captured.names == ("norm", "one", "norm#2", "two")
    assert captured.ordered(["one", "norm", "norm#2", "two"]).names[0] == "one"
    with pytest.raises(InputError, match="'norm#2' cannot run before 'norm'"):
        captured.ordered(["one", "norm#2", "norm", "two"])


def test_overwriting_a_view_stays_in_the_layer_that_made_it():
    def forward(self, value):
        value = self.one(value)
        front = value[:, :2]
        other = self.two(value)
        front.mul_(2)
        return self.three(value) + other

    modules = {name: nn.Linear(6, 6) for name in ("one", "two", "three")}
    captured = capture(Lambda(forward, **modules), torch.randn(4, 6))
    assert captured.names == ("one", "three")
    value = torch.randn(4, 6)
    expected = captured.original(value).sum()
    # Cut where it can be: a process would see a copy.
    first, last = captured.spine()
    given = tuple(one.detach().clone() for one in first(value))
    assert torch.equal(last(given).sum(), expected)


class Buffers(nn.Module):
    """State that the forward writes, and some that it never uses."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, value):
        self.steps.add_(1)
        return self.one(value) * self.scratch + self.steps


def test_buffers_that_a_forward_writes_are_the_models_and_nothing_is_lost():
    model = Buffers()
    captured = capture(model, torch.randn(4, 4))
    assert float(model.steps) == 0
    captured(torch.randn(4, 4))
    assert float(model.steps) == 1
    held = {}
    for layer in spine_of(captured):
        held |= layer.module.state_dict()
    assert held.keys() == model.state_dict().keys()
    assert "scratch" not in held


class Holder:
    def __init__(self, value):
        self.value = value


def test_only_tensors_pass_between_layers():
    def forward(self, value):
        rows = value.shape[0]
        value = self.one(value).view(rows, 2, 3)
        return self.two(value).view(rows, -1)

    captured = capture(Lambda(forward, one=nn.Linear(6, 6), two=nn.Linear(3, 3)), torch.randn(4, 6))
    between = captured.spine()[0](torch.randn(5, 6))
    assert [tuple(one.shape) for one in between] == [(5, 2, 3)]


class Hiding(nn.Module):
    """Has no children, and returns an object that hides its tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, value):
        return Holder(value @ self.weight)


def test_modules_that_pass_objects_are_looked_into():
    model = Lambda(lambda self, value: self.two(self.one(value).value), one=Hiding(), two=nn.ReLU())
    captured = capture(model, torch.randn(4, 6))
    assert captured.how == "torch.export"
    assert captured.names == ("one", "two")
    assert same(captured, model, torch.randn(3, 6))
    assert captured.spine()[0].get_parameter("one.weight") is model.one.weight


def test_a_module_without_gradients_trains_as_little_as_before():
    def forward(self, value):
        with torch.no_grad():
            fixed = self.one(value)
        return self.two(value + fixed)

    model = Lambda(forward, one=nn.Linear(6, 6), two=nn.Linear(6, 6))
    captured = capture(model, torch.randn(4, 6))
    captured(torch.randn(3, 6)).sum().backward()
    assert model.one.weight.grad is None
    assert model.two.weight.grad is not None


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_modules_stay_whole_with_all_that_they_return():
    def forward(self, value):
        output, (hidden, cell) = self.both_ways(value)
        joined, last = self.gated(output)
        with torch.no_grad():
            fixed, _ = self.fixed(joined)
        return joined + hidden.sum(0)[:, None] + cell.sum() + last[0][:, None] + fixed

    model = Lambda(
        forward,
        both_ways=nn.LSTM(5, 6, 2, proj_size=4, bidirectional=True, batch_first=True),
        gated=nn.GRU(8, 4, batch_first=True),
        fixed=nn.RNN(4, 4, batch_first=True),
    )
    captured = capture(model, torch.randn(3, 7, 5))
    assert captured.how == "torch.export"
    assert captured.names == ("both_ways", "gated", "fixed")
    assert same(captured, model, torch.randn(4, 7, 5))


class Looking(nn.Module):
    """Looks at values, which an export has none of."""

    def forward(self, value):
        return value / max(value.abs().max().item(), 1.0)


def test_torch_fx_is_the_second_choice_and_says_so():
    model = Lambda(
        lambda self, value: self.two(self.one(value)), one=Looking(), two=nn.Linear(6, 6)
    )
    model.forward = lambda value: model.two(model.one(value)) + value.size(1)
    captured = capture(model, torch.randn(4, 6))
    assert captured.how.startswith("torch.fx, because torch.export failed: ")
    assert captured.names == ("one", "two")
    assert same(captured, model, torch.randn(3, 6))


def test_what_no_tracer_can_follow_is_told_with_both_reasons():
    def forward(self, value):
        value = self.one(value)
        return value if value.sum() > 0 else -value

    with pytest.raises(ModelError, match=r"forward, `return .*torch\.where.*spine") as told:
        capture(Lambda(forward, one=nn.Linear(6, 6)), torch.randn(4, 6))
    assert "data-dependent" in str(told.value.__cause__)
    assert "torch.fx: TraceError" in told.value.__cause__.__notes__[0]


class Branching(nn.Module):
    """Looks at a value, and talks while it does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value):
        print("looking", file=sys.stderr)
        value = self.linear(value)
        return value * 2 if value.sum() > 0 else value


ALONE = f"""
import sys
import torch
from torch import nn
from penstock.base.errors import ModelError
from penstock.engine.tracing import capture

{inspect.getsource(Branching)}

try:
    capture(Branching(), torch.randn(4, 3))
except ModelError as error:
    print(error)
"""


def test_a_failed_export_prints_no_graph_and_hides_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        check=False,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "PENSTOCK_QUIET": "1"},  # where it is slow, it would say how long
    )
    assert done.stdout.startswith("Branching cannot be traced, because of <string>:18, in forward")
    assert set(done.stderr.splitlines()) == {"looking"}


def test_what_hushes_torch_is_gone_afterwards(capsys):
    logger, stream = logging.getLogger("torch.fx.experimental.symbolic_shapes"), sys.stderr
    before = list(logger.filters)
    with pytest.raises(ModelError):
        capture(Branching(), torch.randn(4, 3))
    assert sys.stderr is stream
    assert logger.filters == before
    assert "looking" in capsys.readouterr().err


def test_a_model_that_tracing_does_not_see_is_refused():
    turns = itertools.count()
    model = Lambda(lambda self, value: self.one(value) * next(turns), one=nn.Linear(6, 6))
    with pytest.raises(ModelError, match="is another model: output 0 differs"):
        capture(model, torch.randn(4, 6))


def test_a_model_that_was_converted_must_be_captured_again(residual):
    captured = copy.deepcopy(residual)
    captured.original.double()
    with pytest.raises(ModelError, match="capture it again"):
        captured.spine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"granularity": "atom"}, "granularity"), ({"dynamic": "none"}, "dynamic")],
)
def test_unknown_options_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        capture(Residual(), torch.randn(4, 6), **arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")  # since torch 2.15
@pytest.mark.parametrize(
    ("wrap", "message"),
    [(torch.jit.script, "torch.jit made it of")],
)
def test_models_whose_code_is_gone_are_refused(wrap, message):
    with pytest.raises(ModelError, match=message):
        capture(wrap(nn.Sequential(nn.Linear(6, 6))), torch.randn(4, 6))


def test_what_is_no_module_is_refused():
    with pytest.raises(ModelError, match=r"is a function, not an nn\.Module"):
        capture(lambda value: value, torch.randn(4, 6))


class LanguageModel(nn.Module):
    """As those of ``transformers``: a dictionary in and out, and the loss if labels are given."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids, mask=None, labels=None):
        value = self.embedding(input_ids)
        logits = self.head(value if mask is None else value * mask[..., None])
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


TOKENS, LABELS = torch.arange(60).remainder(11).view(2, 6, 5)
MASK = torch.ones(6, 5)


@made_once
def masked():
    return capture(LanguageModel(), {"input_ids": TOKENS, "mask": MASK})


@made_once
def labelled():
    return capture(LanguageModel(), {"input_ids": TOKENS, "labels": LABELS})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"input_ids": TOKENS, "mask": MASK, "labels": LABELS},
            "the inputs are input_ids, mask, labels, but the model was captured with input_ids, "
            "mask; leave out labels, or capture",
        ),
        ({"input_ids": TOKENS}, "captured with input_ids, mask; give mask too, or capture"),
        (TOKENS, "the inputs are input_ids, but .* give mask too"),
        ({"input_ids": TOKENS, "bogus": MASK}, "leave out bogus and give mask too, or capture"),
    ],
)
def test_inputs_of_another_form_are_told_by_name(inputs, message):
    with pytest.raises(InputError, match=message):
        masked()(inputs)


@pytest.mark.parametrize("name", ["kind", "unit", "calls", "spine_name", "computes_on"])
def test_names_that_layers_have_for_themselves_are_refused(name):
    model = Residual()
    model.add_module(name, nn.Linear(3, 3))
    with pytest.raises(ModelError, match=rf"Residual\.{name} has a name .* another name"):
        capture(model, torch.randn(4, 6))


def test_the_order_of_keywords_means_nothing():
    captured = capture(LanguageModel(), {"mask": MASK, "input_ids": TOKENS})
    inputs = {"input_ids": TOKENS, "mask": MASK}
    swapped = dict(reversed(inputs.items()))
    assert torch.equal(captured(inputs)["logits"], captured(swapped)["logits"])


@pytest.mark.parametrize("rows", [1, 6])
def test_a_loss_of_labels_inside_is_evaluated_on_all_rows(rows):
    captured = labelled()
    model = captured.original
    batch = {"input_ids": TOKENS[:rows], "labels": LABELS[:rows].clone()}
    batch["labels"][0, 1:] = -100  # so that no mean over rows or microbatches is right
    with pk.Pipeline(captured, make_plan(captured, 2, 3), deadline_seconds=300) as pipeline:
        expected = model.eval()(**batch)
        for _ in range(2):
            found = pipeline.evaluate(batch)
            torch.testing.assert_close(found["logits"], expected["logits"])
            torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)


def test_a_pipeline_of_a_model_that_profile_captured_names_the_line_to_write():
    model = LanguageModel()
    plan = make_plan(capture(model, {"input_ids": TOKENS}), 2, 2)
    message = r"`model = penstock\.capture\(model, inputs\)`.* give Pipeline the captured model"
    with pytest.raises(ModelError, match=message):
        pk.Pipeline(model, plan)
    pk.Pipeline(capture(model, {"input_ids": TOKENS}), plan).close()


def test_a_transformer_that_looks_into_its_mask_says_what_to_give():
    def decode(self, target, memory, **hints):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.decoder(target, memory, tgt_mask=mask, **hints)

    layer = nn.TransformerDecoderLayer(4, 1, 4, dropout=0.0, batch_first=True)
    inputs = (torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    with pytest.raises(ModelError, match=r"mask to see whether it is causal.*tgt_is_causal=True"):
        capture(Lambda(decode, decoder=nn.TransformerDecoder(layer, 1)), inputs)
    told = partial(decode, tgt_is_causal=True)
    model = Lambda(told, decoder=nn.TransformerDecoder(layer, 1))
    assert capture(model, inputs, verify=False).spine()


class Scores(NamedTuple):
    scores: torch.Tensor
    best: list


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, value):
        scores = self.last(self.first(value).relu())
        return Scores(scores, [scores.sum(-1)])


def test_the_classes_of_what_it_returns_may_travel_between_processes():
    *layers, last = capture(Scorer(), torch.randn(4, 4)).spine()
    assert last.message_types == {Scores, list}
    assert not any(layer.message_types for layer in layers)
    value = run_spine([*layers, last], torch.randn(4, 4))
    assert type(value) is Scores
    packer = Packer(Codec(last.message_types))
    described = packer.describe(Edge(0, 1, 0), value)[0]
    assert packer.recognise(Edge(0, 1, 0), described.description).node == described.node
