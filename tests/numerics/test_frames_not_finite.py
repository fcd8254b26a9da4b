"""Nothing is learned through a frame that is not finite, and the error names that frame.

A stream's first stages go back through a frame with gradients of frames before it, long before its
loss tells that it is not finite: one such frame made the weights of all stages NaN.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

from penstock.base.errors import RunError, StageError
from penstock.core.versions import Latest, Sideways, Stash
from penstock.trial.reference.sideways_replay import SidewaysReplay
from tests.kit.live import LEARN, SEED, adam, frames_of, live_plan, pushed, stream_of
from tests.kit.streams import WIDTH, cuts_of, layered_model

SPOILED = 9
NUM_FRAMES = 18
NAN = float("nan")


class _NanBack(torch.autograd.Function):
    @staticmethod
    def forward(_, value):
        return value.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * NAN


class Spoiling(nn.Module):
    """Makes one frame NaN, or the gradients that go back through it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, value):
        self.calls += 1
        if self.calls - 1 != SPOILED or self.how is None:
            return value
        return _NanBack.apply(value) if self.how == "backward" else value * NAN


def model_with(place=None, how=None, num_stages=3):
    """Layers of which the last one of a stage may spoil a frame; one layer to a stage."""
    layers = [*layered_model(num_stages)]
    return nn.Sequential(
        *(
            nn.Sequential(layer, Spoiling(how if stage == place else None))
            for stage, layer in enumerate(layers)
        )
    )


def histories(plan, frames, model=None):
    """By stage, its weights at first and after each tick of an undisturbed replay."""
    model = model_with() if model is None else model
    replay = SidewaysReplay(
        model, cuts_of(plan), nn.functional.mse_loss, adam, rates="divided", seed=SEED
    )
    ticks = [weights_by_stage(model, plan)]
    for frame, target, learn in frames:
        replay.push(frame, target, learn=learn)
        ticks.append(weights_by_stage(model, plan))
    return list(zip(*ticks, strict=True))


def weights_by_stage(model, plan):
    ends = [*accumulate(cuts_of(plan), initial=0)]
    return [
        torch.cat([p.detach().flatten().clone() for p in model[first:end].parameters()])
        for first, end in pairwise(ends)
    ]


def fails(model, plan, frames, **how):
    with pytest.raises(StageError) as caught, stream_of(model, plan, **how) as stream:
        pushed(stream, frames)
    return str(caught.value)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(
    ("place", "how"),
    [(None, None), (0, "forward"), (1, "forward"), (0, "backward"), (1, "backward")],
)
def test_no_gradient_of_others_goes_through_it(place, how, labelled):
    model, frames = model_with(place, how), frames_of([LEARN] * NUM_FRAMES)
    plan = live_plan(model, 3)
    expected = histories(plan, frames)
    if place is None:
        frames[SPOILED].frame.fill_(NAN)
    if not labelled:
        frames[SPOILED] = frames[SPOILED]._replace(target=None)
    error, where = fails(model, plan, frames), place or 0
    assert f"stage {where}, frame {SPOILED}, microbatch {SPOILED}, op {where}" in error
    assert "is nan; nothing has been learned through it" in error
    for stage, weights in enumerate(weights_by_stage(model, plan)):
        # The stages before have gone on, until its gradient would have come; those behind have had
        # the frame, if it is only gradients that it spoils.
        more = 2 * (2 - stage) if stage < where else int(how == "backward" and stage > where)
        allowed = expected[stage][: SPOILED + stage + more + 1]
        assert any(torch.equal(weights, then) for then in allowed)


