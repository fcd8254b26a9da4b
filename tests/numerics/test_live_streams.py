"""Live streams equal the recurrence, frame by frame, however fast their ranks and sources are."""

from __future__ import annotations

import gc
import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock as pk
from penstock.base.errors import InputError, RunError, StageError
from penstock.core.versions import DoubleBuffer, Sideways, Stash
from penstock.engine.stage.microbatch_graph import MicrobatchGraph
from penstock.trial.reference.delayed_replay import DelayedReplay
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.examples import examples, more
from tests.kit.live import (
    LEARN,
    PREDICT,
    SEED,
    UNLABELLED,
    Given,
    adam,
    differences,
    frames_of,
    live_plan,
    pushed,
    replayed,
    stream_of,
    weights_apart,
)
from tests.kit.streams import WIDTH, cuts_of, layered_model
from tests.numerics.test_one_logical_model_shared import UNet, picture_batch

KINDS = st.lists(st.sampled_from([LEARN, LEARN, UNLABELLED, PREDICT]), min_size=1, max_size=16)


class Slow(nn.Module):
    """Takes as long as it is told, another time for each frame."""

    def __init__(self, waits):
        super().__init__()
        self.waits, self.calls = waits, 0

    def forward(self, value):
        self.calls += 1
        time.sleep(self.waits[self.calls % len(self.waits)])
        return value


def slowed(waits):
    """The model of these tests, whose layers take their time."""
    model = layered_model()
    return nn.Sequential(*(nn.Sequential(layer, Slow(waits[i:])) for i, layer in enumerate(model)))


@given(kinds=KINDS, num_stages=st.integers(1, 4), rates=st.sampled_from(["divided", "given"]))
@examples(12)
def test_a_stream_equals_the_recurrence_tick_by_tick(kinds, num_stages, rates):
    frames, model = frames_of(kinds), layered_model()
    plan = live_plan(model, num_stages, Sideways(rates=rates))
    with stream_of(model, plan) as stream:
        results = pushed(stream, frames)
    seen, reference, replay = replayed(plan, frames)
    assert not differences(results, seen)
    assert not weights_apart(model, reference)
    assert stream.num_gradients_dropped == sum(replay.dropped)


@given(
    waits=st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=6, max_size=9),
    when_late=st.sampled_from(["wait", "drop-oldest"]),
    rate=st.sampled_from([None, 150.0]),
)
@examples(5)
def test_no_timing_changes_what_admitted_frames_give(waits, when_late, rate):
    frames, model = frames_of([LEARN] * 14), slowed(waits)
    plan = live_plan(model, 3)
    with stream_of(model, plan) as stream:
        source = [(frame, target) for frame, target, _ in frames]
        results = list(stream.over(source, rate=rate, when_late=when_late))
    admitted = [frames[result.frame] for result in results]
    assert len(admitted) + stream.report.num_dropped == len(frames)
    assert [result.frame for result in results] == sorted(result.frame for result in results)
    seen, reference, _ = replayed(plan, admitted, slowed([0.0] * 9))
    assert not differences(results, seen)
    assert not weights_apart(model, reference)


def test_one_stage_is_online_training_to_the_bit():
    frames, model, other = frames_of([LEARN] * 9), layered_model(), layered_model()
    with stream_of(model, live_plan(model, 1)) as stream:
        results = pushed(stream, frames)
    alone = SingleDevice(other, 1, nn.functional.mse_loss, adam, seed=SEED)
    losses = [alone.step(frame, target) for frame, target, _ in frames]
    assert torch.equal(torch.stack([result.loss for result in results]), torch.stack(losses))
    assert not weights_apart(model, other)


def test_weight_stashing_follows_a_stream_as_its_delays_say():
    frames, model, other = frames_of([LEARN] * 9), layered_model(), layered_model()
    plan = live_plan(model, 3, Stash())
    with stream_of(model, plan) as stream:
        results = pushed(stream, frames)
    loss = nn.functional.mse_loss
    replay = DelayedReplay(other, cuts_of(plan), plan.versions, 1, loss, adam, seed=SEED)
    losses = replay.train([(frame, target) for frame, target, _ in frames])
    assert torch.equal(torch.stack([result.loss for result in results]), torch.stack(losses))
    assert not weights_apart(model, other)


