"""Running a forward again: as if it were the first time, for a whole stage or layer by layer."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.base.errors import InputError
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.examples import in_turns
from tests.kit.helpers import Lambda, wanting
from tests.kit.kernels import kernels_for_an_lstm


def stage_of(*modules, first_layer=1, recompute_layers=False):
    layers = spine_of(nn.Sequential(*modules))
    return Stage(1, layers, first_layer, LayerStreams(0), recompute_layers)


class Decaying(nn.Module):
    """Scales by a buffer that shrinks with every forward: what it gives depends on the buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(1))

    def forward(self, value):
        result = value * self.scale.clone()
        if self.in_place:
            self.scale.mul_(0.5)
        else:
            self.scale = self.scale * 0.5
        return result


STAGES = {
    "dropout": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)],
    "batch norm": lambda: [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)],
    "in place first": lambda: [Lambda(lambda value: value.mul_(3)), nn.Linear(6, 6)],
    "in place behind a view": lambda: [nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(6, 6)],
    "in place inside": lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)],
    "buffer in place": lambda: [Decaying(True), nn.Linear(6, 6)],
    "buffer replaced": lambda: [Decaying(False), nn.Linear(6, 6)],
    "spectral norm": lambda: [parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()],
    # Over four moments: the kernels with gradients and without give other bits.
    "LSTM": lambda: [
        Lambda(lambda v, lstm: lstm(v[:, None])[0][:, 0], nn.LSTM(6, 6)),
        nn.Linear(6, 6),
    ],
    "transformer": lambda: [nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3)],
    "evaluating": lambda: [nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval()],
    "several values": lambda: [
        Lambda(lambda v: (v * 2, [v.sum(), 3])),
        Lambda(lambda v, linear: linear(v[0]) * v[1][0] * v[1][1], nn.Linear(6, 6)),
    ],
    "nothing to train": lambda: [nn.Tanh(), nn.Dropout(0.5)],
}


def step(stage, inputs, keep, after, criterion, autocast):
    """All that a step of three microbatches gives, or changes."""
    results = []
    for k, value in enumerate(inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and k != 1):
            results.append(stage.forward(k, wanting(value.clone()), 5, criterion, keep).value)
    for k, value in enumerate(results.copy()):
        if keep is Keep.INPUT:
            stage.recompute(k, after)
        if after is Keep.SPLIT:
            results += stage.backward_input(k, [torch.ones_like(value)]).inputs
            stage.backward_weight(k)
        else:
            results += stage.backward(k, [torch.ones_like(value)]).inputs
    assert stage.in_flight == 0
    results += [parameter.grad for parameter in stage.parameters()]
    return results + [buffer for layer in stage.layers for buffer in layer.module.buffers()]


def noisy_loss(output):
    return F.dropout(output.float(), 0.5).square().mean()


@pytest.mark.parametrize(
    ("name", "first_layer", "autocast", "criterion"),
    in_turns(
        itertools.product(STAGES, (0, 1), (False, True), (None, noisy_loss)),
        3,
        always=("dropout", "batch norm", "buffer in place", "LSTM"),
    ),
)
def test_recomputing_changes_nothing(name, first_layer, autocast, criterion):
    if name == "nothing to train" and first_layer == 0 and criterion:
        pytest.skip("there is no loss without a gradient")
    torch.manual_seed(0)
    modules = STAGES[name]()
    inputs = torch.randn(3, 4, 6)
    given = (criterion, autocast)
    with kernels_for_an_lstm() if name == "LSTM" else contextlib.nullcontext():
        assert_that_recomputing_changes_nothing(modules, inputs, first_layer, given)


def assert_that_recomputing_changes_nothing(modules, inputs, first_layer, given):
    plain = stage_of(*copy.deepcopy(modules), first_layer=first_layer)
    expected = step(plain, inputs, Keep.EVERYTHING, Keep.EVERYTHING, *given)
    for per_layer, keep, after in itertools.product(
        (False, True), (None, Keep.INPUT), (Keep.EVERYTHING, Keep.SPLIT)
    ):
        stage = stage_of(
            *copy.deepcopy(modules), first_layer=first_layer, recompute_layers=per_layer
        )
        found = step(stage, inputs, keep or after, after, *given)
        for position, (one, other) in enumerate(zip(found, expected, strict=True)):
            same = one is other if one is None or other is None else torch.equal(one, other)
            assert same, (per_layer, keep, after, position)


