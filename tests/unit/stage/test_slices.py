"""Slices of a sequence, one after the other through a stage: as the whole sequence at once."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.lower import add_recompute
from penstock.core.schedule.rounds import Segment
from penstock.demo import GPT
from penstock.engine.model.microbatches import split_sequence
from penstock.engine.model.randomness import LayerStreams
from penstock.engine.model.spine import spine_of
from penstock.engine.run.rank.program import RankProgram
from penstock.engine.stage.slices import Relay, call_of, check_sliceable
from penstock.engine.stage.stage import Keep, Stage
from tests.kit.helpers import wanting


class Before(nn.Module):
    """Adds to each position a weighted sum of it and those before; counts them in an integer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, value):
        return self.forward_slice(value, None)[0]

    def forward_slice(self, value, carry):
        total, count = carry or (torch.zeros_like(value[:, :1]), 0)
        sums = total + (value * self.weight).cumsum(1)
        return value + torch.tanh(sums), (sums[:, -1:], count + value.shape[1])


class Leave(Before):
    """Mixes positions, and leaves its input for later."""

    stashes = ("early",)

    def forward_slice(self, value, carry):
        output, carry = super().forward_slice(value, carry)
        return (output, {"early": 2 * value}), carry


class Take(Before):
    """Mixes positions, and takes what was left."""

    recalls = ("early",)

    def forward(self, value, early):
        return self.forward_slice(value, None, early)[0]

    def forward_slice(self, value, carry, early):
        return super().forward_slice(value * early, carry)


def build_model():
    torch.manual_seed(0)
    width = nn.Linear(3, 3)
    return nn.Sequential(width, Leave(), nn.Tanh(), Before(), nn.LayerNorm(3), Take()).double()


def whole(model, value, gradient):
    """(output, gradient of the input) of the unsliced model."""
    value = value.clone().requires_grad_()
    stage = Stage(1, spine_of(model), 1, LayerStreams(0))
    output = stage.forward(0, value).value
    (found,) = stage.backward(0, [gradient]).inputs
    return output, found


def in_slices(model, value, gradient, num_slices, keep, again, microbatch=0, per_layer=False):
    """Likewise, slice by slice."""
    stage = Stage(1, spine_of(model), 1, LayerStreams(0), per_layer, num_slices)
    units = range(microbatch * num_slices, (microbatch + 1) * num_slices)
    pieces = zip(units, split_sequence(value, num_slices, "inputs"), strict=True)
    first = Keep.INPUT if again else keep
    outputs = [stage.forward(unit, wanting(piece), keep=first).value for unit, piece in pieces]
    found = []
    pairs = zip(units, split_sequence(gradient, num_slices, "gradients"), strict=True)
    for unit, piece in reversed(list(pairs)):
        if again:
            stage.recompute(unit, keep)
        back = stage.backward if keep is Keep.EVERYTHING else stage.backward_input
        found[:0] = back(unit, [piece]).inputs
    if keep is Keep.SPLIT:
        stage.backward_weight(*units)
    assert stage.in_flight == 0
    return torch.cat(outputs, 1), torch.cat(found, 1)


@settings(deadline=None, max_examples=40)
@given(
    num_slices=st.integers(1, 5),
    length=st.integers(5, 11),
    keep=st.sampled_from([Keep.EVERYTHING, Keep.SPLIT]),
    again=st.booleans(),
    microbatch=st.integers(0, 2),
    per_layer=st.booleans(),
)
def test_slices_together_do_what_the_whole_does(
    num_slices, length, keep, again, microbatch, per_layer
):
    model = build_model()
    twin = copy.deepcopy(model)
    value, gradient = torch.randn(2, 2, length, 3, dtype=torch.float64)
    expected = whole(twin, value, gradient)
    got = in_slices(model, value, gradient, num_slices, keep, again, microbatch, per_layer)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_evaluation_hands_carries_on_and_keeps_nothing():
    model, value = build_model(), torch.randn(2, 7, 3, dtype=torch.float64)
    stage = Stage(0, spine_of(model), 0, LayerStreams(0), num_slices=3)
    with torch.no_grad():
        outputs = [
            stage.forward(3 + k, one).value for k, one in enumerate(value.tensor_split(3, 1))
        ]
        twin = Stage(0, spine_of(model), 0, LayerStreams(0)).forward(0, value).value
    torch.testing.assert_close(torch.cat(outputs, 1), twin, rtol=1e-12, atol=1e-12)
    assert stage.in_flight == 0


def test_microbatches_do_not_mix_their_carries():
    stage = Stage(0, spine_of(nn.Sequential(Before())), 0, LayerStreams(0), num_slices=2)
    one, other = torch.randn(2, 1, 4, 3, dtype=torch.float64)
    pieces = [*one.tensor_split(2, 1), *other.tensor_split(2, 1)]
    outputs = {k: stage.forward(k, pieces[k]).value for k in (0, 2, 1, 3)}
    for value, first in ((one, 0), (other, 2)):
        got = torch.cat([outputs[first], outputs[first + 1]], 1)
        torch.testing.assert_close(got, Before()(value), rtol=1e-12, atol=1e-12)


def test_slices_out_of_order_are_refused():
    stage = Stage(3, spine_of(nn.Sequential(Before())), 3, LayerStreams(0), num_slices=2)
    value = torch.ones(1, 1, 3, dtype=torch.float64)
    with pytest.raises(
        InputError, match="on stage 3, slice 0 of microbatch 4 must come before slice 1 of"
    ):
        stage.forward(9, value)
    stage.forward(8, value)
    stage.forward(9, value)
    with pytest.raises(InputError, match="slice 1 of microbatch 4 must come before slice 0"):
        stage.backward(8, [value])