@pytest.mark.parametrize("policy", [Sideways(), Stash()])
def test_nothing_moves_without_a_gradient(policy):
    model = layered_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = []

    def remembered(parameters):
        made.append(torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5))
        return made[-1]

    schedulers = []

    def scheduled(optimizer):
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return schedulers[-1]

    plan = live_plan(model, 3, policy)
    how = {"optimizer": remembered, "lr_scheduler": scheduled}
    with stream_of(model, plan, **how) as stream:
        pushed(stream, frames_of([UNLABELLED, PREDICT] * 6))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(optimizer.state for optimizer in made)
    assert [scheduler.last_epoch for scheduler in schedulers] == [0] * 3


def test_the_first_stage_moves_when_the_first_gradient_has_come_back():
    model, frames = layered_model(), frames_of([LEARN] * 8)
    first = [parameter.detach().clone() for parameter in model[0].parameters()]
    moved = []

    def look(module, _):
        now = list(module.parameters())
        moved.append(any(not torch.equal(a, b) for a, b in zip(first, now, strict=True)))

    model[0].register_forward_pre_hook(look)
    with stream_of(model, live_plan(model, 3)) as stream:
        pushed(stream, frames)
    assert moved.index(True) == 5  # behind the frame that comes 2(p−1) later


def graphs_alive() -> int:
    gc.collect()
    return sum(type(thing) is MicrobatchGraph for thing in gc.get_objects())


@pytest.mark.parametrize("num_stages", [more(1), 2, more(4)])
def test_a_stage_keeps_one_graph_however_long_the_stream(num_stages):
    model, alive, before = layered_model(), [], graphs_alive()
    with stream_of(model, live_plan(model, num_stages)) as stream:
        for number, (frame, target, _) in enumerate(frames_of([LEARN] * 40)):
            stream(frame, target)
            if number in (2, 20, 39):
                alive.append(graphs_alive() - before)
    assert max(alive) <= num_stages


