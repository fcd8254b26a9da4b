"""The replay of a live stream: against the recurrence written out with numbers, and its laws."""

from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import InputError, ModelError
from penstock.trial.reference.sideways_replay import Borrowed, SidewaysReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import examples
from tests.kit.scalar_replays import RATE, WEIGHTS, XS, YS, close, half_square, make_chain, sgd

LEARN, UNLABELLED, PREDICT = "learn", "unlabelled", "predict"
RATES = ["divided", "given"]
KINDS = st.lists(st.sampled_from([LEARN, LEARN, UNLABELLED, PREDICT]), min_size=1, max_size=14)


def scalar(value):
    return torch.tensor([[value]], dtype=torch.float64)


def pushed(replay, kinds):
    """What a stream of scalar frames of these kinds tells."""
    seen = []
    for number, kind in enumerate(kinds):
        target = None if kind == UNLABELLED else scalar(YS[number % 11])
        told = replay.push(scalar(XS[number % 11]), target, learn=kind != PREDICT)
        seen += [told] if told else []
    return seen + replay.finish()


def written_out(num_stages, kinds, divided):
    """(losses, weights, dropped, steps by stage), frame by frame instead of tick by tick."""
    weights, last = list(WEIGHTS[:num_stages]), num_stages - 1
    steps, dropped, losses = [0] * num_stages, [0] * num_stages, []
    coming = [{} for _ in range(num_stages)]  # by stage and frame: of its output
    for k, kind in enumerate(kinds):
        value = XS[k % 11]
        for s in range(num_stages):
            given, value = value, math.tanh(weights[s] * value)
            if s == last:
                error = value - YS[k % 11]
                losses.append(None if kind == UNLABELLED else error**2 / 2)
                if kind == LEARN:
                    coming[s][k] = error
            age = 2 * (last - s)
            gradient = coming[s].pop(k - age, None)
            if gradient is None:
                continue
            if kind == PREDICT:
                dropped[s] += 1
                continue
            slope = gradient * (1 - value**2)
            if s > 0:
                coming[s - 1][k - age] = slope * weights[s]
            weights[s] -= (RATE / max(1, age) if divided else RATE) * slope * given
            steps[s] += 1
    return (
        losses,
        weights,
        [count + len(left) for count, left in zip(dropped, coming, strict=True)],
        steps,
    )


@given(num_stages=st.sampled_from([1, 2, 3]), kinds=KINDS, rates=st.sampled_from(RATES))
@examples(25)
def test_it_is_the_recurrence_written_out(num_stages, kinds, rates):
    model = make_chain(num_stages)
    replay = SidewaysReplay(model, (2,) * num_stages, half_square, sgd, rates=rates)
    seen = pushed(replay, kinds)
    losses, weights, dropped, steps = written_out(num_stages, kinds, rates == "divided")
    assert [told.frame for told in seen] == list(range(len(kinds)))
    for told, loss in zip(seen, losses, strict=True):
        assert told.loss is None if loss is None else told.loss.item() == close(loss)
    assert [weight.item() for weight in model.parameters()] == close(weights)
    assert replay.dropped == dropped
    ran = [borrowed.stage for borrowed in replay.borrowed]
    assert [ran.count(stage) for stage in range(num_stages)] == steps


def picture_net():
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Conv2d(3, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(50, 4),
    )  # fmt: skip
    return net.double()


def pictures(count):
    generator = torch.Generator().manual_seed(5)
    frames = torch.randn(count, 1, 1, 5, 5, generator=generator, dtype=torch.float64)
    return [(frame, frame.flatten(1)[:, :4].tanh()) for frame in frames]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda own: torch.optim.SGD(own, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda own: torch.optim.AdamW(own, lr=0.01),
    ],
)
def test_one_stage_is_online_descent_to_the_bit(optimizer):
    ours, theirs = picture_net(), picture_net()
    seen = SidewaysReplay(ours, (7,), F.mse_loss, optimizer, seed=7).train(pictures(9))
    alone = SingleDevice(theirs, 1, F.mse_loss, optimizer, seed=7)
    for told, batch in zip(seen, pictures(9), strict=True):
        assert torch.equal(told.loss, alone.step(*batch))
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, wanted)