def test_after_a_failure_nothing_is_left_for_the_next_slice():
    stage = Stage(3, spine_of(nn.Sequential(Before())), 3, LayerStreams(0), num_slices=2)
    value = torch.ones(1, 1, 3, dtype=torch.float64)
    stage.forward(8, value)
    stage.forget()
    with pytest.raises(InputError, match="slice 0 of microbatch 4 must come before slice 1"):
        stage.forward(9, value)
    for unit in (8, 9):
        stage.forward(unit, value)
    stage.backward(9, [value])
    stage.forget()
    with pytest.raises(InputError, match="backward of slice 0 of microbatch 4 on stage 3 needs"):
        stage.backward(8, [value])
    for unit in (8, 9):
        stage.forward(unit, value)
    with pytest.raises(InputError, match="slice 1 of microbatch 4 must come before slice 0"):
        stage.backward(8, [value])


@given(num_slices=st.integers(1, 5), microbatch=st.integers(0, 3), backward=st.booleans())
def test_a_relay_gives_each_slice_what_the_one_before_left(num_slices, microbatch, backward):
    relay = Relay(0, ["carry"], num_slices, backward=backward)
    units = range(microbatch * num_slices, (microbatch + 1) * num_slices)
    before = {}
    for unit in reversed(units) if backward else units:
        assert relay.take(unit) == before
        assert relay.leave(unit, {"carry": unit, "skip": 7}) == {"skip": 7}
        before = {"carry": unit}


@pytest.mark.parametrize("backward", [False, True])
def test_what_the_last_slice_leaves_is_not_kept(backward):
    relay = Relay(0, ["carry"], 2, backward=backward)
    carry = torch.ones(1)
    alive = weakref.ref(carry)
    relay.leave(0 if backward else 1, {"carry": carry})
    del carry
    assert alive() is None


class Declared(nn.Module):
    by_position = True


class Undeclared(nn.Linear):
    def forward(self, value):
        return super().forward(value).cumsum(1)


class Chain(nn.Sequential):
    def forward(self, value):
        return super().forward(value).cumsum(1)


@pytest.mark.parametrize(
    "layer",
    [
        Before(), Declared(), nn.GELU(), nn.Embedding(3, 4), nn.LayerNorm(4), nn.RMSNorm(4),
        nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Declared())),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        *GPT(width=8, heads=2, layers=1).spine(),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_layers_that_work_on_slices(layer):
    check_sliceable(spine_of(nn.Sequential(layer)))


@pytest.mark.parametrize(
    "layer",
    [
        Undeclared(3, 3), Chain(nn.ReLU()), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Softmax(1),
        nn.LayerNorm((5, 4)), nn.RMSNorm((5, 4)), nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.MultiheadAttention(4, 2), nn.PReLU(3), nn.Sequential(Before()),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_layers_that_do_not_say_how_are_refused_by_name(layer):
    with pytest.raises(ModelError, match=rf"layer '1' \({type(layer).__name__}\) does not say.*"):
        check_sliceable(spine_of(nn.Sequential(nn.ReLU(), layer)))


def test_a_layer_that_returns_no_carry_is_told():
    class Forgetful(Before):
        def forward_slice(self, value, carry):
            return value

    stage = Stage(0, spine_of(nn.Sequential(Forgetful())), 0, LayerStreams(0), num_slices=2)
    with pytest.raises(ModelError, match=r"forward_slice of layer '0' must return \(output, carry"):
        stage.forward(0, torch.ones(1, 1, 3, dtype=torch.float64))


def test_a_carry_whose_tensors_cannot_be_seen_is_told():
    class Hiding(Before):
        def forward_slice(self, value, carry):
            return value, object()

    stage = Stage(0, spine_of(nn.Sequential(Hiding())), 0, LayerStreams(0), num_slices=2)
    with pytest.raises(InputError, match="returned a object, whose tensors"):
        stage.forward(0, torch.ones(1, 1, 3, dtype=torch.float64))


def test_without_slices_a_layer_is_called_as_ever():
    (layer,) = spine_of(nn.Sequential(Before()))
    assert call_of(layer, 1)[1] is None
    assert call_of(layer, 2)[1] is not None


def test_draws_differ_from_slice_to_slice_and_the_first_draws_as_a_whole_would():
    model, ones = nn.Sequential(nn.Dropout(0.5)), torch.ones(4, 6, 3)
    sliced = Stage(0, spine_of(model), 0, LayerStreams(5), num_slices=2)
    plain = Stage(0, spine_of(model), 0, LayerStreams(5))
    first, second = (sliced.forward(2 + k, ones).value for k in range(2))
    assert torch.equal(first, plain.forward(1, ones).value)
    assert not torch.equal(first, second)
    again = [sliced.forward(2 + k, ones).value for k in range(2)]
    assert torch.equal(again[1], second)


def test_a_program_numbers_slices_through():
    schedule = add_recompute(families.build("seq1f1b", num_ranks=2, num_microbatches=3))
    program = RankProgram(Segment.whole(schedule), 1)
    assert sorted(program.keeps) == [(1, unit) for unit in range(6)]
    assert set(program.keeps.values()) == {Keep.INPUT}
    forwards = [op for op in program.ops if str(op)[1] == "F"]
    assert sorted(map(program.unit, forwards)) == list(range(6))
    mixed = RankProgram(Segment.whole(Schedule.parse("0F0,0F0.1,0I0.1,0B0,0W0.1\n")), 0)
    assert mixed.keeps == {(0, 0): Keep.EVERYTHING, (0, 1): Keep.SPLIT}