@pytest.mark.parametrize(("num_stages", "behind"), [(1, 3), (2, 1), (4, 2), (4, 9), more(3, 20)])
def test_saved_within_a_stream_and_resumed_equals_uninterrupted(tmp_path, num_stages, behind):
    frames = frames_of([LEARN, UNLABELLED, LEARN, LEARN, PREDICT] * 5)
    whole, resumed = layered_model(), layered_model()
    plan = live_plan(whole, num_stages)

    def scheduled(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    with stream_of(whole, plan, lr_scheduler=scheduled) as stream:
        begun = pushed(stream, frames[:behind])
        stream.save(tmp_path, position={"frame": behind})
        rest = pushed(stream, frames[behind:])
    assert len(begun) == behind
    with stream_of(resumed, plan, lr_scheduler=scheduled, seed=99) as stream:
        assert stream.load(tmp_path) == {"frame": behind}
        again = pushed(stream, frames[behind:])
    assert not differences(again, rest)
    assert not weights_apart(resumed, whole)


def test_a_stream_saved_with_other_cuts_resumes_without_what_was_on_its_way(tmp_path):
    model, other = layered_model(), layered_model()
    with stream_of(model, live_plan(model, 3)) as stream:
        pushed(stream, frames_of([LEARN] * 9))
        stream.save(tmp_path)
    with stream_of(other, live_plan(other, 2)) as stream:
        with pytest.warns(UserWarning, match="gradients that were on their way"):
            assert stream.load(tmp_path) == 9
        assert len(pushed(stream, frames_of([LEARN] * 4))) == 4


class Counting(nn.Module):
    """Carries state from frame to frame, and detaches it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(1, WIDTH, dtype=torch.float64))
        self.mix = nn.Linear(WIDTH, WIDTH).double()
        self.seen = []

    def forward(self, value):
        self.seen.append(float(value.detach()[0, 0]))
        self.state = torch.tanh(self.mix(value) + self.state).detach()
        return self.mix(value) + self.state


def test_state_that_a_layer_carries_sees_every_admitted_frame_once_and_in_order():
    torch.manual_seed(2)
    model = nn.Sequential(Counting(), Slow([0.004]), Counting())
    frames = frames_of([LEARN] * 20, rows=1)
    with stream_of(model, live_plan(model, 3)) as stream:
        source = [(frame, target) for frame, target, _ in frames]
        results = list(stream.over(source, rate=400, when_late="drop-oldest"))
    admitted = [result.frame for result in results]
    assert model[0].seen == [float(frames[number].frame[0, 0]) for number in admitted]
    assert len(model[2].seen) == len(admitted)


def test_push_gives_the_result_of_p_minus_1_frames_ago():
    model = layered_model()
    with stream_of(model, live_plan(model, 3)) as stream:
        given = [stream(frame, target) for frame, target, _ in frames_of([LEARN] * 6)]
        frames = [None if result is None else result.frame for result in given]
        assert frames == [None, None, 0, 1, 2, 3]
        assert [result.frame for result in stream.rest()] == [4, 5]
        assert stream.get() is None


def test_put_and_get_do_not_wait():
    release = threading.Event()

    class Held(nn.Module):
        def forward(self, value):
            release.wait(60)
            return value

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Held())
    frames = frames_of([LEARN] * 4)
    with stream_of(model, live_plan(model, 2)) as stream:
        for frame, target, _ in frames:
            assert stream.put(frame, target)
        assert stream.get() is None
        release.set()
        assert len(list(stream.rest())) == 4


def test_no_more_frames_enter_than_there_are_stages():
    """Or the saturated latency would be more than p ticks: eager forwards let 2p−1 of them in."""
    release, entered = threading.Event(), Breaking(100)

    class Held(nn.Module):
        def forward(self, value):
            release.wait(60)
            return value

    model = nn.Sequential(entered, nn.Linear(WIDTH, WIDTH).double(), Held())
    with stream_of(model, live_plan(model, 3, cuts=[1, 2]), loss=None) as stream:
        for frame, _, _ in frames_of([LEARN] * 12):
            stream.put(frame)
        time.sleep(0.3)
        assert entered.calls <= 3
        release.set()
        assert len(list(stream.rest())) == 12


def test_what_a_caller_overwrites_was_taken_before():
    frames, model = frames_of([LEARN] * 8), layered_model()
    plan = live_plan(model, 3)
    frame, target = frames[0].frame.clone(), frames[0].target.clone()
    results = []
    with stream_of(model, plan) as stream:
        for given_frame, given_target, _ in frames:
            frame.copy_(given_frame)
            target.copy_(given_target)
            stream.put(frame, target)
            frame.zero_()
            target.zero_()
        results = list(stream.rest())
    assert not differences(results, replayed(plan, frames)[0])


def test_the_largest_stable_rate_is_that_of_the_formula():
    """αλ ≤ 2·sin(π/(8(p−1−s)+2)) at the first of three stages, the others of which learn nothing;
    the replay is held to more digits, and at every stage."""
    num_stages, age = 3, 4
    limit = 2 * math.sin(math.pi / (4 * age + 2))

    def grows(rate, num_frames=600):
        model = nn.Sequential(Weight(1.0), Through(), Through())
        plan = live_plan(model, num_stages, Sideways(rates="given"))

        def sgd(parameters):
            return torch.optim.SGD(parameters, lr=rate)

        one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
        with stream_of(model, plan, loss=half_square, optimizer=sgd, stop_at_nan=False) as stream:
            losses = [float(result.loss) for result in stream.over([(one, zero)] * num_frames)]
        return max(losses[-60:]) > max(losses[100:160])

    assert not grows(limit * 0.995)
    assert grows(limit * 1.005)


class Weight(nn.Module):
    """One number, times the value."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, value):
        return self.weight * value


class Through(nn.Module):
    """Gives what it is given."""

    def forward(self, value):
        return value * 1.0


def half_square(output, target):
    return 0.5 * (output - target).square().sum()


@pytest.mark.parametrize(
    ("policy", "schedule", "told"),
    [(DoubleBuffer(), None, "updates after every frame"), (None, "1f1b", "live stream needs")],
)
def test_plans_that_cannot_follow_a_stream_are_refused(policy, schedule, told):
    from tests.kit.helpers import make_plan

    model = layered_model()
    plan = make_plan(model, 2, 1, schedule) if schedule else live_plan(model, 2, policy)
    with pytest.raises(InputError, match=told):
        stream_of(model, plan)


def test_frames_of_another_shape_are_told_apart():
    model = layered_model()
    with stream_of(model, live_plan(model, 3)) as stream, pytest.raises(StageError) as caught:
        for rows in (2, 2, 2, 3, 3, 3, 3):
            ((frame, target, _),) = frames_of([LEARN], rows=rows)
            stream(frame, target)
        list(stream.rest())
    assert "frames of a stream must have the same shape" in str(caught.value)


def test_wrong_calls_are_told_at_once(tmp_path):
    model = layered_model()
    ((frame, target, _),) = frames_of([LEARN])
    with stream_of(model, live_plan(model, 2)) as stream:
        with pytest.raises(InputError, match="holds no tensor"):
            stream.put("a frame")
        with pytest.raises(InputError, match="when_late"):
            stream.put(frame, target, when_late="drop")
        with pytest.raises(InputError, match="rate"):
            next(stream.over([frame], rate=0))
        stream(frame, target)
        with pytest.raises(InputError, match="before the first frame"):
            stream.load(tmp_path)
    with pytest.raises(InputError, match="closed"):
        stream(frame, target)
    with (
        stream_of(layered_model(), live_plan(model, 2), loss=None) as stream,
        pytest.raises(InputError, match="without a loss"),
    ):
        stream(frame, target)
    with pytest.raises(InputError, match="rates"):
        stream_of(model, live_plan(model, 2), rates="halved")


class Breaking(nn.Module):
    """Fails at one frame."""

    def __init__(self, frame):
        super().__init__()
        self.frame, self.calls = frame, 0

    def forward(self, value):
        self.calls += 1
        if self.calls > self.frame:
            raise ValueError("out of film")
        return value


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_layer_that_fails_ends_the_stream_with_its_name(place):
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    layers.insert(place + 1, Breaking(5))
    model = nn.Sequential(*layers)
    plan = live_plan(model, 3, cuts=[1 + (place == 0), 2 + (place < 2)])
    frames = [(frame, target) for frame, target, _ in frames_of([LEARN] * 12)]
    with pytest.raises(StageError, match="out of film"), stream_of(model, plan) as stream:
        list(stream.over(frames))


def test_a_loss_that_is_no_number_ends_the_stream():
    model = layered_model()
    frames = frames_of([LEARN] * 6)
    frames[3].target.fill_(float("nan"))
    with pytest.raises(StageError, match="loss is nan"), stream_of(model, live_plan(model, 2)) as s:
        pushed(s, frames)


def test_a_source_that_fails_is_told_behind_the_results_before():
    def source():
        yield from [(frame, target) for frame, target, _ in frames_of([LEARN] * 5)]
        raise OSError("the camera is gone")

    model, results = layered_model(), []
    with stream_of(model, live_plan(model, 2)) as stream:
        with pytest.raises(OSError, match="camera"):
            results += iter(stream.over(source()))
        for result in stream.over([frame for frame, _, _ in frames_of([UNLABELLED] * 2)]):
            results.append(result)
    assert [result.frame for result in results[-2:]] == [5, 6]


def test_a_frame_that_is_late_may_be_an_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Slow([0.05]))
    frames = [(frame, target) for frame, target, _ in frames_of([LEARN] * 9)]
    with (
        stream_of(model, live_plan(model, 1)) as stream,
        pytest.raises(RunError, match="lower the"),
    ):
        list(stream.over(frames, rate=200, when_late="raise"))


