"""What context ranks cannot share is refused by the name of the operation that is in the way."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.base.errors import ModelError, PenstockError
from penstock.engine.context.masks import kind_of
from penstock.engine.tracing import capture
from penstock.planning.plans.spilling import Offload
from tests.kit.helpers import make_plan
from tests.kit.training import momentum
from tests.numerics.test_context import WORDS, context_plan, net_loss, words

pytestmark = pytest.mark.xdist_group("captured models")  # which takes long


class Mixing(nn.Module):
    """Does something to values ``[rows, positions, width]`` between an embedding and a head."""

    def __init__(self, mix, *modules):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.modules_in = nn.ModuleList(modules)
        self.mix = mix

    def forward(self, tokens):
        return self.head(self.mix(self.words(tokens), *self.modules_in))


class Running(nn.Module):
    """A module whose code nobody knows: it adds up what is before."""

    def forward(self, value):
        return value.cumsum(1)


class Counting(nn.Module):
    """Makes its own numbers of positions."""

    def forward(self, value):
        return value + torch.arange(value.shape[1])[:, None]


def attended(**options):
    def mix(value):
        heads = value.unflatten(-1, (2, 4)).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(heads, heads, heads, **options)
            .transpose(1, 2)
            .flatten(2)
        )

    return mix


def by_hand(value):
    return (value @ value.transpose(1, 2)).softmax(-1) @ value


def windowed(value):
    seen = torch.ones(9, 9, dtype=torch.bool).tril().triu(-2)
    return attended(attn_mask=seen)(value)


def attention(**options):
    return nn.MultiheadAttention(8, 2, batch_first=True, **options)


def by_module(value, module, **options):
    return module(value, value, value, need_weights=False, **options)[0]


def refused(model):
    ours = capture(model, words(0)[0], granularity="block", verify=False)
    with pytest.raises(PenstockError) as caught:
        pk.Pipeline(ours, context_plan(ours, 1, 1), loss=net_loss, optimizer=momentum).close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("mix", "modules", "said"),
    [
        (lambda value: value.cumsum(1), (), r"aten\.cumsum.* mixes positions"),
        (lambda value: value - value.mean(1, keepdim=True), (), r"aten\.mean.* mixes positions"),
        (lambda value: value.flip(1), (), r"aten\.flip.* mixes positions"),
        (lambda value: F.pad(value, (0, 0, 1, 0))[:, :-1], (), r"aten\.pad.* mixes positions"),
        (lambda value: value.softmax(1), (), r"aten\.softmax.* mixes positions"),
        (lambda value: value.reshape(-1, 3, 3, 8).sum(1), (), r"aten\.(reshape|view).* mixes"),
        (by_hand, (), r"aten\.matmul.* mixes positions"),
        (windowed, (), "scaled_dot_product_attention.* mask that is not the causal one"),
        (
            lambda value, conv: conv(value.transpose(1, 2)).transpose(1, 2),
            (nn.Conv1d(8, 8, 3, padding=1),), r"Conv1d.*convolution.* in it mixes positions",
        ),
        (lambda value, lstm: lstm(value)[0], (nn.LSTM(8, 8, batch_first=True),), "LSTM"),
        (lambda value, norm: norm(value.transpose(1, 2)).transpose(1, 2), (nn.BatchNorm1d(8),),
         "BatchNorm1d"),
        (lambda value, module: module(value), (Running(),), r"Running.*aten\.cumsum"),
        (lambda value, module: module(value), (Counting(),),
         r"Counting.*aten\.arange.* counts positions"),
        (
            # As many positions as columns of the matrix: no shape is wrong before they are shared.
            lambda value, linear: value + linear(value.transpose(1, 2)).transpose(1, 2),
            (nn.Linear(9, 9),), r"Linear.*aten\.\w+.* in it mixes positions",
        ),
        (by_module, (attention(dropout=0.1),), "drops out weights of attention"),
        (
            lambda value, module: value + module(value, value, value)[1].sum(),
            (attention(),), "is asked for its weights",
        ),
        (
            lambda value, module: by_module(value.transpose(0, 1), module).transpose(0, 1),
            (attention(),), "attends along another dimension than positions",
        ),
    ],
)  # fmt: skip
def test_what_mixes_positions_is_refused_by_name(mix, modules, said, caplog):
    message = refused(Mixing(mix, *modules))
    assert re.search(said, message, re.DOTALL), message
    assert "plan without context ranks" in message
    # torch logs tracebacks of what it could not record
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: plan.with_reducer("fully-sharded"), "here 2 context ranks add"),
        (lambda plan: plan.offloading(Offload()), "several context ranks share stay in memory"),
    ],
)
def test_what_context_ranks_do_not_go_with_names_them(change, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(PenstockError, match=rf"{said}.* context_ranks=1"):
        change(make_plan(model, 1, 2).with_context_ranks(2))


def test_compiled_passes_do_not_go_with_context_ranks_by_their_name():
    ours = capture(Mixing(lambda value: value), words(0)[0], granularity="block", verify=False)
    with pytest.raises(PenstockError, match=r"compile=… and context ranks"):
        pk.Pipeline(
            ours, context_plan(ours, 1, 1), loss=net_loss, optimizer=momentum, compile="aot_eager"
        )


def test_dropout_in_attention_is_refused():
    assert "attention dropout 0" in refused(Mixing(attended(dropout_p=0.1, is_causal=True)))


def test_a_mask_of_the_inputs_is_refused():
    class Padded(Mixing):
        def forward(self, tokens):
            value = self.words(tokens)
            seen = (tokens != 0)[:, None, None, :]
            return self.head(attended(attn_mask=seen)(value))

    assert "mask that depends on the model's inputs" in refused(Padded(None))


def test_parameters_that_go_round_positions_are_refused():
    class Regularised(Mixing):
        def forward(self, tokens):
            return self.head(self.words(tokens)), self.head.weight.pow(2).sum()

    assert "their gradients would count once for each" in refused(Regularised(None))


def test_a_model_without_positions_is_refused():
    model = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    ours = capture(model, torch.randn(4, 9).double(), verify=False)
    with pytest.raises(PenstockError, match="no layer can be divided by positions"):
        pk.Pipeline(ours, context_plan(ours, 1, 1), loss=net_loss, optimizer=momentum)


def test_a_layer_that_was_not_captured_is_refused():
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    with pytest.raises(ModelError, match=r"pk\.capture\(model, inputs\)"):
        pk.Pipeline(model, context_plan(model, 1, 1), loss=net_loss, optimizer=momentum)


def test_all_layers_share_positions_or_none():
    ours = capture(Mixing(lambda value: value), words(0)[0], verify=False)
    plan = context_plan(ours, 1, 1).with_tensor_split(2, {"words": "context", "head": "whole"})
    with pytest.raises(ModelError, match="split every layer so, or none"):
        pk.Pipeline(ours, plan, loss=net_loss, optimizer=momentum)


def test_a_short_sequence_is_refused():
    ours = capture(Mixing(lambda value: value), words(0, length=3)[0], verify=False)
    with pytest.raises(ModelError, match="at least 4 positions"):
        pk.Pipeline(ours, context_plan(ours, 1, 1), loss=net_loss, optimizer=momentum)


@pytest.mark.parametrize(
    ("mask", "hides", "kind"),
    [
        (torch.ones(3, 3).bool().tril(), False, "causal"),
        (torch.ones(2, 1, 3, 3).bool().tril(), False, "causal"),
        (torch.ones(3, 3).bool().triu(1), True, "causal"),
        (torch.full((3, 3), float("-inf")).triu(1), True, "causal"),
        (torch.full((3, 3), torch.finfo(torch.float32).min).triu(1), False, "causal"),
        (torch.ones(3, 3).bool(), False, "full"),
        (torch.zeros(3, 5), False, "full"),
        (torch.ones(3, 5).bool().tril(), False, None),
        (torch.full((3, 3), -2.0).triu(1), False, None),
        (torch.ones(3, 3).bool().triu(), False, None),
    ],
)
def test_masks_are_told_by_their_numbers(mask, hides, kind):
    assert kind_of(mask, hides=hides) == kind
