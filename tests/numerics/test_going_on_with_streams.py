"""Who leaves a loop over a stream goes on with it: no frame is lost, and weights can be read."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from penstock.base.errors import DeadlineError
from penstock.core.versions import Sideways, Stash
from penstock.engine.run.drive.driver import Deadlines
from penstock.training.live import intake
from tests.kit.live import (
    LEARN,
    differences,
    frames_of,
    live_plan,
    pushed,
    replayed,
    stream_of,
    weights_apart,
)
from tests.kit.streams import layered_model

FRAMES = frames_of([LEARN] * 24)


class Camera:
    """Gives frames, and knows how many it has given."""

    def __init__(self, seconds=0.0):
        self.num_read, self._seconds = 0, seconds

    def frames(self):
        for frame, target, _ in FRAMES:
            time.sleep(self._seconds)
            self.num_read += 1
            yield frame, target


def left_at(number, stream, frames, **how):
    """The results until a frame's; the loop is left then."""
    results = []
    for result in stream.over(frames, **how):
        results.append(result)
        if result.frame == number:
            break
    return results


def test_a_loop_that_is_left_goes_on_by_hand():
    """The reader read on for whoever was gone: "generator already executing", and a frame lost."""
    model, camera = layered_model(), Camera(0.005)
    plan, frames = live_plan(model, 3), camera.frames()
    with stream_of(model, plan) as stream:
        results = left_at(5, stream, frames)
        for frame, target in frames:
            stream.put(frame, target)
        results += stream.rest()
        assert stream.report.num_given == camera.num_read == len(FRAMES)
    seen, reference, _ = replayed(plan, FRAMES)
    assert not differences(results, seen)
    assert not weights_apart(model, reference)


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_a_loop_that_is_left_goes_on_in_another_one(seconds):
    model, camera = layered_model(), Camera(seconds)
    plan, frames = live_plan(model, 3), camera.frames()
    with stream_of(model, plan) as stream:
        results = left_at(3, stream, frames)
        results += left_at(9, stream, frames)
        results += stream.over(frames)
    assert not differences(results, replayed(plan, FRAMES)[0])


@pytest.mark.parametrize("when_late", ["drop-oldest", "raise"])
def test_every_frame_that_was_read_is_given_or_dropped(when_late):
    model, camera = layered_model(), Camera()
    with stream_of(model, live_plan(model, 2)) as stream:
        rate = 2 if when_late == "raise" else None
        num_taken = len(left_at(0, stream, camera.frames(), rate=rate, when_late=when_late))
        report = stream.report
        num_taken += len(list(stream.rest()))
    assert report.num_given == camera.num_read
    assert num_taken + report.num_dropped == report.num_given


def test_a_source_that_gives_nothing_holds_nobody_back(monkeypatch):
    """Its frame comes when it comes, before those that another loop reads."""
    monkeypatch.setattr(intake, "_PARTING_SECONDS", 0.05)
    model, goes_on = layered_model(), threading.Event()
    plan = live_plan(model, 2)

    def camera():
        for number, (frame, target, _) in enumerate(FRAMES):
            if number == 5:
                goes_on.wait(60)
            yield frame, target

    frames = camera()
    with stream_of(model, plan) as stream:
        results = left_at(4, stream, frames)
        threading.Timer(0.2, goes_on.set).start()
        results += stream.over(frames)
    assert not differences(results, replayed(plan, FRAMES)[0])


def test_what_a_source_raises_for_nobody_is_told_once_to_who_comes_next():
    model = layered_model()

    class Broken:
        is_broken = False

        def __iter__(self):
            yield FRAMES[0][:2]
            self.is_broken = not self.is_broken
            if self.is_broken:
                raise OSError("the camera is gone")

    source = Broken()
    with stream_of(model, live_plan(model, 1)) as stream:
        left_at(0, stream, source)
        with pytest.raises(OSError, match="camera"):
            list(stream.over(source))
        assert len(list(stream.over(source))) == 1


class _SlowBack(torch.autograd.Function):
    @staticmethod
    def forward(context, value, seconds):
        context.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class SlowBack(nn.Module):
    """Its backward takes its time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, value):
        return _SlowBack.apply(value, self.seconds)


def slow_model(seconds):
    return nn.Sequential(*(nn.Sequential(layer, SlowBack(seconds)) for layer in layered_model(3)))


def test_the_state_behind_the_rest_has_every_update_and_changes_no_more():
    """Outputs leave the last stage long before the last updates are made."""
    model = slow_model(0.05)
    plan = live_plan(model, 3)
    with stream_of(model, plan) as stream:
        pushed(stream, FRAMES[:8])
        state = stream.state_dict()
        pushed(stream, FRAMES[8:12])
        later = stream.state_dict()
    for count, told in ((8, state), (12, later)):
        expected = replayed(plan, FRAMES[:count], slow_model(0.0))[1].state_dict()
        assert [*told] == [*expected]
        assert all(torch.equal(told[name], value) for name, value in expected.items())
    closed = stream.state_dict()
    assert all(torch.equal(closed[name], later[name]) for name in later)


def test_a_supervisor_knows_the_frame_as_it_knows_a_step():
    """Or an error that comes at another frame would be taken for the same one, and end the job."""
    model = layered_model()
    with stream_of(model, live_plan(model, 2)) as stream:
        pushed(stream, FRAMES[:8])
        notes = stream._parts.feed._logbook.read()
    assert (notes.first_step, notes.step) == (0, 7)


@pytest.mark.parametrize("policy", [Sideways(), Stash()])
def test_the_state_may_be_read_at_any_time(policy):
    model = layered_model()
    states = []
    with stream_of(model, live_plan(model, 3, policy)) as stream:
        states.append(stream.state_dict())
        for frame, target, _ in FRAMES:
            stream(frame, target)
            states.append(stream.state_dict())
        list(stream.rest())
    assert not any(
        value.data_ptr() == model.state_dict()[name].data_ptr()
        for state in states
        for name, value in state.items()
    )
    changed = [
        any(not torch.equal(before[name], after[name]) for name in before)
        for before, after in pairwise(states)
    ]
    assert sum(changed) > len(FRAMES) // 2


def test_a_rank_that_is_not_through_in_time_is_told():
    release = threading.Event()

    class Held(nn.Module):
        def forward(self, value):
            release.wait(60)
            return value

    model = nn.Sequential(layered_model(1), Held())
    with stream_of(model, live_plan(model, 2)) as stream:
        stream._loop._parts = replace(stream._parts, deadlines=Deadlines.of(0.5, None))
        stream.put(*FRAMES[0][:2])
        with pytest.raises(DeadlineError, match="rank 1 was not through with the frames"):
            stream.state_dict()
        release.set()
        assert len(list(stream.rest())) == 1