def test_leaving_a_stream_early_ends_it():
    model = layered_model()
    endless = ((frame, target) for frame, target, _ in iter(lambda: frames_of([LEARN])[0], None))
    with stream_of(model, live_plan(model, 2)) as stream:
        for result in stream.over(endless):
            if result.frame == 5:
                break
    assert stream.report.num_results == 6


def test_the_report_tells_of_every_frame():
    model = layered_model()
    with stream_of(model, live_plan(model, 3)) as stream:
        results = pushed(stream, frames_of([LEARN, UNLABELLED] * 10))
        report = stream.report
    assert (report.num_given, report.num_results, report.num_labelled) == (20, 20, 10)
    losses = [float(result.loss) for result in results if result.loss is not None]
    assert report.mean_loss == pytest.approx(sum(losses) / len(losses))
    assert report.gradient_age == 4
    assert "prequential loss" in str(report)


def test_frames_that_change_fast_are_warned_of():
    model = layered_model()
    with stream_of(model, live_plan(model, 2)) as stream, pytest.warns(UserWarning, match="change"):
        pushed(stream, frames_of([LEARN] * 200))


def test_autocast_around_a_call_holds_for_its_frame():
    model = layered_model().float()
    frames = [Given(frame.float(), target.float()) for frame, target, _ in frames_of([LEARN] * 4)]
    dtypes = []

    def loss(output, target):
        dtypes.append(output.dtype)
        return nn.functional.mse_loss(output.float(), target)

    model.append(nn.Linear(WIDTH, WIDTH))
    plan = live_plan(model, 2)
    with stream_of(model, plan, loss=loss) as stream, torch.autocast("cpu", torch.bfloat16):
        pushed(stream, frames)
    assert dtypes == [torch.bfloat16] * 4


