"""A backward in two halves: equal to the bit to a whole one."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.base.errors import InputError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.helpers import Lambda, wanting
from tests.kit.kernels import kernels_for_an_lstm


def stage_of(module, first_layer=1):
    return Stage(1, spine_of(nn.Sequential(module)), first_layer, LayerStreams(0))


def equal(one, other):
    return (one is None and other is None) or torch.equal(one, other)


def assert_halves_make_a_whole(
    module, inputs, first_layer=1, autocast=False, hooks=False, seed_of=torch.randn_like
):
    """Three microbatches in two halves, and on a twin in one go; how many calls were deferred."""
    module.zero_grad()
    twin = copy.deepcopy(module)
    halves, whole = stage_of(module, first_layer), stage_of(twin, first_layer)
    fired = [record_hooks(stage) for stage in (halves, whole)] if hooks else [[], []]
    deferred = 0
    for k in range(3):
        given_inputs = inputs() if callable(inputs) else inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = halves.forward(k, wanting(clone(given_inputs)), keep=Keep.SPLIT).value
            expected = whole.forward(k, wanting(clone(given_inputs))).value
        output, expected = as_list(output), as_list(expected)
        assert all(map(torch.equal, output, expected))
        seeds = [seed_of(value) for value in output]
        gradients = halves.backward_input(k, seeds)
        deferred = len(halves._deferred[k]._entries)
        halves.backward_weight(k)
        others = whole.backward(k, seeds)
        assert all(map(equal, gradients.inputs, others.inputs))
        names = [name for name, _ in module.named_parameters()]
        for name, one, other in zip(names, halves.parameters(), whole.parameters(), strict=True):
            assert equal(one.grad, other.grad), (name, k)
    assert fired[0] == fired[1]
    assert halves.in_flight == whole.in_flight == 0
    return deferred


def record_hooks(stage):
    """Every call of a hook with the sum it saw, per parameter: the order of two is free."""
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    calls = [[] for _ in trained]
    for mine, parameter in zip(calls, trained, strict=True):
        parameter.register_hook(lambda g, mine=mine: mine.append(("hook", g.tolist())))
        parameter.register_post_accumulate_grad_hook(
            lambda p, mine=mine: mine.append(("after", p.grad.tolist()))
        )
    return calls


def clone(value):
    return tuple(map(clone, value)) if isinstance(value, tuple) else value.clone()


def as_list(value):
    return list(value) if isinstance(value, tuple) else [value]


def attention(batch_first):
    return Lambda(
        lambda value, layer: layer(value, value, value, need_weights=False)[0],
        nn.MultiheadAttention(6, 2, batch_first=batch_first),
    )


def lora():
    base = nn.Linear(6, 6).requires_grad_(False)
    down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    return Lambda(lambda value, base, down, up: base(value) + up(down(value)), base, down, up)


def bias_only():
    layer = nn.Linear(6, 6)
    layer.weight.requires_grad_(False)
    return layer


# name: (layer, shape of the input, calls that are deferred)
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6), 1),
    "without bias": (lambda: nn.Linear(6, 5, bias=False), (4, 3, 6), 1),
    "of a vector": (lambda: nn.Linear(6, 5), (6,), 1),
    "of three dimensions": (lambda: nn.Linear(6, 5), (2, 3, 6), 1),
    "of four dimensions": (lambda: nn.Linear(6, 5), (2, 3, 2, 6), 1),
    "in place behind": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
        (2, 3, 6),
        2,
    ),
    "ends in a view": (
        lambda: Lambda(lambda v, linear: linear(v).transpose(0, 1)[1:], nn.Linear(6, 6)),
        (4, 6),
        1,
    ),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9), 1),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, bias=False), (2, 4, 9, 9), 1),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding="valid"), (2, 4, 5, 5, 5), 1),
    "same padding": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 7), 1),
    "uneven same padding": (lambda: nn.Conv1d(4, 6, 2, padding="same"), (2, 4, 7), 0),
    "padded by itself": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        (2, 4, 7, 7),
        1,
    ),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 7), 0),
    "depthwise": (lambda: nn.Conv2d(4, 4, (3, 1), groups=4), (2, 4, 7, 7), 1),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 7), 1),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=2),
        (2, 4, 7, 7),
        1,
    ),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(4, 6, 3, padding=1), (2, 4, 3, 3, 3), 1),
    "conv and batch norm": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        (2, 4, 7, 7),
        1,
    ),
    "attention": (lambda: attention(True), (2, 3, 6), 2),
    "attention, sequence first": (lambda: attention(False), (2, 3, 6), 2),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0), (2, 3, 6), 4),
    "frozen": (lambda: nn.Linear(6, 6).requires_grad_(False), (4, 6), 0),
    "bias only": (bias_only, (4, 6), 0),
    "LoRA": (lora, (4, 6), 2),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), (4, 6), 0),
    "LSTM": (lambda: Lambda(lambda value, lstm: lstm(value)[0], nn.LSTM(6, 5)), (2, 3, 6), 0),
    "bilinear": (
        lambda: Lambda(lambda value, layer: layer(value, value), nn.Bilinear(6, 6, 5)),
        (4, 6),
        0,
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("autocast", [False, True], ids=["full", "autocast"])
@pytest.mark.parametrize("first_layer", [0, 1], ids=["first stage", "later stage"])
@pytest.mark.parametrize("name", LAYERS)
def test_both_halves_give_what_a_whole_backward_gives(name, first_layer, autocast):
    build, shape, calls = LAYERS[name]
    torch.manual_seed(0)
    with kernels_for_an_lstm() if name == "LSTM" else contextlib.nullcontext():
        deferred = assert_halves_make_a_whole(
            build(), lambda: torch.randn(shape), first_layer, autocast
        )
    assert deferred == calls


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embeddings_are_deferred(padding):
    layer = nn.Sequential(nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 3))
    inputs = torch.tensor([[2, 8, 1], [1, 1, 8]])
    assert assert_halves_make_a_whole(layer, inputs, first_layer=0) == 2
    by_frequency = nn.Embedding(9, 6, scale_grad_by_freq=True)
    assert assert_halves_make_a_whole(by_frequency, inputs, first_layer=0) == 1


def test_a_negative_padding_index_counts_from_the_end():
    layer = Lambda(lambda v, e: F.embedding(v, e.weight, padding_idx=-1), nn.Embedding(9, 6))
    assert assert_halves_make_a_whole(layer, torch.tensor([2, 8, 1]), first_layer=0) == 1


@pytest.mark.parametrize("kind", [{"sparse": True}, {"max_norm": 0.5}])
def test_embeddings_that_autograd_treats_otherwise_are_not_deferred(kind):
    stage = stage_of(nn.Embedding(9, 6, **kind), 0)
    stage.forward(0, torch.tensor([1, 2]), keep=Keep.SPLIT)
    stage.backward_input(0, [torch.ones(2, 6)])
    assert next(stage.parameters()).grad is not None
    stage.backward_weight(0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), max_size=3),
    sizes=st.tuples(st.sampled_from([1, 3, 8, 64]), st.sampled_from([1, 4, 33])),
    layout=st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    bias=st.booleans(),
    first_layer=st.integers(0, 1),
    autocast=st.booleans(),
)
def test_linear_layers_are_equal_to_the_bit_in_every_layout(
    rows, sizes, layout, bias, first_layer, autocast
):
    width, outputs = sizes

    def laid_out(value):
        if layout == "transposed" and len(rows) > 1:
            return value.transpose(0, len(rows) - 1)
        if layout == "strided":
            return value.repeat(*[1] * len(rows), 2)[..., ::2]
        return value.expand(2, *value.shape) if layout == "expanded" else value

    layer = Lambda(lambda value, linear: linear(laid_out(value)), nn.Linear(width, outputs, bias))
    inputs = torch.randn(*rows, width)
    assert assert_halves_make_a_whole(layer, inputs, first_layer, autocast) == 1


class Tied(nn.Module):
    """Uses one matrix and one vector again and again, some uses deferred and some not."""

    def __init__(self, uses):
        super().__init__()
        self.uses = uses
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.vector = nn.Parameter(torch.randn(6))

    def forward(self, value):
        kinds = {
            "linear": lambda v: F.linear(v, self.matrix, self.vector),
            "slice": lambda v: v + self.matrix[:1],
            "transposed": lambda v: v @ self.matrix.T,
            "scaled": lambda v: v * self.vector,
            "stacked": lambda v: v + torch.stack([self.vector, self.vector]).sum(0),
        }
        for use in self.uses:
            value = kinds[use](value)
        return value


USES = ("linear", "slice", "transposed", "scaled", "stacked")


@settings(max_examples=80, deadline=None)
@given(uses=st.lists(st.sampled_from(USES), min_size=1, max_size=4), hooks=st.booleans())
def test_all_uses_of_a_parameter_are_summed_in_the_order_of_a_whole_backward(uses, hooks):
    # Sums of floats depend on their order; what is not deferred must wait for what is.
    layer = Tied(uses)
    assert_halves_make_a_whole(layer, lambda: torch.randn(4, 6), hooks=hooks)


def test_embedding_and_head_may_be_tied_in_a_stage():
    embedding = nn.Embedding(9, 6)
    layer = Lambda(lambda v, e: F.linear(torch.tanh(e(v)), e.weight) + e.weight[:1, :1], embedding)
    assert assert_halves_make_a_whole(layer, torch.tensor([[2, 8]]), 0, hooks=True) == 3


@pytest.mark.parametrize("name", ["linear", "conv and batch norm", "transformer", "LSTM", "LoRA"])
def test_hooks_of_parameters_fire_once_per_microbatch_with_the_whole_sum(name):
    build, shape, _ = LAYERS[name]
    assert_halves_make_a_whole(build(), lambda: torch.randn(shape), hooks=True)


def test_a_hook_that_replaces_the_gradient_is_obeyed():
    layer, inputs = nn.Linear(3, 3), torch.randn(2, 3)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    stage = stage_of(layer)
    stage.forward(0, inputs, keep=Keep.SPLIT)
    stage.backward_input(0, [torch.ones(2, 3)])
    stage.backward_weight(0)
    assert torch.equal(layer.weight.grad, 2 * torch.ones(3, 2) @ inputs)


def test_hooks_of_a_deferred_parameter_do_not_fire_before_its_gradient_is_there():
    layer, fired = nn.Linear(3, 3), []
    layer.weight.register_hook(fired.append)
    stage = stage_of(layer)
    stage.forward(0, torch.randn(2, 3), keep=Keep.SPLIT)
    stage.backward_input(0, [torch.ones(2, 3)])
    assert not fired
    assert layer.weight.grad is None
    stage.backward_weight(0)
    assert len(fired) == 1


def test_what_a_parameter_is_may_be_asked_in_a_forward():
    seen = []

    def ask(value, linear):
        weight = linear.weight
        seen.append((weight.grad, weight.is_leaf, weight.requires_grad, weight.shape, len(weight)))
        return linear(value)

    assert_halves_make_a_whole(Lambda(ask, nn.Linear(3, 3)), torch.randn(2, 3))
    assert seen[0] == (None, True, True, (3, 3), 3)
    assert torch.is_tensor(seen[2][0])  # of the first microbatch


def test_several_inputs_and_outputs_some_without_gradients():
    layer = Lambda(
        lambda value, a, b: (a(value[0]), b(value[1]) * a(value[0]), value[1].detach()),
        nn.Linear(3, 3),
        nn.Linear(3, 3),
    )
    inputs = (torch.randn(2, 3), torch.randn(2, 3), torch.tensor([1]))
    assert assert_halves_make_a_whole(layer, inputs) == 3
    only_first = iter([torch.ones(2, 3), None, None] * 3)
    assert assert_halves_make_a_whole(layer, inputs, seed_of=lambda _: next(only_first)) == 1
    assert assert_halves_make_a_whole(layer, inputs, seed_of=lambda _: None) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_user_recomputes_inside_is_deferred_too(reentrant):
    layer = Lambda(
        lambda value, a, b: b(checkpoint(a, value * 1, use_reentrant=reentrant)),
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
        nn.Linear(3, 3),
    )
    assert assert_halves_make_a_whole(layer, torch.randn(2, 3), hooks=True) == 3


def test_halves_of_several_microbatches_may_interleave():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    twin = copy.deepcopy(layer)
    halves, whole = stage_of(layer), stage_of(twin)
    inputs, seeds = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    for k in range(3):
        halves.forward(k, wanting(inputs[k]), keep=Keep.SPLIT)
        whole.forward(k, wanting(inputs[k]))
    assert halves.in_flight == 3
    for k in (1, 0, 2):
        halves.backward_input(k, [seeds[k]])
    assert halves.in_flight == 3
    halves.backward_weight(2, 0, 1)
    for k in (2, 0, 1):
        whole.backward(k, [seeds[k]])
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert halves.in_flight == 0


def test_a_whole_backward_of_a_split_forward_is_both_halves():
    layer = nn.Linear(3, 3)
    twin = copy.deepcopy(layer)
    inputs, seed = torch.randn(2, 3), torch.randn(2, 3)
    for module, keep in ((layer, Keep.SPLIT), (twin, Keep.EVERYTHING)):
        stage = stage_of(module)
        stage.forward(0, inputs, keep=keep)
        stage.backward(0, [seed])
        assert stage.in_flight == 0
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def test_halves_in_the_wrong_order_are_refused():
    stage = stage_of(nn.Linear(3, 3))
    seed = [torch.ones(2, 3)]
    where = "of microbatch 7 on stage 1"
    with pytest.raises(InputError, match=f"backward_weight {where} needs its backward_input.*noth"):
        stage.backward_weight(7)
    stage.forward(7, torch.ones(2, 3))
    with pytest.raises(InputError, match=f"backward_input {where} .*its forward kept EVERYTHING"):
        stage.backward_input(7, seed)
    stage.forward(7, torch.ones(2, 3), keep=Keep.SPLIT)
    with pytest.raises(InputError, match=f"backward_weight {where} .*its forward kept SPLIT"):
        stage.backward_weight(7)
    stage.backward_input(7, seed)
    with pytest.raises(InputError, match=f"backward_input {where} .*its backward_input is done"):
        stage.backward_input(7, seed)
    with pytest.raises(InputError, match=f"backward {where} .*its backward_weight is due"):
        stage.backward(7, seed)
    stage.backward_weight(7)
    with pytest.raises(InputError, match=f"backward_weight {where} .*nothing of it is kept"):
        stage.backward_weight(7)


class Relaxed(nn.Module):
    """Goes down the gradient of an energy, as equilibrium models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        with torch.enable_grad():
            place = value.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(place).tanh().sum(), place)
        return self.linear(value - 0.1 * gradient)


def test_gradients_inside_a_forward_are_not_taken_for_those_of_the_backward():
    """Three zero-bubble steps had losses of 1.36, 1.47 and 1.88, where one device has 1.36."""
    stage = stage_of(Relaxed())
    with pytest.raises(InputError, match=r"backward inside its forward.* such as .1f1b."):
        stage.forward(0, torch.randn(2, 4, requires_grad=True), keep=Keep.SPLIT)
    stage.forget()
    stage.forward(0, torch.randn(2, 4, requires_grad=True), keep=Keep.EVERYTHING)
    stage.backward(0, [torch.ones(2, 4)])