def radius(rate, num_stages, stage, rates="given"):
    """The growth per tick of one weight's error on a static quadratic of curvature 3, as told by
    the linear recurrence that the weights of a run obey."""
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(weight.weight, 1.0)
    layers = [weight if index == stage else nn.Identity() for index in range(num_stages)]
    replay = SidewaysReplay(
        nn.Sequential(*layers),
        (1,) * num_stages,
        lambda output, _: 1.5 * (output**2).sum(),
        lambda own: torch.optim.SGD(own, lr=rate / 3),
        rates=rates,
    )
    order = 2 * (num_stages - 1 - stage) + 1
    frame, trace = torch.ones(1, 1, dtype=torch.float64), []
    for _ in range(8 * order + 10):
        replay.push(frame, frame)
        trace.append(weight.weight.item())
    trace = trace[order:]  # while the pipeline fills, nothing moves
    rows = [trace[start : start + order] for start in range(len(trace) - order)]
    fitted, *_ = numpy.linalg.lstsq(numpy.array(rows), numpy.array(trace[order:]), rcond=None)
    return max(abs(numpy.roots([1.0, *(-fitted[::-1])])))


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (2, 0), (3, 1), (3, 0), (5, 0), (8, 5)])
def test_a_stage_is_stable_up_to_its_bound_to_six_digits(num_stages, stage):
    bound = 2 * math.sin(math.pi / (8 * (num_stages - 1 - stage) + 2))
    assert radius(bound * (1 - 1e-6), num_stages, stage) < 1
    assert radius(bound * (1 + 1e-6), num_stages, stage) > 1


@pytest.mark.parametrize(("num_stages", "stage"), [(2, 0), (3, 0), (6, 1)])
def test_divided_rates_do_not_blow_up_where_the_given_ones_do(num_stages, stage):
    assert radius(1.0, num_stages, stage, "given") > 1.05
    assert radius(1.0, num_stages, stage, "divided") < 1