def test_drawing_over_an_output_changes_nothing_that_is_learned():
    frames, model = frames_of([LEARN] * 12), layered_model()
    plan = live_plan(model, 2)
    results = []
    with stream_of(model, plan) as stream:
        for result in stream.over((frame, target) for frame, target, _ in frames):
            results.append(result._replace(output=result.output.clone()))
            result.output.numpy()[:] = 0.0
    seen, reference, _ = replayed(plan, frames)
    assert not differences(results, seen)
    assert not weights_apart(model, reference)


def test_closing_ends_who_waits_for_results():
    model, count = layered_model(), 0
    stream = stream_of(model, live_plan(model, 2))
    endless = iter(lambda: frames_of([LEARN])[0][:2], None)
    for result in stream.over(endless):
        count = result.frame
        if count == 5:
            stream.close()
    assert count >= 5

    waiting = stream_of(layered_model(), live_plan(model, 2))
    waiting.put(*frames_of([LEARN])[0][:2])
    thread = threading.Thread(target=lambda: list(waiting.over(iter(threading.Event().wait, 1))))
    thread.daemon = True
    thread.start()
    time.sleep(0.1)
    waiting.close()
    thread.join(30)
    assert not thread.is_alive()


def test_frames_of_several_threads_have_numbers_of_their_own():
    model = layered_model()
    ((frame, target, _),) = frames_of([LEARN])
    with stream_of(model, live_plan(model, 2)) as stream:
        threads = [
            threading.Thread(target=lambda: [stream.put(frame, target) for _ in range(25)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result.frame for result in stream.rest()] == list(range(100))


def test_who_takes_results_slowly_sees_the_newest_frames():
    model = layered_model()
    source = [(frame, target) for frame, target, _ in frames_of([LEARN] * 60)]
    with stream_of(model, live_plan(model, 2)) as stream:
        taken = []
        for result in stream.over(source, rate=300, when_late="drop-oldest"):
            time.sleep(0.03)
            taken.append(result.frame)
        report = stream.report
    assert taken[-1] == 59
    assert report.num_given == 60 == report.num_results + report.num_dropped


def test_batches_of_a_loader_are_pairs():
    model = layered_model()
    with stream_of(model, live_plan(model, 2)) as stream:
        results = list(
            stream.over([[frame, target] for frame, target, _ in frames_of([LEARN] * 3)])
        )
        with pytest.raises(InputError, match="holds no tensor"):
            list(stream.over([None]))
    assert all(result.loss is not None for result in results)


def test_the_timeline_shows_the_order_of_the_schedule():
    model = layered_model()
    with stream_of(model, live_plan(model, 3)) as stream:
        pushed(stream, frames_of([LEARN] * 12))
    spans = [span for span in stream.timeline.spans if str(span.op)[1] in "FB" and span.rank == 0]
    steady = [str(span.op) for span in sorted(spans, key=lambda span: span.start)][6:12]
    assert steady == ["0F5", "0B1", "0F6", "0B2", "0F7", "0B3"]


def test_pk_stream_is_public():
    assert pk.stream.__module__.startswith("penstock.training.live")


@pytest.mark.parametrize("num_stages", [2, 4])
def test_skips_and_their_gradients_cross_stages_and_checkpoints(tmp_path, num_stages):
    whole, resumed = UNet(dropout=0.1), UNet(dropout=0.1)
    frames = [Given(*picture_batch(2, seed)) for seed in range(18)]
    frames[4] = frames[4]._replace(target=None)
    plan = live_plan(whole, num_stages)
    with stream_of(whole, plan) as stream:
        begun = pushed(stream, frames[:9])
        stream.save(tmp_path)
        rest = pushed(stream, frames[9:])
    seen, reference, _ = replayed(plan, frames, UNet(dropout=0.1))
    # A value that several stages take has several gradients, which are added in another order.
    assert not differences([*begun, *rest], seen, tolerance=1e-12)
    assert not weights_apart(whole, reference, tolerance=1e-12)
    with stream_of(resumed, plan) as stream:
        assert stream.load(tmp_path) == 9
        again = pushed(stream, frames[9:])
    assert not differences(again, rest)
    assert not weights_apart(resumed, whole)