class Shift(nn.Module):
    """Its gradient is the one that comes, whatever the frame holds."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, value):
        return value + self.shift


@pytest.mark.parametrize("labelled", [True, False])
def test_no_finite_gradient_goes_through_it_either(labelled):
    model, frames = nn.Sequential(Shift(), Shift(), Shift()), frames_of([LEARN] * NUM_FRAMES)
    plan = live_plan(model, 3)
    expected = histories(plan, frames, nn.Sequential(Shift(), Shift(), Shift()))
    frames[SPOILED].frame.fill_(float("inf"))
    if not labelled:
        frames[SPOILED] = frames[SPOILED]._replace(target=None)
    error = fails(model, plan, frames)
    assert f"stage 0, frame {SPOILED}, microbatch {SPOILED}, op 0F{SPOILED}: " in error
    assert "the output of stage 0 is inf; nothing has been learned through it" in error
    for stage, weights in enumerate(weights_by_stage(model, plan)):
        assert any(torch.equal(weights, then) for then in expected[stage][: SPOILED + stage + 1])


def test_what_has_no_loss_that_counts_is_told_by_the_loss_of_its_frame():
    model, frames = model_with(), frames_of([LEARN] * NUM_FRAMES)
    frames[SPOILED].target.fill_(NAN)
    error = fails(model, live_plan(model, 3), frames)
    assert f"stage 2, frame {SPOILED}, microbatch {SPOILED}, op 2F{SPOILED}: " in error
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("policy", [Stash(), Latest()])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_gradient_through_its_own_frame_is_looked_at_too(policy, place):
    model = model_with(place, "backward")
    error = fails(model, live_plan(model, 3, policy), frames_of([LEARN] * NUM_FRAMES))
    assert f"stage {place}, frame {SPOILED}, microbatch {SPOILED}, op {place}B{SPOILED}: " in error
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kinds", [{"learn": False}, {"target": None}])
def test_what_nothing_can_be_learned_through_stops_nobody(kinds):
    """A prediction leaves no graph; through its own graph only its own gradient would go."""
    policy = Stash() if "target" in kinds else Sideways()
    model, frames = model_with(), frames_of([LEARN] * NUM_FRAMES)
    frames[SPOILED].frame.fill_(NAN)
    frames[SPOILED] = frames[SPOILED]._replace(**kinds)
    with stream_of(model, live_plan(model, 3, policy)) as stream:
        results = pushed(stream, frames)
    assert [bool(result.output.isfinite().all()) for result in results].index(False) == SPOILED
    assert sum(not result.output.isfinite().all() for result in results) == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


class Masking(nn.Module):
    """Gives a mask beside its value, as attention takes it: infinite, and nothing to learn."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        return self.layer(value), torch.full_like(value.detach(), -float("inf"))[:, :1]


class Masked(nn.Module):
    def forward(self, pair):
        value, mask = pair
        return value + mask.exp()


def test_an_infinite_mask_crosses_stages():
    first, last = layered_model(2)
    model, frames = nn.Sequential(Masking(first), Masked(), last), frames_of([LEARN] * 8)
    with stream_of(model, live_plan(model, 2, cuts=[1])) as stream:
        assert len(pushed(stream, frames)) == 8


def test_the_frame_is_named_as_its_results_are_where_some_were_dropped_or_came_before(tmp_path):
    model, frames = model_with(), frames_of([LEARN] * NUM_FRAMES)
    plan = live_plan(model, 3)
    with stream_of(model, plan) as stream:
        pushed(stream, frames[:5])
        stream.save(tmp_path)
    stream = stream_of(model, plan)
    stream.load(tmp_path)
    frames[SPOILED].frame.fill_(NAN)
    with pytest.raises(StageError, match="stage 0, frame 4, microbatch 9, op 0F9: "), stream:
        pushed(stream, frames[5:])


def test_what_can_be_done_afterwards(tmp_path):
    """Results before it can be taken, the weights read; the model begins another stream."""
    model, frames = model_with(), frames_of([LEARN] * NUM_FRAMES)
    plan = live_plan(model, 3)
    stream = stream_of(model, plan)
    pushed(stream, frames[:5])
    stream.save(tmp_path)
    frames[SPOILED].frame.fill_(NAN)
    results = []
    with pytest.raises(StageError, match=f"frame {SPOILED}"):
        for frame, target, _ in frames[5:]:
            stream.put(frame, target)
        for result in stream.rest():
            results.append(result.frame)
    with pytest.raises(StageError, match=f"frame {SPOILED}"):
        while (result := stream.get()) is not None:  # others may have come since
            results.append(result.frame)
    assert results == list(range(5, 5 + len(results)))
    for call in (lambda: stream.put(frames[0].frame), lambda: stream.save(tmp_path)):
        with pytest.raises(StageError, match=f"frame {SPOILED}"):
            call()
    assert all(value.isfinite().all() for value in stream.state_dict().values())
    stream.close()  # who has heard of it hears no more
    with stream_of(model, plan) as another:
        assert another.load(tmp_path) == 5
        assert len(pushed(another, frames[5:SPOILED])) == SPOILED - 5


def test_it_passes_if_one_wants_it():
    model, frames = model_with(), frames_of([LEARN] * NUM_FRAMES)
    frames[SPOILED].frame.fill_(NAN)
    try:
        with stream_of(model, live_plan(model, 3), stop_at_nan=False) as stream:
            assert len(pushed(stream, frames)) == NUM_FRAMES
    except RunError as error:
        pytest.fail(str(error))
    assert not all(parameter.isfinite().all() for parameter in model.parameters())