def memory(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize("way", ["input", "layers", "everything"])
def test_only_inputs_are_kept(way):
    kept = []

    def square(value):
        kept.append(memory(value))
        inner = value * value
        kept.append(memory(inner))
        return inner * inner

    stage = stage_of(Lambda(square), Lambda(square), recompute_layers=way == "layers")
    inputs = wanting(torch.randn(4, 4))
    given = memory(inputs)
    stage.forward(0, inputs, keep=Keep.INPUT if way == "input" else Keep.EVERYTHING)
    del inputs
    assert not given.expired()
    alive = [not ref.expired() for ref in kept]
    # A layer that is recomputed works on copies of its input, which it may overwrite.
    assert alive == ([True] * 4 if way == "everything" else [False] * 4)
    if way == "input":
        stage.recompute(0)
    stage.backward(0, [torch.ones(4, 4)])
    assert given.expired()
    assert all(ref.expired() for ref in kept)


def test_the_forwards_of_many_microbatches_keep_their_inputs_only():
    stage = stage_of(nn.Linear(6, 6), nn.Tanh())
    for k in range(3):
        stage.forward(k, torch.randn(2, 6), keep=Keep.INPUT)
    assert stage.in_flight == 3
    stage.recompute(1, Keep.SPLIT)
    stage.backward_input(1, [torch.ones(2, 6)])
    assert stage.in_flight == 3
    stage.backward_weight(1)
    assert stage.in_flight == 2
    stage.forget()
    assert stage.in_flight == 0


def test_without_gradients_there_is_nothing_to_recompute():
    stage = stage_of(nn.Linear(6, 6), nn.Dropout(0.5), recompute_layers=True)
    with torch.no_grad():
        stage.forward(0, torch.randn(2, 6), keep=Keep.INPUT)
    assert stage.in_flight == 0


def test_recomputing_out_of_order_is_refused():
    stage = stage_of(nn.Linear(3, 3))
    with pytest.raises(InputError, match=r"recompute of microbatch 0 on stage 1 .*nothing of it"):
        stage.recompute(0)
    stage.forward(0, torch.ones(2, 3), keep=Keep.INPUT)
    with pytest.raises(InputError, match=r"backward of microbatch 0 .*recompute it first"):
        stage.backward(0, [torch.ones(2, 3)])
    with pytest.raises(InputError, match=r"backward_input of microbatch 0 .*recompute it first"):
        stage.backward_input(0, [torch.ones(2, 3)])
    with pytest.raises(InputError, match="EVERYTHING or SPLIT"):
        stage.recompute(0, Keep.INPUT)
    stage.recompute(0)
    with pytest.raises(InputError, match=r"recompute of microbatch 0 .*kept EVERYTHING"):
        stage.recompute(0)


@pytest.mark.parametrize("per_layer", [False, True])
def test_forward_hooks_of_users_fire_again(per_layer):
    layer, fired = nn.Linear(3, 3), []
    layer.register_forward_pre_hook(lambda *_: fired.append(1))
    stage = stage_of(layer, nn.Tanh(), recompute_layers=per_layer)
    stage.forward(0, torch.ones(2, 3), keep=Keep.EVERYTHING if per_layer else Keep.INPUT)
    assert len(fired) == 1
    if not per_layer:
        stage.recompute(0)
    stage.backward(0, [torch.ones(2, 3)])
    assert len(fired) == 2


def test_a_failing_second_run_puts_the_buffers_back():
    layer = Decaying(True)
    calls = []

    def fail_again(value):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no second time")
        return value

    stage = stage_of(layer, Lambda(fail_again))
    stage.forward(0, torch.ones(2), keep=Keep.INPUT)
    own = layer.scale
    with pytest.raises(ValueError, match="no second time"):
        stage.recompute(0)
    assert layer.scale is own
    assert layer.scale.item() == 0.5


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_that_users_checkpoint_themselves_is_still_refused(reentrant, per_layer):
    def run(value, linear):
        return checkpoint(
            lambda v: F.dropout(linear(v), 0.5) ** 2,
            value * 1,
            use_reentrant=reentrant,
            preserve_rng_state=False,
        )

    stage = stage_of(Lambda(run, nn.Linear(3, 3)), recompute_layers=per_layer)
    stage.forward(0, wanting(torch.ones(2, 3)))
    with pytest.raises(InputError, match="draws random numbers during backward"):
        stage.backward(0, [torch.ones(2, 3)])