def test_nothing_moves_without_a_gradient():
    """Weights and the optimizer's state begin to move with the first gradient, and stand still
    in the ticks of frames without a target."""
    model = make_chain(3)
    made = {}

    def optimizer(own):
        made[own.stage] = torch.optim.Adam(own, lr=0.1)
        assert own.delay == 2 * (2 - own.stage)
        return made[own.stage]

    replay = SidewaysReplay(model, (2, 2, 2), half_square, optimizer)
    moved = []
    for number, kind in enumerate([LEARN, UNLABELLED, LEARN] + [UNLABELLED] * 5):
        before = copy.deepcopy(list(model.parameters()))
        replay.push(scalar(XS[number]), None if kind == UNLABELLED else scalar(YS[number]))
        moved.append(
            [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        )
    # Frame 0 comes to the last stage at tick 2, and its gradient to the first at tick 4.
    ticks = [[number for number, row in enumerate(moved) if row[stage]] for stage in range(3)]
    assert ticks == [[4, 6], [3, 5], [2, 4]]
    for stage, own in made.items():
        assert [float(state["step"]) for state in own.state.values()] == [2], stage


def test_gradients_under_way_at_the_end_are_dropped_and_counted():
    def of(num_frames):
        replay = SidewaysReplay(make_chain(3), (2, 2, 2), half_square, sgd)
        pushed(replay, [LEARN] * num_frames)
        return replay

    assert [of(count).dropped for count in (1, 2, 3, 4, 9)] == [
        [0, 1, 0], [0, 2, 0], [1, 2, 0], [2, 2, 0], [2, 2, 0],
    ]  # fmt: skip
    assert Borrowed(0, gradient=4, graph=8) in of(9).borrowed
    assert {(own.stage, own.age) for own in of(9).borrowed} == {(0, 4), (1, 2), (2, 0)}


def test_a_second_stream_goes_on_with_the_weights_of_the_first():
    model, twin = make_chain(2), make_chain(2)
    replay = SidewaysReplay(model, (2, 2), half_square, sgd)
    pushed(replay, [LEARN] * 5)
    twin.load_state_dict(model.state_dict())
    again = pushed(replay, [LEARN] * 4)
    assert [told.frame for told in again] == [0, 1, 2, 3]
    pushed(SidewaysReplay(twin, (2, 2), half_square, sgd), [LEARN] * 4)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert replay.dropped == [2, 0]


class Remembers(nn.Module):
    """Mixes what it is given with what it gave last."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("state", torch.zeros((), dtype=torch.float64))
        self.given = []

    def forward(self, value):
        self.given.append(value.item())
        output = torch.tanh(self.weight * value + self.state)
        self.state = output.detach().squeeze()
        return output


def test_state_that_a_layer_carries_sees_each_frame_once_and_in_order():
    layers = [nn.Identity(), Remembers(), Remembers()]
    replay = SidewaysReplay(nn.Sequential(*layers), (1, 1, 1), half_square, sgd)
    seen = pushed(replay, [LEARN, PREDICT, UNLABELLED, LEARN, LEARN, PREDICT, LEARN])
    assert layers[1].given == list(XS[:7])
    assert layers[2].state.item() == seen[-1].output.item()
    assert len(layers[2].given) == 7


def test_a_frame_that_is_only_predicted_runs_in_evaluation_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    replay = SidewaysReplay(model, (1, 1), F.mse_loss, sgd, seed=0)
    frame = torch.ones(1, 64)
    seen = [replay.push(frame, learn=learn) for learn in (False, True, False, False)]
    dropped = [None if told is None else int((told.output == 0).sum()) for told in seen]
    assert dropped[:2] + dropped[3:] == [None, 0, 0]
    assert dropped[2] > 0
    assert model.training


class Fork(nn.Module):
    stashes = ("side",)

    def __init__(self, as_skip):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        if not as_skip:
            self.stashes = ()
        self.as_skip = as_skip

    def forward(self, value):
        wide = self.linear(value)
        return (wide, {"side": value * wide}) if self.as_skip else (wide, value * wide)


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value):
        if isinstance(value, tuple):
            return self.linear(value[0]).tanh(), value[1]
        return self.linear(value).tanh()


class Join(nn.Module):
    def __init__(self, as_skip):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.recalls = ("side",) if as_skip else ()

    def forward(self, value, side=None):
        value, side = (value, side) if side is not None else value
        return self.linear(value) + side


def test_skips_over_stages_are_what_tuples_through_them_are():
    def trained(as_skip):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), Fork(as_skip), Middle(), Join(as_skip)).double()
        frames = [(torch.randn(2, 3).double(), torch.randn(2, 3).double()) for _ in range(12)]
        replay = SidewaysReplay(
            model, (1, 1, 1, 1), F.mse_loss, lambda own: torch.optim.SGD(own, lr=0.1)
        )
        seen = replay.train([*frames[:5], (frames[5][0], None), *frames[6:]])
        return [told.output for told in seen], list(model.parameters())

    for mine, wanted in zip(*map(trained, (True, False)), strict=True):
        for one, other in zip(mine, wanted, strict=True):
            assert torch.equal(one, other)


def test_frames_are_left_as_they_are():
    frame = torch.tensor([[-1.0, 2.0]])
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    SidewaysReplay(model, (1, 1), F.mse_loss, sgd).train([(frame, frame)])
    assert frame.tolist() == [[-1.0, 2.0]]


def test_frozen_stages_hand_no_gradient_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    frames = [(torch.randn(1, 2), torch.randn(1, 2)) for _ in range(8)]
    replay = SidewaysReplay(model, (1, 1, 1), F.mse_loss, sgd)
    replay.train(frames)
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert changed == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_what_cannot_be_replayed_is_refused():
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ModelError, match="stage 1 shares a parameter with a stage before it"):
        SidewaysReplay(tied, (1, 1), F.mse_loss, sgd)
    with pytest.raises(InputError, match=r"cuts are \[1, 2\].*2 in all"):
        SidewaysReplay(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (1, 2), F.mse_loss, sgd)
    with pytest.raises(InputError, match="rates is 'halved'; use divided or given"):
        SidewaysReplay(nn.Sequential(nn.Linear(2, 2)), (1,), F.mse_loss, sgd, rates="halved")
    replay = SidewaysReplay(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (1, 1), F.mse_loss, sgd)
    sizes = [torch.ones(rows, 2) for rows in (1, 1, 3)]
    with pytest.raises(InputError, match=r"stage 0 made \(3, 2\) .* has shape \(1, 2\)"):
        replay.train(zip(sizes, sizes, strict=True))
